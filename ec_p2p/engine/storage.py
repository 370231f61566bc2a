"""The tiers of one engine room, and the memory under them.

Owns the arena, the CPU tier in it and the disk tier below, and the walk from one to the other. Must never know of
tensors or identifiers: tiers speak identities and bytes. Torch-free.

What the CPU tier stores is offered to the disk tier at once; what only the disk tier holds is brought back into the
arena, by one read however many ask, and is then an entry like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ec_p2p.config import DEFAULTS, Config
from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import Entry, Listener, LocalCPUBackend, Pin
from ec_p2p.engine.disk import CLOSE_S, LocalDiskBackend
from ec_p2p.engine.disk_index import OnFiled, OnLost
from ec_p2p.engine.extents import OnSlab
from ec_p2p.engine.filed import Filed
from ec_p2p.engine.files import Files
from ec_p2p.engine.policy import make_policy
from ec_p2p.engine.tally import Series

SLAB_BYTES = DEFAULTS.slab_size


class StorageManager:
    """One CPU tier of `max_local_cpu_size` bytes and, where `local_disk` names a folder, one disk tier of
    `max_local_disk_size` bytes. Several engines may share it; any thread may call.

    `on_slab`, `on_stored`, `on_evicted` and `on_unpinned` are the listeners of LocalCPUBackend, `on_filed` and
    `on_lost` those of LocalDiskBackend. `disk_queue_size` bytes of the arena may wait to be written, never more than
    a quarter of it.
    """

    def __init__(
        self,
        max_local_cpu_size: int = DEFAULTS.max_local_cpu_size,
        *,
        slab_size: int = DEFAULTS.slab_size,
        cache_policy: str = DEFAULTS.cache_policy,
        local_disk: str = DEFAULTS.local_disk,
        max_local_disk_size: int = DEFAULTS.max_local_disk_size,
        disk_queue_size: int = DEFAULTS.disk_queue_size,
        disk_fsync: bool = DEFAULTS.disk_fsync,
        on_slab: OnSlab | None = None,
        on_stored: Listener | None = None,
        on_evicted: Listener | None = None,
        on_unpinned: Listener | None = None,
        on_filed: OnFiled | None = None,
        on_lost: OnLost | None = None,
        files: Files | None = None,
    ) -> None:
        self._on_stored = on_stored
        self._stagings: dict[bytes, threading.Event | None] = {}
        """What is being brought in; an event where somebody waits for it. To make one takes as long as a small read."""
        self._lock = threading.Lock()
        self._closed = False
        self.disk: LocalDiskBackend | None = None
        self.arena = Arena.create(max_local_cpu_size, slab_size)
        try:
            self.cpu = LocalCPUBackend(
                self.arena,
                policy=make_policy(cache_policy),
                on_slab=on_slab,
                on_stored=self._stored if local_disk else on_stored,
                on_evicted=on_evicted,
                on_unpinned=on_unpinned,
            )
            if local_disk:
                self.disk = LocalDiskBackend(
                    local_disk,
                    max_local_disk_size,
                    policy=make_policy(cache_policy),
                    queue_bytes=min(disk_queue_size, self.cpu.capacity_bytes // 4),
                    fsync=disk_fsync,
                    on_filed=on_filed,
                    on_lost=on_lost,
                    files=files,
                )
        except BaseException:
            self.arena.close()
            raise

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        on_slab: OnSlab | None = None,
        on_stored: Listener | None = None,
        on_evicted: Listener | None = None,
        on_unpinned: Listener | None = None,
        on_filed: OnFiled | None = None,
        on_lost: OnLost | None = None,
    ) -> StorageManager:
        """The tiers that a configuration asks for."""
        return cls(
            config.max_local_cpu_size,
            slab_size=config.slab_size,
            cache_policy=config.cache_policy,
            local_disk=config.local_disk,
            max_local_disk_size=config.max_local_disk_size,
            disk_queue_size=config.disk_queue_size,
            disk_fsync=config.disk_fsync,
            on_slab=on_slab,
            on_stored=on_stored,
            on_evicted=on_evicted,
            on_unpinned=on_unpinned,
            on_filed=on_filed,
            on_lost=on_lost,
        )

    # ------------------------------------------------------------ looking

    def contains(self, identity: bytes) -> bool:
        """Whether a tier holds the entry. May look into the folder, where another process may have put it."""
        return self.cpu.peek(identity) is not None or (self.disk is not None and self.disk.look(identity) is not None)

    def find_on_disk(self, identity: bytes) -> Filed | None:
        """What is known to be on disk, while reads are not refused; no I/O. See LocalDiskBackend.find_readable."""
        return None if self.disk is None else self.disk.find_readable(identity)

    def borrow(self, identity: bytes) -> Pin | None:
        """The entry, pinned; brought in from disk if need be. None: no tier holds it.

        Raises OutOfMemory or TooLarge when it is on disk and the arena has no room for it.
        """
        while (pin := self.cpu.borrow(identity)) is None:
            if self.disk is None:
                return None
            if not self._stage(identity):
                continue
            try:
                # It may have been brought in by a thread that was ready just before.
                if self.cpu.peek(identity) is None:
                    return self._read(identity, self.disk)
            finally:
                self._staged(identity)
        self.offer(pin.entry)
        return pin

    def read_outside(self, identity: bytes) -> tuple[Filed, bytearray] | None:
        """What is on disk and its payload, in memory of its own: for when the arena has no room."""
        if self.disk is not None:
            for filed in self._found(identity, self.disk):
                payload = bytearray(filed.nbytes)
                found = self.disk.read(identity, memoryview(payload))
                if found is not None:
                    return found, payload
        return None

    # ------------------------------------------------------------ keeping

    def offer(self, entry: Entry) -> None:
        """Have a CPU entry written to disk, unless it is there already, or the disk tier does not take it now.

        Every entry is offered when it is stored. Offering it again when it is used gives one that found the queue
        full, or the disk, another chance.
        """
        if self.disk is None or self.disk.find(entry.identity) is not None:
            return
        try:
            payload = self.arena.buffer[entry.offset : entry.offset + entry.nbytes]
            pin = self.cpu.pin(entry)
        except ValueError:
            return  # closed, or evicted, by another thread
        if not self.disk.offer(pin, payload):
            pin.close()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was offered is on disk, or was given up. False: not within `timeout_s`."""
        return self.disk is None or self.disk.flush(timeout_s)

    def close(self, timeout_s: float | None = CLOSE_S) -> None:
        """Write what waits to be written, then let go of the memory; what still views it keeps it alive. Idempotent.

        `timeout_s` bounds the wait for a slow or hanging disk; None: no bound. What is not written by then is not on
        disk, which is logged and counted. A thread that hangs in the disk keeps the memory that it reads or writes.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.disk is not None:
            self.disk.close(timeout_s)
        self.arena.close()
        with self._lock:
            for identity, ready in self._stagings.items():
                # Who waits for a thread that hangs in the disk need not, nor who comes later.
                ready = self._stagings[identity] = ready or threading.Event()
                ready.set()

    def __enter__(self) -> StorageManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------ being seen

    def counts(self) -> dict[Series, float]:
        """What has happened in the disk tier so far."""
        return {} if self.disk is None else self.disk.counts()

    def gauges(self) -> dict[Series, float]:
        """What is the case now, in both tiers."""
        kinds = {
            "used": self.cpu.used_bytes,
            "reserved": self.cpu.reserved_bytes,
            "pinned": self.cpu.pinned_bytes,
            "capacity": self.cpu.capacity_bytes,
        }
        gauges: dict[Series, float] = {("arena_bytes", (("kind", kind),)): nbytes for kind, nbytes in kinds.items()}
        gauges["entries", ()] = len(self.cpu)
        return gauges if self.disk is None else gauges | self.disk.gauges()

    # ------------------------------------------------------------ inside

    def _stored(self, entry: Entry) -> None:
        if self._on_stored is not None:
            self._on_stored(entry)
        self.offer(entry)

    def _stage(self, identity: bytes) -> bool:
        """True: until `_staged` the caller alone may bring the entry in. False: another was about to, and is ready.
        Raises ValueError if all was closed meanwhile."""
        with self._lock:
            if identity not in self._stagings:
                self._stagings[identity] = None
                return True
            ready = self._stagings[identity] = self._stagings[identity] or threading.Event()
        ready.wait()
        _open = self.arena.buffer
        return False

    def _staged(self, identity: bytes) -> None:
        with self._lock:
            ready = self._stagings.pop(identity)
        if ready is not None:
            ready.set()

    def _read(self, identity: bytes, disk: LocalDiskBackend) -> Pin | None:
        """The entry, brought into the arena and pinned: to borrow it, now that it is there, would be a second use."""
        for filed in self._found(identity, disk):
            extent = self.cpu.reserve(filed.nbytes)
            try:
                found = disk.read(identity, self.arena.buffer[extent.offset : extent.offset + filed.nbytes])
            except BaseException:
                self.cpu.release(extent)
                raise
            if found is not None:
                return self.cpu.publish_pinned(extent, identity, found.nbytes, found.rows, found.dim, found.dtype)
            self.cpu.release(extent)
        _open = self.arena.buffer  # where all was closed meanwhile, that nothing was found says nothing
        return None

    def _found(self, identity: bytes, disk: LocalDiskBackend) -> Iterator[Filed]:
        """What is on disk, to be read; once more if that failed because another node has put an entry of another size
        in its place."""
        filed = disk.find_readable(identity)
        if filed is None and disk.find(identity) is None:
            filed = disk.look(identity)
        if filed is not None:
            yield filed
            now = disk.find(identity)
            if now is not None and now.nbytes != filed.nbytes:
                yield now
