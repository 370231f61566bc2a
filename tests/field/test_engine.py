"""The engine: what became of entries after restarts, damage, sick disks, odd names and odd tensors."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ec_p2p import ECCacheEngine, StorageManager, load_ec_engine_config
from ec_p2p.config import Config, ConfigError
from tests.engine.disks import Failing, Sick, count, run_in_a_small_disk, until
from tests.engine.entries import bytes_in, same

DTYPE = torch.float16
MIB = 1 << 20
FILE = MIB // 2 + 4096
"""Bytes of the file of an entry of the usual size."""


def engine(folder: Path, **settings: object) -> ECCacheEngine:
    given = {"max_local_cpu_size": "4MiB", "slab_size": "4MiB", "local_disk": str(folder), **settings}
    return ECCacheEngine("org/model", DTYPE, config=load_ec_engine_config(given, environ={}))


def engine_on_a_sick_disk(folder: Path, before: Callable[[str, tuple[Any, ...]], object]) -> ECCacheEngine:
    """`before` is called ahead of each file operation, and may wait or fail. The caller closes the manager."""
    storage = StorageManager(16 * MIB, slab_size=16 * MIB, local_disk=str(folder), files=Sick(before))
    return ECCacheEngine("org/model", DTYPE, storage_manager=storage)


def tensor(seed: int, rows: int = 256, dim: int = 1024) -> torch.Tensor:
    return torch.randn((rows, dim), generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def is_right(got: torch.Tensor | None, seed: int, rows: int = 256) -> bool:
    return got is not None and same(got, tensor(seed, rows))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.safetensors") if "damaged" not in path.parts)


def counted(one: ECCacheEngine, name: str, **labels: str) -> float:
    disk = one.storage_manager.disk
    assert disk is not None
    return count(disk, name, **labels)


# ---------------------------------------------------------------- restarts


def test_a_restart_finds_every_old_entry(tmp_path: Path) -> None:
    with engine(tmp_path) as before:
        for number in range(20):
            assert before.put(str(number), tensor(number))
            assert before.flush(30)
    with engine(tmp_path) as after:
        assert all(after.contains(str(number)) for number in range(20))
        assert all(is_right(after.get(str(number)), number) for number in range(20))


def test_old_entries_count_against_the_cap_before_a_new_one_is_written(tmp_path: Path) -> None:
    with engine(tmp_path) as before:
        for number in range(8):
            assert before.put(str(number), tensor(number))
            assert before.flush(30)
            [file] = tmp_path.rglob(f"{before.identity(str(number)).hex()}.safetensors")
            os.utime(file, (time.time() - 100 + number,) * 2)
    most = 0

    def watch(name: str, args: tuple[Any, ...]) -> None:
        nonlocal most
        if name == "rename":
            most = max(most, bytes_in(tmp_path))

    with (
        StorageManager(4 * MIB, local_disk=str(tmp_path), max_local_disk_size=5 * FILE, files=Sick(watch)) as storage,
        ECCacheEngine("org/model", DTYPE, storage_manager=storage) as after,
    ):
        for number in range(100, 104):
            assert after.put(str(number), tensor(number))
            assert after.flush(30)
        assert 0 < most <= 5 * FILE
        assert len(files(tmp_path)) == 5
        assert [number for number in range(8) if after.contains(str(number))] == [7]
        assert is_right(after.get("7"), 7)


# ---------------------------------------------------------------- damage


def _flip(at: int) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return harm


HARMS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "truncated by one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "truncated in the header": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "one byte longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "one byte flipped in the first word": _flip(5),
    "one byte flipped in the header": _flip(150),
    "one byte flipped": _flip(300_000),
    "last byte flipped": _flip(-1),
    "junk": lambda path: path.write_bytes(b"junk" * 200_000),
}


@pytest.mark.parametrize("alive", [True, False], ids=["harmed while in use", "harmed between two lives"])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_harmed_file_is_a_miss_set_aside_and_counted(
    tmp_path: Path, harm: Callable[[Path], object], alive: bool
) -> None:
    one = engine(tmp_path)
    assert one.put("a", tensor(1))
    assert one.flush(30)
    [file] = files(tmp_path)
    if alive:
        one.storage_manager.cpu.remove(one.identity("a"))
        harm(file)
    else:
        one.close()
        harm(file)
        one = engine(tmp_path)
    with one:
        harmed = file.read_bytes()
        assert one.get("a") is None
        assert not one.contains("a")
        until(lambda: counted(one, "disk_damaged") == 1)
        assert files(tmp_path) == []
        assert [path.read_bytes() for path in tmp_path.rglob("damaged/*")] == [harmed]
        assert one.put("a", tensor(1))
        assert one.flush(30)
        one.storage_manager.cpu.remove(one.identity("a"))
        assert is_right(one.get("a"), 1)


def test_a_vanished_file_is_a_miss(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        for name in ("a", "b"):
            assert one.put(name, tensor(1))
        assert one.flush(30)
        for name in ("a", "b"):
            one.storage_manager.cpu.remove(one.identity(name))
        for file in files(tmp_path):
            file.unlink()
        assert one.get("a") is None
        assert not one.contains("a")
        assert not one.contains("b")
        assert one.get("b") is None
        assert counted(one, "disk_reads", outcome="miss") == 1
        assert one.put("a", tensor(1))
        assert one.flush(30)
        assert len(files(tmp_path)) == 1


# ---------------------------------------------------------------- slow, full, failing, gone


def test_close_right_after_a_burst_on_a_slow_disk_leaves_whole_files_and_then_frees_the_memory(tmp_path: Path) -> None:
    open_at_writes: list[bool] = []

    def slow(name: str, args: tuple[Any, ...]) -> None:
        if name in ("pwritev", "rename"):
            time.sleep(0.01)
            open_at_writes.append(before.storage_manager.arena.fd >= 0)

    before = engine_on_a_sick_disk(tmp_path, slow)
    for number in range(7):
        assert before.put(str(number), tensor(number))
    before.storage_manager.close()
    assert open_at_writes
    assert all(open_at_writes)
    with pytest.raises(ValueError, match="closed"):
        before.put("late", tensor(1))
    assert [path.stat().st_size for path in files(tmp_path)] == [FILE] * 7
    for file in files(tmp_path):
        with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
            assert opened.get_tensor("embedding").shape == (256, 1024)
    with engine(tmp_path) as after:
        assert all(is_right(after.get(str(number)), number) for number in range(7))


FULL = """
import sys
from tests.field.test_engine import *

folder = Path(sys.argv[1])
with engine(folder) as one:
    for number in range(6):
        assert one.put(str(number), tensor(number))
        assert one.flush(30)
    assert one.storage_manager.cpu.pinned_bytes == 0
    assert all(is_right(one.get(str(number)), number) for number in range(6))
    stood = len(files(folder))
    assert 1 <= stood <= 3, stood
    assert counted(one, "disk_errors", op="write", errno="ENOSPC") > 0
    assert not list(folder.rglob("*.tmp"))
    files(folder)[0].unlink()
    until(lambda: one.put("5", tensor(5)) and one.flush(30) and len(files(folder)) == stood)
    one.storage_manager.cpu.remove(one.identity("5"))
    assert is_right(one.get("5"), 5)
print("right")
"""


def test_a_full_disk_costs_no_memory_and_takes_the_same_key_when_it_has_room(tmp_path: Path) -> None:
    run_in_a_small_disk(FULL, tmp_path)


@pytest.mark.parametrize(
    ("operation", "error"),
    [("pwritev", errno.EIO), ("pwritev", errno.ENOSPC), ("rename", errno.EROFS), ("mkdir", errno.EDQUOT)],
)
def test_a_write_that_fails_half_way_costs_no_memory_and_is_made_up_for(
    tmp_path: Path, operation: str, error: int
) -> None:
    state = Failing(operation, error)
    one = engine_on_a_sick_disk(tmp_path, state)
    with one.storage_manager:
        for number in range(5):
            assert one.put(str(number), tensor(number))
        assert one.flush(30)
        assert one.storage_manager.cpu.pinned_bytes == 0
        assert all(is_right(one.get(str(number)), number) for number in range(5))
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        state.error = 0
        until(lambda: one.put("3", tensor(3)) and one.flush(30) and files(tmp_path))
        one.storage_manager.cpu.remove(one.identity("3"))
        assert is_right(one.get("3"), 3)


def test_a_folder_that_vanishes_costs_the_disk_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with engine(folder) as one:
        assert one.put("before", tensor(0))
        assert one.flush(30)
        folder.rename(tmp_path / "elsewhere")
        for number in range(1, 20):
            assert one.put(str(number), tensor(number))
            assert one.flush(30)
            assert is_right(one.get(str(number)), number)
        assert one.storage_manager.cpu.pinned_bytes == 0
        assert not folder.exists(), "nothing may be written beneath a vanished mount"
        assert not one.contains("before")
        assert one.get("before") is None


# ---------------------------------------------------------------- both tiers


def test_what_left_memory_and_is_on_disk_is_contained_and_got(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        for number in range(30):
            assert one.put(str(number), tensor(number))
            assert one.flush(30)
        assert len(one.storage_manager.cpu) < 10
        for number in range(30):
            assert one.contains(str(number))
            assert is_right(one.get(str(number)), number)
            assert one.contains(str(number))


def test_odd_identifiers_are_entries_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a-b", "a_b", "x" * 300, "x" * 299 + "y", "not hex", "ABC", "abc", "Bücher 図書", "é", "e\u0301"]
    names += ["../../etc/passwd", "/", ".", "", " ", "\0", "\ud800", "\udfff", "123", "0123", "1e3", "nan"]
    with engine(tmp_path) as before:
        for number, name in enumerate(names):
            assert before.put(name, tensor(number, rows=4))
        assert before.flush(30)
    assert len(files(tmp_path)) == len(names)
    with engine(tmp_path) as after:
        for number, name in enumerate(names):
            assert is_right(after.get(name), number, rows=4)


@pytest.mark.parametrize("identifier", [123, 123.0, None, b"123", ("123",)])
def test_an_identifier_that_is_no_text_is_never_taken_for_one(tmp_path: Path, identifier: object) -> None:
    with engine(tmp_path) as one:
        assert one.put("123", tensor(1))
        for call in (one.contains, one.get, lambda name: one.put(name, tensor(2))):
            with pytest.raises(TypeError, match="accepted: str"):
                call(identifier)  # type: ignore[arg-type]
        assert is_right(one.get("123"), 1)


_WRITER = """
import sys
from tests.field.test_engine import *

with engine(Path(sys.argv[1])) as one:
    print("ready", flush=True)
    sys.stdin.readline()
    entries = [tensor(number) for number in range(40)]
    for number, entry in enumerate(entries):
        one.put(str(number), entry)
        print(number, flush=True)
        one.flush()
"""


def _tell(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()


def _hear(writer: subprocess.Popen[str]) -> str:
    assert writer.stdout is not None
    return writer.stdout.readline().strip()


def test_two_processes_write_the_same_keys_and_one_dies_half_way(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command, root = [sys.executable, "-c", _WRITER, str(tmp_path)], Path(__file__).parents[2]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    with start() as doomed, start() as other:
        try:
            for writer in (doomed, other):
                assert _hear(writer) == "ready"
            for writer in (doomed, other):
                _tell(writer)
            while int(_hear(doomed)) < 10:
                pass
            doomed.kill()
            other.communicate(timeout=60)
            assert other.returncode == 0
        finally:
            doomed.kill()
            other.kill()
    assert len(files(tmp_path)) == 40
    with engine(tmp_path) as after:
        assert all(is_right(after.get(str(number)), number) for number in range(40))
        until(lambda: not list(tmp_path.rglob("*.tmp")))
        assert counted(after, "disk_damaged") == 0


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (1, 1)])
def test_tensors_without_bytes_come_back_from_disk_too(tmp_path: Path, shape: tuple[int, int]) -> None:
    with engine(tmp_path) as before:
        assert before.put("a", torch.ones(shape))
    with engine(tmp_path) as after:
        assert after.contains("a")
        got = after.get("a")
        assert got is not None
        assert same(got, torch.ones(shape, dtype=DTYPE))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_other_ranks_are_one_clear_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with engine(tmp_path) as one:
        with pytest.raises(ValueError, match=r"accepted: \(tokens, dim\)"):
            one.put("a", torch.ones(shape))
        assert not one.contains("a")


ODD = {
    "float32": torch.randn(64, 32),
    "bfloat16": torch.randn(64, 32).bfloat16(),
    "transposed": torch.randn(64, 32).half().t(),
    "every second row": torch.randn(64, 32).half()[::2],
    "one row, expanded": torch.randn(1, 32).half().expand(64, 32),
    "requires grad": torch.randn(64, 32).requires_grad_(),
    "all of it": torch.randn(64, 32).t()[::2, 1::3].requires_grad_(),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_any_layout_and_dtype_is_stored_as_the_engines(tmp_path: Path, odd: torch.Tensor) -> None:
    with engine(tmp_path) as before:
        assert before.put("a", odd)
    with engine(tmp_path) as after:
        got = after.get("a")
        assert got is not None
        assert same(got, odd.detach().to(DTYPE))
        assert not got.requires_grad


def test_the_source_may_be_overwritten_when_put_has_returned(tmp_path: Path) -> None:
    source = tensor(1)
    with engine(tmp_path) as before:
        assert before.put("a", source)
        source.zero_()
        assert is_right(before.get("a"), 1)
    with engine(tmp_path) as after:
        assert is_right(after.get("a"), 1)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_local_cpu_size", "lots"),
        ("max_local_cpu_size", -3),
        ("max_local_cpu_size", 0),
        ("max_local_cpu_size", float("nan")),
        ("max_local_cpu_size", [5]),
        ("max_local_disk_size", "lots"),
        ("cache_policy", "NOPE"),
        ("local_disk", 7),
    ],
)
def test_a_bad_value_names_the_key_the_value_and_what_is_accepted(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_ec_engine_config({key: value}, environ={})
    assert str(caught.value).startswith(f"{key}={value!r}; accepted: ")


@pytest.mark.parametrize("content", [None, "- a\n- b\n", "ec: [1, 2]\n", "just text", "a: [\n", "\0"])
def test_a_file_that_cannot_be_meant_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "lmcache.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="accepted: ") as caught:
        load_ec_engine_config({}, environ={"LMCACHE_CONFIG_FILE": str(file)})
    assert str(file) in str(caught.value)


def test_every_good_key_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"local_cpu: true\nmax_local_cpu_size: 0.5\nec_local_disk: {tmp_path}\nec:\n  cache_policy: GDSF\n")
    environ = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_EC_MAX_LOCAL_DISK_SIZE": "512MiB"}
    with caplog.at_level(logging.WARNING):
        config = load_ec_engine_config({"lmcache.ec_disk_fsync": True, "ec_port": 14600}, environ=environ)
    assert caplog.records == []
    assert config == Config(
        max_local_cpu_size=512 * MIB,
        local_disk=str(tmp_path),
        cache_policy="GDSF",
        max_local_disk_size=512 * MIB,
        disk_fsync=True,
        ec_port=14600,
    )
