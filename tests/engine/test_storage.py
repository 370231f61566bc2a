"""Both tiers behind one engine: what is promised of them together, whatever memory and disk are doing."""

from __future__ import annotations

import errno
import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ec_p2p import ECCacheEngine, StorageManager
from ec_p2p.config import make_config
from ec_p2p.engine.cpu import Entry, OutOfMemory
from ec_p2p.engine.disk import LAYOUT, LocalDiskBackend
from ec_p2p.engine.filed import HEADER_BYTES, Filed, path_of
from tests.engine.disks import Clock, Failing, Gate, Sick, count, files_in, gauge, in_wait, until
from tests.engine.entries import DTYPE, PAGE_ROWS, ROW_BYTES, bytes_in, embedding, is_right
from tests.engine.tiers import entries_of

FEW = 64 << 10
"""An arena of one slab, which has four records and fifteen pages."""
MANY = 1 << 20
"""An arena of one slab, which has 64 records and 254 pages."""
PAGE = ROW_BYTES * PAGE_ROWS
FILE = HEADER_BYTES + PAGE

Open = Callable[..., StorageManager]


@pytest.fixture
def open_storage(tmp_path: Path) -> Iterator[Open]:
    """Makes managers of one slab over the folder `disk`; at the end nothing is held in any of them."""

    def make(nbytes: int = MANY, **options: Any) -> StorageManager:
        storage = StorageManager(nbytes, slab_size=nbytes, local_disk=str(tmp_path / "disk"), **options)
        stack.callback(nothing_is_held, storage)
        stack.callback(storage.close)
        return storage

    def nothing_is_held(storage: StorageManager) -> None:
        assert (storage.cpu.pinned_bytes, storage.cpu.reserved_bytes) == (0, 0)

    with ExitStack() as stack:
        yield make
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")]


def engine_over(storage: StorageManager, namespace: str = "n") -> ECCacheEngine:
    return ECCacheEngine("org/model", DTYPE, namespace=namespace, storage_manager=storage)


def disk_of(engine: ECCacheEngine) -> LocalDiskBackend:
    assert engine.storage_manager.disk is not None
    return engine.storage_manager.disk


def put(engine: ECCacheEngine, *names: str, rows: int = PAGE_ROWS) -> None:
    """Have entries in memory and on disk."""
    for name in names:
        assert engine.put(name, embedding(name, rows))
        assert engine.flush(30)
        assert disk_of(engine).find(engine.identity(name)) is not None


def evict(engine: ECCacheEngine, *names: str) -> None:
    for name in names:
        assert engine.storage_manager.cpu.remove(engine.identity(name))


def put_on_disk_only(engine: ECCacheEngine, *names: str, rows: int = PAGE_ROWS) -> None:
    put(engine, *names, rows=rows)
    evict(engine, *names)


def file_of(engine: ECCacheEngine, folder: Path, name: str) -> Path:
    return Path(path_of(str(folder / "disk" / LAYOUT), engine.identity(name)))


# ---------------------------------------------------------------- sharing one manager


def test_engines_over_one_manager_see_each_other_if_their_namespaces_are_equal(open_storage: Open) -> None:
    storage = open_storage()
    one, two, other = (engine_over(storage, namespace) for namespace in ("n", "n", "m"))
    put(one, "in memory", "on disk")
    evict(one, "on disk")
    for name in ("in memory", "on disk"):
        assert two.contains(name)
        assert not other.contains(name)
        assert other.get(name) is None
        assert is_right(two.get(name), name)
    put(other, "in memory", rows=5)
    assert is_right(two.get("in memory"), "in memory")
    assert is_right(other.get("in memory"), "in memory", 5)


def test_an_engines_end_leaves_the_manager_to_the_others(open_storage: Open) -> None:
    storage = open_storage()
    one, two = engine_over(storage), engine_over(storage)
    put_on_disk_only(one, "a")
    one.close()
    assert is_right(two.get("a"), "a")
    put_on_disk_only(two, "b")
    assert is_right(two.get("b"), "b")
    with pytest.raises(ValueError, match="closed"):
        one.get("a")


def test_a_configuration_says_what_the_tiers_are(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "anew"
    settings = {
        "max_local_cpu_size": "1MiB",
        "local_disk": str(folder),
        "max_local_disk_size": "2MiB",
        "disk_queue_size": "1MiB",
    }
    with ECCacheEngine("m", DTYPE, config=make_config(settings)) as engine:
        disk = disk_of(engine)
        assert engine.storage_manager.arena.nbytes == 1 << 20
        assert gauge(disk, "disk_bytes", kind="capacity") == 2 << 20
        put(engine, "a")
        assert files_in(folder)
    with ECCacheEngine("m", DTYPE, config=make_config(settings)) as engine:
        assert is_right(engine.get("a"), "a")


def test_a_folder_that_cannot_be_made_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"local_disk='.*/file/below'"):
        StorageManager(FEW, local_disk=str(tmp_path / "file" / "below"))
    gc.collect()
    # Of others in this process some may have been closed meanwhile.
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


# ---------------------------------------------------------------- what only the disk holds


def test_what_left_memory_is_had_from_disk(open_storage: Open) -> None:
    storage = open_storage(FEW)
    engine = engine_over(storage)
    names = [str(number) for number in range(12)]
    put(engine, *names)
    assert len(storage.cpu) == 4
    for name in names:
        assert engine.contains(name)
        assert is_right(engine.get(name), name)
        assert engine.contains(name)
    assert count(disk_of(engine), "disk_reads", outcome="hit") == len(names)
    assert is_right(engine.get(names[-1]), names[-1])
    assert count(disk_of(engine), "disk_reads", outcome="hit") == len(names)


def test_what_the_disk_lost_too_is_a_miss_for_both(open_storage: Open, tmp_path: Path) -> None:
    engine = engine_over(open_storage())
    put_on_disk_only(engine, "a", "b", "c")
    for name in ("a", "b"):
        file_of(engine, tmp_path, name).unlink()
    assert engine.contains("a") is False
    assert engine.get("a") is None
    assert engine.get("b") is None
    assert engine.contains("b") is False
    assert is_right(engine.get("c"), "c")


def test_damage_is_a_miss_and_the_key_can_be_stored_again(open_storage: Open, tmp_path: Path) -> None:
    engine = engine_over(open_storage())
    put_on_disk_only(engine, "a")
    file_of(engine, tmp_path, "a").write_bytes(b"\0" * FILE)
    assert engine.get("a") is None
    assert engine.contains("a") is False
    assert (engine.storage_manager.cpu.used_bytes, engine.storage_manager.cpu.reserved_bytes) == (0, 0)
    put_on_disk_only(engine, "a")
    assert is_right(engine.get("a"), "a")


def test_a_smaller_cap_holds_against_what_was_set_aside_too(open_storage: Open, tmp_path: Path) -> None:
    with engine_over(open_storage()) as engine:
        for name in "abcd":
            put_on_disk_only(engine, name)
            file_of(engine, tmp_path, name).write_bytes(b"\0" * FILE)
            assert engine.get(name) is None
        put(engine, "e")
        engine.storage_manager.close()
    assert bytes_in(tmp_path) == 5 * FILE
    engine = engine_over(open_storage(max_local_disk_size=3 * FILE))
    until(lambda: bytes_in(tmp_path) <= 3 * FILE)
    put_on_disk_only(engine, "f")
    assert is_right(engine.get("f"), "f")


def test_put_of_what_only_the_disk_holds_brings_it_back_to_memory(open_storage: Open, tmp_path: Path) -> None:
    engine = engine_over(open_storage())
    put_on_disk_only(engine, "a")
    inode = file_of(engine, tmp_path, "a").stat().st_ino
    assert engine.put("a", embedding("a")) is True
    assert engine.flush(30)
    assert engine.storage_manager.cpu.peek(engine.identity("a")) is not None
    assert file_of(engine, tmp_path, "a").stat().st_ino == inode
    assert count(disk_of(engine), "disk_writes") == 1
    assert not any(value for (name, _), value in disk_of(engine).counts().items() if name == "disk_skipped")


def test_an_arena_in_use_up_to_the_last_byte_hides_nothing_on_disk(open_storage: Open) -> None:
    storage = open_storage(FEW)
    engine = engine_over(storage)
    put_on_disk_only(engine, "a")
    put_on_disk_only(engine, "empty", rows=0)
    window = storage.cpu.reserve(storage.cpu.largest_entry)
    assert storage.cpu.free_bytes == 0
    assert engine.contains("a")
    assert is_right(engine.get("a"), "a")
    assert is_right(engine.get("empty"), "empty", 0)
    with pytest.raises(OutOfMemory):
        storage.borrow(engine.identity("a"))
    assert engine.put("a", embedding("a")) is True  # it is stored
    assert engine.put("b", embedding("b")) is False
    assert not engine.contains("b")
    assert engine.get("b") is None
    assert len(storage.cpu) == 0
    storage.cpu.release(window)
    assert is_right(engine.get("a"), "a")
    assert len(storage.cpu) == 1


def test_pinned_entries_are_no_victims_of_what_comes_from_disk(open_storage: Open) -> None:
    storage = open_storage(FEW)
    engine = engine_over(storage)
    put_on_disk_only(engine, "a")
    put(engine, "p", "q", "r", "s")
    pins = [storage.cpu.pin(entry) for entry in entries_of(storage.cpu)]
    assert len(pins) == 4
    assert is_right(engine.get("a"), "a")
    assert len(storage.cpu) == 4
    pins[1].close()
    assert is_right(engine.get("a"), "a")
    assert storage.cpu.peek(engine.identity("q")) is None
    for pin in pins:
        pin.close()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_entry_that_is_larger_than_the_next_lifes_arena_is_still_had(open_storage: Open, device: str) -> None:
    rows = 3 * FEW // ROW_BYTES
    with engine_over(open_storage()) as engine:
        put(engine, "large", rows=rows)
        engine.storage_manager.close()
    engine = engine_over(open_storage(FEW))
    put(engine, "small")
    assert engine.contains("large")
    got = engine.get("large", device)
    assert got is not None
    assert got.device.type == device
    assert device == "meta" or is_right(got, "large", rows)
    assert engine.storage_manager.cpu.peek(engine.identity("small")) is not None


def test_what_was_got_from_disk_is_the_callers(open_storage: Open) -> None:
    storage = open_storage(FEW)
    engine = engine_over(storage)
    put_on_disk_only(engine, "a")
    window = storage.cpu.reserve(storage.cpu.largest_entry)
    got = [engine.get("a")]
    storage.cpu.release(window)
    got += [engine.get("a"), engine.get("a")]
    for tensor in got:
        assert tensor is not None
        assert is_right(tensor, "a")
        tensor.zero_()
    assert is_right(engine.get("a"), "a")


# ---------------------------------------------------------------- one read per key


def together(gate: Gate, calls: list[Callable[[], object]]) -> list[object]:
    """The results of calls that all ask while the first of them is held up at the gate."""
    results: list[object] = []
    threads = [threading.Thread(target=lambda call=call: results.append(call())) for call in calls]
    threads[0].start()
    assert gate.reached.wait(30)
    for thread in threads[1:]:
        thread.start()
    until(lambda: all(in_wait(thread, "_stage") for thread in threads[1:]))
    gate.opened.set()
    for thread in threads:
        thread.join()
    return results


def test_many_threads_ask_and_one_reads(open_storage: Open) -> None:
    gate = Gate("preadv")
    storage = open_storage(files=Sick(gate))
    engines = [engine_over(storage) for _ in range(3)]
    put_on_disk_only(engines[0], "a")
    results = together(gate, [lambda engine=engine: is_right(engine.get("a"), "a") for engine in engines * 3])
    assert results == [True] * 9
    assert count(disk_of(engines[0]), "disk_reads", outcome="hit") == 1
    assert len(storage.cpu) == 1


def test_many_threads_wait_for_a_read_that_finds_damage(open_storage: Open, tmp_path: Path) -> None:
    gate = Gate("preadv")
    engine = engine_over(open_storage(files=Sick(gate)))
    put_on_disk_only(engine, "a")
    path = file_of(engine, tmp_path, "a")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert together(gate, [lambda: engine.get("a")] * 5) == [None] * 5
    assert count(disk_of(engine), "disk_damaged") == 1


def test_a_slow_read_of_one_key_holds_up_no_other(open_storage: Open) -> None:
    gate = Gate("open", "no file yet")
    engine = engine_over(open_storage(files=Sick(gate)))
    put_on_disk_only(engine, "a", "b")
    gate.matching = engine.identity("a").hex()
    results: list[bool] = []
    reader = threading.Thread(target=lambda: results.append(is_right(engine.get("a"), "a")))
    reader.start()
    assert gate.reached.wait(30)
    assert is_right(engine.get("b"), "b")
    put(engine, "c")
    assert is_right(engine.get("c"), "c")
    gate.opened.set()
    reader.join()
    assert results == [True]


# ---------------------------------------------------------------- writing behind


def test_put_and_get_of_what_is_in_memory_never_wait_for_the_disk(open_storage: Open) -> None:
    gate = Gate("pwritev")
    engine = engine_over(open_storage(files=Sick(gate)))
    names = [str(number) for number in range(40)]
    for name in names:
        assert engine.put(name, embedding(name))
        assert engine.put(name, embedding(name))
    assert gate.reached.wait(30)
    for name in names:
        assert engine.contains(name)
        assert is_right(engine.get(name), name)
    assert engine.flush(0.01) is False
    gate.opened.set()
    assert engine.flush(30)
    assert all(disk_of(engine).find(engine.identity(name)) for name in names)


def test_what_waits_to_be_written_is_bounded_by_a_quarter_of_the_arena(open_storage: Open) -> None:
    gate = Gate("pwritev")
    storage = open_storage(files=Sick(gate))
    engine = engine_over(storage)
    for number in range(64):
        assert engine.put(str(number), embedding(str(number), 2 * PAGE_ROWS))
    queued = gauge(disk_of(engine), "disk_bytes", kind="queued")
    assert queued == storage.cpu.pinned_bytes
    assert storage.cpu.capacity_bytes // 4 - 2 * PAGE < queued <= storage.cpu.capacity_bytes // 4
    gate.opened.set()


@pytest.mark.parametrize("use", ["put", "get", "borrow"])
def test_what_found_the_queue_full_is_offered_again_when_it_is_used(open_storage: Open, use: str) -> None:
    gate = Gate("pwritev")
    storage = open_storage(disk_queue_size=2 * PAGE, files=Sick(gate))
    engine = engine_over(storage)
    for name in ("1", "2", "late"):
        assert engine.put(name, embedding(name))
    assert count(disk_of(engine), "disk_skipped", reason="queue_full") == 1
    assert is_right(engine.get("late"), "late")
    assert count(disk_of(engine), "disk_skipped", reason="queue_full") == 2
    gate.opened.set()
    assert engine.flush(30)
    assert disk_of(engine).look(engine.identity("late")) is None
    if use == "put":
        assert engine.put("late", embedding("late"))
    elif use == "get":
        assert is_right(engine.get("late"), "late")
    else:
        pin = storage.borrow(engine.identity("late"))
        assert pin is not None
        pin.close()
    assert engine.flush(30)
    evict(engine, "late")
    assert is_right(engine.get("late"), "late")
    assert count(disk_of(engine), "disk_writes") == 3


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_while_the_disk_fails_memory_serves_and_the_same_key_is_stored_later(
    open_storage: Open, clock: Clock, error: int, tmp_path: Path
) -> None:
    state = Failing("pwritev", error)
    engine = engine_over(open_storage(files=Sick(state)))
    names = [str(number) for number in range(5)]
    for name in names:
        assert engine.put(name, embedding(name))
    assert engine.flush(30)
    assert files_in(tmp_path / "disk") == []
    assert engine.storage_manager.cpu.pinned_bytes == 0
    assert gauge(disk_of(engine), "disk_breaker", op="write") == 1
    assert all(is_right(engine.get(name), name) for name in names)
    state.error = 0
    clock.now += 1
    for name in names:
        assert engine.put(name, embedding(name))
        assert engine.flush(30)
    assert gauge(disk_of(engine), "disk_breaker", op="write") == 0
    evict(engine, *names)
    assert all(is_right(engine.get(name), name) for name in names)


def test_while_the_disk_cannot_be_read_contains_and_get_agree(open_storage: Open, clock: Clock) -> None:
    state = Failing("preadv", 0)
    engine = engine_over(open_storage(files=Sick(state)))
    put_on_disk_only(engine, "a", "b")
    put(engine, "c")
    state.error = errno.EIO
    assert engine.get("a") is None
    for name, there in {"a": False, "b": False, "c": True}.items():
        assert engine.contains(name) is there
        assert is_right(engine.get(name), name) is there
    assert engine.storage_manager.cpu.reserved_bytes == 0
    state.error = 0
    clock.now += 1
    for name in ("a", "b", "c"):
        assert engine.contains(name)
        assert is_right(engine.get(name), name)


# ---------------------------------------------------------------- too large


def test_an_item_larger_than_the_arena_evicts_nothing_in_either_tier(open_storage: Open) -> None:
    storage = open_storage(FEW, max_local_disk_size=5 * FILE)
    engine = engine_over(storage)
    names = [str(number) for number in range(5)]
    put(engine, *names)
    in_memory = entries_of(storage.cpu)
    assert engine.put("huge", torch.zeros(FEW, 64)) is False
    assert not engine.contains("huge")
    assert entries_of(storage.cpu) == in_memory
    assert len(in_memory) == 4
    assert all(disk_of(engine).look(engine.identity(name)) for name in names)
    assert count(disk_of(engine), "disk_evictions") == 0


def test_an_item_larger_than_the_disk_lives_in_memory_alone(open_storage: Open) -> None:
    storage = open_storage(max_local_disk_size=5 * FILE)
    engine = engine_over(storage)
    names = [str(number) for number in range(5)]
    put(engine, *names)
    assert engine.put("large", embedding("large", 11 * PAGE_ROWS))
    assert engine.flush(30)
    assert is_right(engine.get("large"), "large", 11 * PAGE_ROWS)
    assert count(disk_of(engine), "disk_skipped", reason="too_large") > 0
    assert count(disk_of(engine), "disk_evictions") == 0
    evict(engine, "large", *names)
    assert not engine.contains("large")
    assert all(is_right(engine.get(name), name) for name in names)


# ---------------------------------------------------------------- what is told


class Heard:
    """What a manager's listeners were told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bytes]] = []
        self.listeners: dict[str, Callable[[Any], None]] = {
            "on_stored": lambda entry: self._hear("stored", entry),
            "on_evicted": lambda entry: self._hear("evicted", entry),
            "on_filed": lambda filed: self._hear("filed", filed),
            "on_lost": lambda identity: self.events.append(("lost", identity)),
        }

    def _hear(self, event: str, what: Entry | Filed) -> None:
        self.events.append((event, what.identity))

    def of(self, identity: bytes) -> list[str]:
        return [event for event, whose in self.events if whose == identity]


def test_what_is_told_is_in_the_order_of_events(open_storage: Open) -> None:
    """In each tier what comes goes, in turn, and what was told last is so."""
    heard = Heard()
    storage = open_storage(FEW, max_local_disk_size=7 * FILE, disk_queue_size=MANY, **heard.listeners)
    engine = engine_over(storage)
    disk = disk_of(engine)
    names = [str(number) for number in range(12)]
    choice = random.Random(4)
    for _ in range(300):
        name = choice.choice(names)
        assert is_right(engine.get(name), name) or engine.put(name, embedding(name))
        if choice.random() < 0.6:
            assert engine.flush(30)
    assert engine.flush(30)
    for name in names:
        identity = engine.identity(name)
        told = heard.of(identity)
        in_memory = [event for event in told if event in ("stored", "evicted")]
        on_disk = [event for event in told if event in ("filed", "lost")]
        assert in_memory == (["stored", "evicted"] * len(in_memory))[: len(in_memory)]
        assert on_disk == (["filed", "lost"] * len(on_disk))[: len(on_disk)]
        assert told[0] == "stored"
        assert (storage.cpu.peek(identity) is not None) == (in_memory[-1] == "stored")
        assert (disk.find(identity) is not None) == (on_disk[-1:] == ["filed"])
    assert {event for event, _ in heard.events} == {"stored", "evicted", "filed", "lost"}


def test_an_entry_is_told_of_as_filed_before_it_can_leave_memory(open_storage: Open) -> None:
    heard = Heard()
    gate = Gate("pwritev")
    storage = open_storage(FEW, disk_queue_size=PAGE, files=Sick(gate), **heard.listeners)
    engine = engine_over(storage)
    a = engine.identity("a")
    for name in "abcdef":
        assert engine.put(name, embedding(name))
    assert storage.cpu.peek(a) is not None  # though it is the oldest of six, and four have room
    assert heard.of(a) == ["stored"]
    gate.opened.set()
    assert engine.flush(30)
    for name in "ghij":
        assert engine.put(name, embedding(name))
        assert engine.flush(30)
    assert heard.of(a) == ["stored", "filed", "evicted"]


def test_a_listener_finds_what_it_is_told_of(open_storage: Open) -> None:
    found: list[tuple[str, bool, bool]] = []
    storages: list[StorageManager] = []

    def look(event: str, identity: bytes) -> None:
        [storage] = storages
        assert storage.disk is not None
        found.append((event, storage.cpu.peek(identity) is not None, storage.disk.find(identity) is not None))

    storages.append(
        open_storage(
            on_stored=lambda entry: look("stored", entry.identity),
            on_evicted=lambda entry: look("evicted", entry.identity),
            on_filed=lambda filed: look("filed", filed.identity),
            on_lost=lambda identity: look("lost", identity),
        )
    )
    engine = engine_over(storages[0])
    put_on_disk_only(engine, "a")
    assert is_right(engine.get("a"), "a")
    assert found == [
        ("stored", True, False),
        ("filed", True, True),
        ("evicted", False, True),
        ("stored", True, True),
    ]


def test_a_next_life_is_told_of_what_is_on_disk(open_storage: Open) -> None:
    with engine_over(open_storage()) as engine:
        put(engine, "a", "b")
        engine.storage_manager.close()
    heard = Heard()
    engine = engine_over(open_storage(**heard.listeners))
    until(lambda: len(heard.events) == 2)
    assert set(heard.events) == {("filed", engine.identity("a")), ("filed", engine.identity("b"))}
    assert is_right(engine.get("a"), "a")
    assert heard.of(engine.identity("a")) == ["filed", "stored"]


# ---------------------------------------------------------------- the end


def test_close_after_a_burst_writes_whole_files_and_then_lets_go_of_the_memory(
    open_storage: Open, tmp_path: Path
) -> None:
    mapped: list[bool] = []

    def slow(name: str, args: tuple[Any, ...]) -> None:
        if name in ("pwritev", "rename"):
            time.sleep(0.005)
            mapped.append(storage.arena.fd >= 0)

    storage = open_storage(disk_queue_size=MANY, files=Sick(slow))
    engine = engine_over(storage)
    names = [str(number) for number in range(15)]
    for name in names:
        assert engine.put(name, embedding(name, 4 * PAGE_ROWS))
    storage.close()
    assert mapped
    assert all(mapped)
    with pytest.raises(ValueError, match="closed"):
        _gone = storage.arena.buffer
    for name in names:
        with safe_open(file_of(engine, tmp_path, name), "pt") as file:
            assert is_right(file.get_tensor("embedding"), name, 4 * PAGE_ROWS)
    assert len(files_in(tmp_path / "disk")) == len(names)


def test_a_disk_that_hangs_does_not_hold_up_close_and_writes_from_no_freed_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate("pwritev")
    storage = StorageManager(4 * MANY, slab_size=4 * MANY, local_disk=str(tmp_path / "disk"), files=Sick(gate))
    engine = engine_over(storage)
    assert engine.put("a", embedding("a", 9000))
    assert gate.reached.wait(30)
    mapping = f"{storage.arena.base:x}-"
    with caplog.at_level(logging.WARNING):
        storage.close(0.05)
    assert "were not written" in caplog.text
    assert mapping in Path("/proc/self/maps").read_text()
    gate.opened.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")])
    assert files_in(tmp_path / "disk") == []

    def unmapped() -> bool:
        gc.collect()
        return mapping not in Path("/proc/self/maps").read_text()

    until(unmapped)


def test_who_reads_while_the_manager_closes_is_told_that_it_is_closed(tmp_path: Path) -> None:
    gate = Gate("preadv")
    # A payload comes with its header, which alone is read by who only looks.
    files = Sick(lambda name, args: name == "preadv" and len(args[1]) == 2 and gate(name, args))
    storage = StorageManager(MANY, slab_size=MANY, local_disk=str(tmp_path), files=files)
    engine = engine_over(storage)
    put_on_disk_only(engine, "a")
    complaints: list[str] = []

    def ask() -> None:
        with pytest.raises(ValueError) as caught:
            engine.get("a")
        complaints.append(str(caught.value))

    reader = threading.Thread(target=ask)
    reader.start()
    assert gate.reached.wait(30)
    storage.close(0.05)
    gate.opened.set()
    reader.join()
    assert complaints == ["the arena is closed"]
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")])


def test_closing_under_traffic_is_an_error_for_the_callers_and_no_crash(tmp_path: Path) -> None:
    storage = StorageManager(FEW, local_disk=str(tmp_path), max_local_disk_size=20 * FILE)
    engine = engine_over(storage)
    started = threading.Barrier(5)
    complaints: list[str] = []
    wrong: list[str] = []

    def work(seed: int) -> None:
        choice = random.Random(seed)
        started.wait()
        try:
            while True:
                name = str(choice.randrange(30))
                got = engine.get(name)
                if got is None:
                    engine.put(name, embedding(name))
                elif not is_right(got, name):
                    wrong.append(name)
        except ValueError as error:
            complaints.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    until(lambda: count(disk_of(engine), "disk_reads", outcome="hit") > 50)
    storage.close()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert complaints == ["the arena is closed"] * 4
