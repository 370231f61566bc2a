"""Many threads on one backend that is always short of memory."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.cpu import LocalCPUBackend, OutOfMemory, Pin
from ec_p2p.engine.extents import Extent
from ec_p2p.engine.generation import RECORD_BYTES, unpack
from ec_p2p.engine.policy import make_policy
from tests.engine.tiers import entries_of

SLAB = 256 << 10
SLABS = 2
THREADS = 8
STEPS = 3000
NAMES = 40
LARGE = 33
"""More than half of a slab's pages: each slab takes one such entry, and while that is pinned no other."""


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Worker(threading.Thread):
    """Stores, borrows, holds and removes at random; every page that it stores is filled with a stamp of its own."""

    def __init__(self, number: int, cpu: LocalCPUBackend, go: threading.Barrier) -> None:
        super().__init__()
        self.rng = random.Random(number)
        self.stamps = iter(range(number << 32, (number + 1) << 32))
        self.cpu = cpu
        self.go = go
        self.held: list[tuple[Pin, bytes]] = []
        self.done = {"stored": 0, "borrowed": 0, "refused": 0}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.go.wait()
            for _ in range(STEPS):
                self.rng.choice((self.store, self.store, self.store_in_window, self.borrow, self.borrow, self.let_go))()
                if self.rng.random() < 0.05:
                    self.cpu.remove(self.identity())
            while self.held:
                self.let_go()
        except BaseException as failure:
            self.failure = failure

    def identity(self) -> bytes:
        return self.rng.randrange(NAMES).to_bytes(32, "little")

    def reserve(self, pages: int) -> Extent | None:
        try:
            return self.cpu.reserve(pages * PAGE)
        except OutOfMemory:
            self.done["refused"] += 1
            return None

    def fill_and_publish(self, extent: Extent) -> None:
        stamp = next(self.stamps).to_bytes(8, "little")
        buffer = self.cpu.arena.buffer
        for at in range(extent.offset, extent.offset + extent.nbytes, PAGE):  # threads may switch between the pages
            buffer[at : at + PAGE] = stamp * (PAGE // 8)
        nbytes = extent.nbytes - self.rng.choice((0, 8, PAGE)) if extent.nbytes > PAGE else extent.nbytes
        self.cpu.publish(extent, self.identity(), nbytes, 1, nbytes, "uint8")
        self.done["stored"] += 1

    def store(self) -> None:
        extent = self.reserve(LARGE if self.rng.random() < 0.02 else self.rng.randrange(1, 9))
        if extent is None:
            return
        if self.rng.random() < 0.1:
            self.cpu.release(extent)
        else:
            self.fill_and_publish(extent)

    def store_in_window(self) -> None:
        window = self.reserve(8)
        if window is None:
            return
        for page in (0, 2, 5):
            try:
                self.fill_and_publish(self.cpu.carve(window, page * PAGE, 2 * PAGE))
            except OutOfMemory:
                self.done["refused"] += 1
        self.cpu.release(window)

    def borrow(self) -> None:
        pin = self.cpu.borrow(self.identity())
        if pin is None:
            return
        stamp = bytes(self.cpu.arena.buffer[pin.entry.offset : pin.entry.offset + 8])
        self.held.append((pin, stamp))
        self.check(pin, stamp)
        self.done["borrowed"] += 1
        if len(self.held) > 3:
            self.let_go()

    def let_go(self) -> None:
        if self.held:
            pin, stamp = self.held.pop(0)
            self.check(pin, stamp)
            pin.close()

    def check(self, pin: Pin, stamp: bytes) -> None:
        entry = pin.entry
        data = bytes(self.cpu.arena.buffer[entry.offset : entry.offset + entry.nbytes])
        assert data == stamp * (entry.nbytes // 8), f"{entry} changed while it was pinned"
        record = unpack(self.cpu.arena.buffer[entry.record_offset : entry.record_offset + RECORD_BYTES])
        # While it is pinned its record is its own, and says so or, once it was removed, nothing.
        assert record.generation in (0, entry.generation)
        assert record.identity == entry.identity


@pytest.mark.parametrize("policy", ["LRU", "GDSF"])
def test_pinned_bytes_stay_and_all_memory_comes_back(policy: str) -> None:
    visible: set[bytes] = set()
    with Arena.create(SLABS * SLAB, SLAB) as arena:
        cpu = LocalCPUBackend(
            arena,
            policy=make_policy(policy),
            on_stored=lambda entry: visible.add(entry.identity),
            on_evicted=lambda entry: visible.remove(entry.identity),
        )
        pins = []
        for number in range(SLABS):
            extent = cpu.reserve(LARGE * PAGE)
            identity = (NAMES + number).to_bytes(32, "little")
            pins.append(cpu.pin(cpu.publish(extent, identity, extent.nbytes, 1, extent.nbytes, "uint8")))
        go = threading.Barrier(THREADS)
        workers = [Worker(number, cpu, go) for number in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.failure for worker in workers] == [None] * THREADS
        for what in ("stored", "borrowed", "refused"):
            assert sum(worker.done[what] for worker in workers) > 0
        for pin in pins:
            pin.close()
        assert (cpu.pinned_bytes, cpu.reserved_bytes) == (0, 0)
        assert {entry.identity for entry in entries_of(cpu)} == visible
        for identity in list(visible):
            assert cpu.remove(identity)
        assert not visible
        assert cpu.free_bytes == cpu.capacity_bytes
        for _ in range(SLABS):
            assert cpu.reserve(cpu.largest_entry).nbytes == cpu.largest_entry
