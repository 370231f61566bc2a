"""Both tiers behind one manager while the disk fails, hangs, or changes under it."""

from __future__ import annotations

import errno
import inspect
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ec_p2p import ECCacheEngine, StorageManager
from ec_p2p.config import make_config
from ec_p2p.engine.disk import CLOSE_S, LAYOUT, LocalDiskBackend
from ec_p2p.engine.filed import Filed, write_file
from ec_p2p.engine.files import Files
from tests.engine.disks import Clock, Failing, Gate, Sick, count, in_wait, until
from tests.engine.entries import DIM, DTYPE, PAGE_ROWS, ROW_BYTES, embedding, is_right

FEW = 64 << 10
"""An arena of one slab, which has four records and fifteen pages."""
MANY = 1 << 20


def engine_over(storage: StorageManager) -> ECCacheEngine:
    return ECCacheEngine("org/model", DTYPE, namespace="n", storage_manager=storage)


def disk_of(storage: StorageManager) -> LocalDiskBackend:
    assert storage.disk is not None
    return storage.disk


def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")]


def leave_on_disk_only(engine: ECCacheEngine, *names: str, rows: int = PAGE_ROWS) -> None:
    for name in names:
        assert engine.put(name, embedding(name, rows))
        assert engine.flush(30)
        assert engine.storage_manager.cpu.remove(engine.identity(name))


def replace(folder: Path, identity: bytes, name: str, rows: int) -> None:
    """Have another process put an entry of other rows into the file's place."""
    payload = memoryview(bytearray(embedding(name, rows).view(torch.uint8).numpy().tobytes()))
    filed = Filed(identity, rows * ROW_BYTES, rows, DIM, "bfloat16")
    write_file(Files(), str(folder / LAYOUT), filed, payload, fsync=False, abandoned=lambda: False)


# ---------------------------------------------------------------- reads that fail


def test_while_reads_are_refused_nothing_leaves_memory_for_them(tmp_path: Path, clock: Clock) -> None:
    state = Failing("preadv", 0)
    with StorageManager(FEW, slab_size=FEW, local_disk=str(tmp_path), files=Sick(state)) as storage:
        engine = engine_over(storage)
        leave_on_disk_only(engine, "a")
        a = engine.identity("a")
        state.error = errno.EIO
        assert engine.get("a") is None  # reads are refused from here on
        names = ("p", "q", "r", "s")
        for name in names:
            assert engine.put(name, embedding(name))
        assert engine.flush(30)
        assert storage.find_on_disk(a) is None
        assert disk_of(storage).find(a) is not None
        assert storage.borrow(a) is engine.get("a") is None
        assert all(storage.cpu.peek(engine.identity(name)) for name in names)
        assert count(disk_of(storage), "disk_reads_refused") == 3
        state.error = 0
        clock.now += 1
        assert storage.find_on_disk(a) is not None
        assert is_right(engine.get("a"), "a")
        assert storage.find_on_disk(a) is not None
        assert count(disk_of(storage), "disk_reads_refused") == 3


# ---------------------------------------------------------------- files that others replace


class Swap:
    """Replaces one file at the moment that it is opened to be read, as often as it is told."""

    def __init__(self) -> None:
        self.replacements: list[Callable[[], None]] = []

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "open" and args[0].endswith(".safetensors") and self.replacements:
            self.replacements.pop()()


@pytest.mark.parametrize("room", [True, False], ids=["into the arena", "past the arena"])
def test_an_entry_that_another_replaces_before_it_is_read_is_had_in_its_new_size(tmp_path: Path, room: bool) -> None:
    swap = Swap()
    with StorageManager(FEW, slab_size=FEW, local_disk=str(tmp_path), files=Sick(swap)) as storage:
        engine = engine_over(storage)
        leave_on_disk_only(engine, "a", rows=7)
        window = None if room else storage.cpu.reserve(storage.cpu.largest_entry)
        swap.replacements.append(lambda: replace(tmp_path, engine.identity("a"), "a", 40))
        assert is_right(engine.get("a"), "a", 40)
        assert not swap.replacements
        if window is not None:
            storage.cpu.release(window)
        assert (storage.cpu.pinned_bytes, storage.cpu.reserved_bytes) == (0, 0)
        assert (storage.cpu.peek(engine.identity("a")) is not None) == room


def test_an_entry_that_others_replace_again_and_again_is_a_miss_in_the_end(tmp_path: Path) -> None:
    swap = Swap()
    with StorageManager(FEW, slab_size=FEW, local_disk=str(tmp_path), files=Sick(swap)) as storage:
        engine = engine_over(storage)
        leave_on_disk_only(engine, "a", rows=7)
        swap.replacements += [
            lambda rows=rows: replace(tmp_path, engine.identity("a"), "a", rows) for rows in range(10, 20)
        ]
        assert engine.get("a") is None
        assert len(swap.replacements) == 8
        assert storage.cpu.reserved_bytes == 0
        swap.replacements.clear()
        assert is_right(engine.get("a"), "a", 18)


def test_an_entry_from_disk_counts_as_used_once(tmp_path: Path) -> None:
    """Under a policy that weighs how often an entry was used: it is worth as much as one that was got from memory."""
    with StorageManager(FEW, slab_size=FEW, local_disk=str(tmp_path), cache_policy="GDSF") as storage:
        engine = engine_over(storage)
        leave_on_disk_only(engine, "a")
        assert is_right(engine.get("a"), "a")
        for name in "bcd":
            assert engine.put(name, embedding(name))
            assert engine.flush(30)
            assert is_right(engine.get(name), name)
        assert len(storage.cpu) == 4
        assert engine.put("e", embedding("e"))
        assert {name for name in "abcde" if storage.cpu.peek(engine.identity(name))} == set("bcde")


# ---------------------------------------------------------------- a disk that hangs


@pytest.mark.parametrize("whose", [LocalDiskBackend, StorageManager, ECCacheEngine])
def test_nobody_who_names_no_limit_waits_for_ever(whose: type) -> None:
    assert inspect.signature(whose.close).parameters["timeout_s"].default == CLOSE_S


def test_the_end_of_an_engine_is_bounded_and_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("pwritev")
    monkeypatch.setattr("ec_p2p.engine.disk.Files", lambda: Sick(gate))
    config = make_config({"max_local_cpu_size": "4MiB", "local_disk": str(tmp_path)})
    engine = ECCacheEngine("m", DTYPE, config=config)
    mapping = f"{engine.storage_manager.arena.base:x}-"
    disk = disk_of(engine.storage_manager)
    for name in "abc":
        assert engine.put(name, embedding(name))
    assert gate.reached.wait(30)
    with caplog.at_level(logging.WARNING):
        engine.close(0.05)
    assert f"3 entries of {3 * PAGE_ROWS * ROW_BYTES} bytes were not written" in caplog.text
    assert count(disk, "disk_skipped", reason="closed") == 3
    assert mapping in Path("/proc/self/maps").read_text()
    gate.opened.set()
    until(lambda: not disk_threads())


def test_who_waits_for_a_read_that_hangs_is_told_when_all_is_closed(tmp_path: Path) -> None:
    gate = Gate("preadv")
    storage = StorageManager(MANY, slab_size=MANY, local_disk=str(tmp_path), files=Sick(gate))
    engine = engine_over(storage)
    leave_on_disk_only(engine, "a")
    heard: list[object] = []

    def ask() -> None:
        try:
            heard.append(engine.get("a"))
        except ValueError as error:
            heard.append(str(error))

    reader, waiter = (threading.Thread(target=ask) for _ in range(2))
    reader.start()
    assert gate.reached.wait(30)
    waiter.start()
    until(lambda: in_wait(waiter, "_stage"))
    storage.close(0.05)
    waiter.join(30)
    ask()  # who comes later is, too
    assert heard == ["the arena is closed"] * 2
    gate.opened.set()
    reader.join()
    assert heard == ["the arena is closed"] * 3
    until(lambda: not disk_threads())
