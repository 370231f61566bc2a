"""The tiers of one engine room, and the memory under them.

Owns the arena, the CPU tier in it and the disk tier below, and the walk from one to the other. Must never know of
tensors or identifiers: tiers speak identities and bytes. Torch-free.

What the CPU tier stores is offered to the disk tier at once; what only the disk tier holds is brought back into the
arena, by one read however many ask, and is then an entry like any other.
"""

from __future__ import annotations

import threading

from ec_p2p.config import DEFAULTS, Config
from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import Entry, Listener, LocalCPUBackend, Pin
from ec_p2p.engine.disk import LocalDiskBackend
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
        self._stagings: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.disk: LocalDiskBackend | None = None
        self.arena = Arena.create(max_local_cpu_size, slab_size)
        try:
            self.cpu = LocalCPUBackend(
                self.arena,
                policy=make_policy(cache_policy),
                on_slab=on_slab,
                on_stored=self._stored,
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
        """What is known to be on disk; no I/O. See LocalDiskBackend.find."""
        return None if self.disk is None else self.disk.find(identity)

    def borrow(self, identity: bytes) -> Pin | None:
        """The entry, pinned; brought in from disk if need be. None: no tier holds it.

        Raises OutOfMemory or TooLarge when it is on disk and the arena has no room for it.
        """
        while True:
            pin = self.cpu.borrow(identity)
            if pin is not None:
                self.offer(pin.entry)
                return pin
            if self.disk is None or not self._stage(identity, self.disk):
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
            return  # evicted, or closed, by another thread
        if not self.disk.offer(pin, payload):
            pin.close()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was offered is on disk, or was given up. False: not within `timeout_s`."""
        return self.disk is None or self.disk.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Write what waits to be written, then let go of the memory; what still views it keeps it alive. Idempotent.

        `timeout_s` bounds the wait for a slow disk; what is not written by then is not on disk.
        """
        if self._closed:
            return
        self._closed = True
        if self.disk is not None:
            self.disk.close(timeout_s)
        self.arena.close()

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

    def _stage(self, identity: bytes, disk: LocalDiskBackend) -> bool:
        """Bring the entry into the arena, or wait for the thread that does. False: it is not on disk."""
        with self._lock:
            other = self._stagings.get(identity)
            if other is None:
                mine = self._stagings[identity] = threading.Event()
        if other is not None:
            other.wait()
            return True  # look again: what that thread met, this one will meet too
        try:
            # It may have been brought in by a thread that was ready just before.
            return self.cpu.peek(identity) is not None or self._read(identity, disk)
        finally:
            with self._lock:
                del self._stagings[identity]
            mine.set()

    def _read(self, identity: bytes, disk: LocalDiskBackend) -> bool:
        filed = disk.find(identity) or disk.look(identity)
        if filed is None:
            return False
        extent = self.cpu.reserve(filed.nbytes)
        try:
            found = disk.read(identity, self.arena.buffer[extent.offset : extent.offset + filed.nbytes])
        except BaseException:
            self.cpu.release(extent)
            raise
        if found is None:
            self.cpu.release(extent)
            return False
        self.cpu.publish(extent, identity, found.nbytes, found.rows, found.dim, found.dtype)
        return True
