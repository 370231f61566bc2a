"""What the engine costs beyond the copy, or the file, that it cannot do without.

Each operation is measured in turn with its yardstick, on memory or files of the same kind:

    put, get      ECCacheEngine's, into and out of an arena that is full      a memcpy between the same places
    borrow        a pin on an entry and its end                               none; the same at any size
    disk_write    an entry in the arena to a file: hash, write, rename        the same three with plain file I/O
    disk_read     an entry back from its file into the arena, verified        opening, reading at once and hashing it

Files are read from the page cache: what is measured is the engine, not the disk. What a key takes in the index is
measured too, under each eviction policy.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from ec_p2p.cli.bench_index import index_bytes_per_key
from ec_p2p.config import ConfigError
from ec_p2p.engine import ECCacheEngine, StorageManager
from ec_p2p.engine.arena import Arena
from ec_p2p.engine.generation import SLAB_BYTES_PER_RECORD
from ec_p2p.engine.policy import POLICIES

LEAST_BYTES = SLAB_BYTES_PER_RECORD
"""An arena full of smaller entries has no records for all of them."""

_DIM = 1024
_ROW_BYTES = 2 * _DIM
_LEAST_ARENA = 64 << 20
_WARM_UP = 5
_BORROW_LIMIT_US = 20.0
_INDEX_LIMIT = 400
"""Bytes a key."""


class Limit(NamedTuple):
    """`times` the yardstick; for entries of less than `below` bytes at least `beyond_us` more than it."""

    times: float
    beyond_us: float = 0.0
    below: float = 0

    def us(self, yardstick_us: float, size: int) -> float:
        floor = yardstick_us + self.beyond_us if size < self.below else 0.0
        return max(self.times * yardstick_us, floor)

    def __str__(self) -> str:
        where = f"below {int(self.below) >> 20} MiB " if math.isfinite(self.below) else ""
        floor = f", {where}at least {self.beyond_us:g} us more than it" if self.beyond_us else ""
        return f"{self.times} x the yardstick{floor}"


# A put or get of few bytes takes longer than their memcpy whatever one does. A disk write is handed to another thread,
# and waited for.
_LIMITS = {
    "put": Limit(1.25, 25.0, 1 << 20),
    "get": Limit(1.25, 25.0, 1 << 20),
    "disk_write": Limit(1.3, 250.0, math.inf),
    "disk_read": Limit(1.3),
}
_LIMITS_IN_WORDS = {
    "borrow": f"{_BORROW_LIMIT_US:g} us",
    **{op: str(limit) for op, limit in _LIMITS.items()},
    "index": f"{_INDEX_LIMIT} bytes a key",
}

Samples = dict[str, list[float]]
Work = Callable[[], object]


def run(sizes: list[int], repeat: int, index_keys: int, folder: str | None, *, as_json: bool) -> int:
    """Measure and print. Returns the exit status."""
    with _scratch_in(folder) as scratch:
        rows = [row for size in map(_whole_rows, sizes) for row in _rows(size, measure(size, repeat, scratch))]
    index = {policy: index_bytes_per_key(index_keys, policy) for policy in POLICIES} if index_keys else {}
    if as_json:
        limits = _LIMITS_IN_WORDS
        print(json.dumps({"rows": rows, "index_keys": index_keys, "index_bytes_per_key": index, "limits": limits}))
        return 0
    print(f"engine, microseconds p50, {repeat} rounds")
    print(f"{'op':>12} {'bytes':>10} {'us':>11} {'limit':>11} {'ratio':>7}")
    for row in rows:
        over = "" if row["us"] <= row["limit_us"] else "  over"
        print(f"{row['op']:>12} {row['bytes']:>10} {row['us']:11.1f} {row['limit_us']:11.1f} {row['ratio']:7.3f}{over}")
    for policy, nbytes in index.items():
        over = "" if nbytes <= _INDEX_LIMIT else "  over"
        print(f"index: {nbytes:.0f} bytes a key at {index_keys} keys under {policy}, identity included{over}")
    for size in sizes:
        if _whole_rows(size) != size:
            print(f"note: an entry has whole rows of {_ROW_BYTES} bytes: {_whole_rows(size)} instead of {size}")
    print("limits: " + "; ".join(f"{op}: {words}" for op, words in _LIMITS_IN_WORDS.items()))
    return 0


def memory_for(size: int) -> int:
    """Bytes that `measure` takes at this size: two arenas, and a few tensors."""
    return (2 * _slots(size) + 4) * size


def _whole_rows(size: int) -> int:
    return size // _ROW_BYTES * _ROW_BYTES


def _slots(size: int) -> int:
    """How many entries an arena has room for."""
    return max(8, _LEAST_ARENA // size)


def _scratch_in(folder: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="ec-p2p-bench-", dir=folder)
    except OSError as error:
        raise ConfigError(f"--folder={folder or ''!r}; accepted: a folder to write to ({error.strerror})") from None


def _rows(size: int, samples: Samples) -> Iterator[dict[str, Any]]:
    for op in ("put", "get", "borrow", "disk_write", "disk_read"):
        us = statistics.median(samples[op]) * 1e6
        if op == "borrow":
            yardstick = limit = _BORROW_LIMIT_US
        else:
            yardstick = statistics.median(samples[f"{op} yardstick"]) * 1e6
            limit = _LIMITS[op].us(yardstick, size)
        yield {
            "op": op,
            "bytes": size,
            "us": round(us, 2),
            "yardstick_us": round(yardstick, 2),
            "limit_us": round(limit, 2),
            "ratio": round(us / yardstick, 3),
        }


def measure(size: int, repeat: int, folder: str) -> Samples:
    """Seconds of every measurement at `size` bytes an entry, which are whole rows: {operation: [...]}, and
    {operation + " yardstick": [...]} beside it."""
    source = torch.randn(size // _ROW_BYTES, _DIM).to(torch.bfloat16)
    slots = _slots(size)
    # Room for `slots` entries, and so many have been put: each put evicts what was put `slots` puts before.
    slab = slots * source.nbytes + (slots * source.nbytes >> 6) + (1 << 18)
    samples: Samples = defaultdict(list)
    with StorageManager(slab, slab_size=slab) as storage:
        _measure_memory(samples, source, storage, slots, repeat)
    with (
        tempfile.TemporaryDirectory(prefix="ec-p2p-bench-", dir=folder) as scratch,
        StorageManager(slab, slab_size=slab, local_disk=f"{scratch}/disk") as storage,
    ):
        _measure_disk(samples, source, storage, Path(scratch), repeat)
    return samples


def _measure_memory(samples: Samples, source: torch.Tensor, storage: StorageManager, slots: int, repeat: int) -> None:
    engine = ECCacheEngine("bench", torch.bfloat16, storage_manager=storage)
    size, address = source.nbytes, source.data_ptr()
    names = map(str, itertools.count())
    with Arena.create(slots * size, slots * size) as other:
        # Memory of the same kind as the engine's, committed as that is after a while, and walked through as that is.
        ctypes.memset(other.base, 1, other.nbytes)
        places = itertools.cycle(range(other.base, other.base + other.nbytes, size))

        def put() -> None:
            if not engine.put(next(names), source):
                raise RuntimeError(f"no room for an entry of {size} bytes")

        def copy_out() -> None:
            fresh = torch.empty_like(source)
            ctypes.memmove(fresh.data_ptr(), next(places), size)

        for _ in range(2 * slots):
            put()
        _alternate(samples, "put", repeat, put, lambda: ctypes.memmove(next(places), address, size))
        newest = int(next(names)) - 1
        kept = itertools.cycle(str(number) for number in range(newest - slots // 2, newest + 1))
        _alternate(samples, "get", repeat, lambda: engine.get(next(kept)), copy_out)
        identities = itertools.cycle([engine.identity(next(kept)) for _ in range(slots)])
        _alternate(samples, "borrow", repeat, lambda: _borrow(storage, next(identities)), lambda: None)


def _measure_disk(samples: Samples, source: torch.Tensor, storage: StorageManager, scratch: Path, repeat: int) -> None:
    engine = ECCacheEngine("bench", torch.bfloat16, storage_manager=storage)
    disk = storage.disk
    assert disk is not None
    engine.put("entry", source)
    engine.flush()
    [file] = scratch.rglob("*.safetensors")
    plain = scratch / "plain"
    identity = engine.identity("entry")
    entry = storage.cpu.peek(identity)
    assert entry is not None
    payload = storage.arena.buffer[entry.offset : entry.offset + entry.nbytes]
    with file.open("rb") as opened:
        header = opened.read(file.stat().st_size - entry.nbytes)

    def forget_file() -> None:
        # Behind the tier's back, which is what lets it write the entry once more.
        file.unlink()
        assert disk.look(identity) is None

    def write() -> None:
        storage.offer(entry)
        storage.flush()

    def forget_plain() -> None:
        plain.unlink(missing_ok=True)

    _alternate(
        samples, "disk_write", repeat, write, lambda: _write_plainly(plain, header, payload), forget_file, forget_plain
    )
    # Memory of the same kind as the one that the tier reads into.
    landing = Arena.create(len(header) + entry.nbytes, len(header) + entry.nbytes)
    _alternate(
        samples,
        "disk_read",
        repeat,
        lambda: _borrow(storage, identity),
        lambda: _read_plainly(str(file), landing.buffer),
        lambda: storage.cpu.remove(identity),
    )


def _alternate(
    samples: Samples,
    op: str,
    repeat: int,
    work: Work,
    yardstick: Work,
    before: Work = lambda: None,
    before_yardstick: Work = lambda: None,
) -> None:
    for number in range(_WARM_UP + repeat):
        before_yardstick()
        of_yardstick = _timed(yardstick)
        before()
        of_work = _timed(work)
        if number >= _WARM_UP:
            samples[f"{op} yardstick"].append(of_yardstick)
            samples[op].append(of_work)


def _timed(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _borrow(storage: StorageManager, identity: bytes) -> None:
    pin = storage.borrow(identity)
    assert pin is not None, "the entry is in memory or on disk"
    pin.close()


def _write_plainly(path: Path, header: bytes, payload: memoryview) -> None:
    xxhash.xxh3_128(payload).digest()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb", buffering=0) as file:
        os.writev(file.fileno(), [header, payload])
    temporary.rename(path)


# By a str: a Path takes as long to open a file as the operating system does.
def _read_plainly(path: str, landing: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(landing)
    xxhash.xxh3_128(landing).digest()
