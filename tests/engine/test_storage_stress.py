"""Everything at once over a small arena and a small disk: what is had is right, and in the end nothing is held."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_p2p import ECCacheEngine, StorageManager
from ec_p2p.engine.cpu import OutOfMemory, Pin
from ec_p2p.engine.disk import LAYOUT
from ec_p2p.engine.filed import HEADER_BYTES, path_of
from ec_p2p.engine.views import tensor_view
from tests.engine.disks import count, gauge
from tests.engine.entries import DTYPE, bytes_in, embedding, same
from tests.engine.tiers import entries_of

SLAB = 256 << 10
THREADS = 6
STEPS = 1500
ENTRIES = {str(number): embedding(str(number), (0, 1, 32, 100, 400)[number % 5]) for number in range(60)}
NAMES = list(ENTRIES)
CAP = sum(HEADER_BYTES + entry.nbytes for entry in ENTRIES.values()) // 3


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class Worker(threading.Thread):
    """Puts, gets, borrows, holds and removes at random, through an engine of its own; deletes files as others would."""

    def __init__(self, number: int, storage: StorageManager, folder: Path) -> None:
        super().__init__()
        self.choice = random.Random(number)
        self.storage = storage
        self.folder = folder
        self.engine = ECCacheEngine("m", DTYPE, namespace="n", storage_manager=storage)
        self.held: list[tuple[str, Pin]] = []
        self.hits = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self.choice.choices(
                    [self.use, self.put, self.borrow, self.let_go, self.remove, self.ask, self.delete],
                    [30, 10, 10, 10, 4, 4, 1],
                )[0]()
            while self.held:
                self.let_go()
        except BaseException as failure:
            self.failure = failure

    def name(self) -> str:
        return self.choice.choice(NAMES)

    def use(self) -> None:
        name = self.name()
        got = self.engine.get(name)
        if got is None:
            self.engine.put(name, ENTRIES[name])
        else:
            assert same(got, ENTRIES[name])
            self.hits += 1

    def put(self) -> None:
        name = self.name()
        self.engine.put(name, ENTRIES[name])

    def borrow(self) -> None:
        name = self.name()
        try:
            pin = self.storage.borrow(self.engine.identity(name))
        except OutOfMemory:
            return
        if pin is not None:
            self.held.append((name, pin))
        if len(self.held) > 3:
            self.let_go()

    def let_go(self) -> None:
        if self.held:
            name, pin = self.held.pop(self.choice.randrange(len(self.held)))
            with pin:
                entry = pin.entry
                view = tensor_view(self.storage.arena, entry.offset, entry.rows, entry.dim, DTYPE)
                assert same(view, ENTRIES[name])

    def remove(self) -> None:
        self.storage.cpu.remove(self.engine.identity(self.name()))

    def ask(self) -> None:
        self.engine.contains(self.name())

    def delete(self) -> None:
        Path(path_of(str(self.folder / LAYOUT), self.engine.identity(self.name()))).unlink(missing_ok=True)


@pytest.mark.parametrize("policy", ["LRU", "GDSF"])
def test_threads_over_two_small_tiers(tmp_path: Path, policy: str) -> None:
    in_memory: set[bytes] = set()
    on_disk: set[bytes] = set()
    with StorageManager(
        2 * SLAB,
        slab_size=SLAB,
        cache_policy=policy,
        local_disk=str(tmp_path),
        max_local_disk_size=CAP,
        on_stored=lambda entry: in_memory.add(entry.identity),
        on_evicted=lambda entry: in_memory.remove(entry.identity),
        on_filed=lambda filed: on_disk.add(filed.identity),
        on_lost=on_disk.remove,
    ) as storage:
        workers = [Worker(number, storage, tmp_path) for number in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for worker in workers:
            if worker.failure is not None:
                raise worker.failure
        assert all(worker.hits for worker in workers)

        assert storage.flush(30)
        disk, cpu = storage.disk, storage.cpu
        assert disk is not None
        assert (cpu.pinned_bytes, cpu.reserved_bytes) == (0, 0)
        assert {entry.identity for entry in entries_of(cpu)} == in_memory
        identities = [workers[0].engine.identity(name) for name in NAMES]
        assert {identity for identity in identities if disk.find(identity)} == on_disk
        assert bytes_in(tmp_path) <= gauge(disk, "disk_bytes", kind="used") <= CAP
        counts = {name for (name, _), value in disk.counts().items() if value}
        assert {"disk_writes", "disk_reads", "disk_evictions"} <= counts
        assert not {"disk_errors", "disk_damaged"} & counts
        assert count(disk, "disk_reads", outcome="hit") > 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")]

    with StorageManager(4 << 20, local_disk=str(tmp_path), max_local_disk_size=CAP) as storage:
        engine = ECCacheEngine("m", DTYPE, namespace="n", storage_manager=storage)
        for name, identity in zip(NAMES, identities, strict=True):
            got = engine.get(name)
            assert (got is not None) == Path(path_of(str(tmp_path / LAYOUT), identity)).exists()
            assert got is None or same(got, ENTRIES[name])
