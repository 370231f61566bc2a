"""Staging: bringing entries from this node's disk into its arena.

Owns the reads in flight and the extents they land in. It must never block: the disk is read by helper threads, into
memory that the loop has reserved and that the loop turns into an entry, or frees, when they are done. One read per
identity, however many wait for it.

    WAITING_MEMORY --arena has room--> READING --verified--> (staged)
                                               --gone, damaged, disk unwell, late--> (failed)

An entry that another node has written into a shared folder is not known here before somebody has looked: `look` does
that, for an entry that was found nowhere else.

A disk may hang, and a thread with it. Who waits is told so after `read_timeout_s`; the memory stays reserved until the
thread is back, and until then nothing is found on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ec_p2p.engine.cpu import Entry, OutOfMemory, TooLarge
from ec_p2p.engine.extents import Extent
from ec_p2p.engine.filed import Filed
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Tally
from ec_p2p.node.mailbox import Helpers, Mailbox

_READERS = 2
"""Reads at once: enough to keep a disk busy beside one that is slow to answer."""
_CLOSE_S = 1.0


class _Staged:
    """One entry on its way from disk."""

    __slots__ = ("deadline", "extent", "filed", "give_up_at", "started_at")

    def __init__(self, filed: Filed, now: float, give_up_at: float) -> None:
        self.filed = filed
        self.started_at = now
        self.give_up_at = give_up_at
        self.deadline = give_up_at
        self.extent: Extent | None = None


class Staging:
    """All reads from disk of one node. Used by the node's loop only; without a disk tier it finds nothing.

    `on_staged(entry, started_at)` or `on_failed(identity, reason)` is called once per staging, perhaps from within
    `bring`, and `on_staged` perhaps once more when an entry comes after all; `on_looked(identity)` once per `look`,
    never from within it.
    """

    def __init__(
        self,
        storage: StorageManager,
        mailbox: Mailbox,
        counters: Tally,
        read_timeout_s: float,
        on_staged: Callable[[Entry, float], None],
        on_failed: Callable[[bytes, str], None],
        on_looked: Callable[[bytes], None],
    ) -> None:
        self._storage = storage
        self._cpu = storage.cpu
        self._arena = storage.arena
        self._disk = storage.disk
        self._counters = counters
        self._read_timeout_s = read_timeout_s
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._on_looked = on_looked
        self._helpers = Helpers(mailbox, _READERS, "ec-p2p-disk-reader") if self._disk else None
        self._stagings: dict[bytes, _Staged] = {}
        self._looking: dict[bytes, float] = {}
        self._overdue = 0
        self._memory_freed = False

    def __contains__(self, identity: bytes) -> bool:
        """Whether it is on its way."""
        return identity in self._stagings

    def __len__(self) -> int:
        return len(self._stagings)

    @property
    def can_look(self) -> bool:
        """Whether there is a folder to look into, and it answers."""
        return self._disk is not None and not self._overdue

    def looking(self, identity: bytes) -> bool:
        return identity in self._looking

    def find(self, identity: bytes) -> Filed | None:
        """What is known to be on disk, while that can be read."""
        return None if self._overdue else self._storage.find_on_disk(identity)

    def look(self, identity: bytes, now: float) -> None:
        """See whether the folder has got the entry meanwhile."""
        if self._disk is None or self._helpers is None or identity in self._looking:
            return
        disk = self._disk
        self._looking[identity] = now + self._read_timeout_s
        self._helpers.submit(lambda: disk.look(identity), lambda _: self._looked(identity))

    def bring(self, identity: bytes, now: float, give_up_at: float) -> bool:
        """Have an entry on its way, for somebody who waits until `give_up_at`; who joins may be more patient than those
        before. False: `find` does not find it."""
        staged = self._stagings.get(identity)
        if staged is not None:
            staged.give_up_at = max(staged.give_up_at, give_up_at)
            return True
        filed = self.find(identity)
        if filed is None:
            return False
        staged = self._stagings[identity] = _Staged(filed, now, give_up_at)
        self._allocate(staged, now)
        return True

    def memory_freed(self) -> None:
        """Memory may have become free or evictable."""
        self._memory_freed = True

    @property
    def memory_pending(self) -> bool:
        """Memory was freed that entries may be waiting for."""
        return self._memory_freed and bool(self._stagings)

    def progress(self, now: float) -> None:
        memory_freed, self._memory_freed = self._memory_freed, False
        for staged in list(self._stagings.values()):
            if staged.extent is not None:
                if now >= staged.deadline:
                    self._overdue += 1
                    self._end(staged, "late")
            elif now >= staged.give_up_at:
                self._end(staged, "no_memory")
            elif memory_freed:
                self._allocate(staged, now)
        for identity in [identity for identity, deadline in self._looking.items() if now >= deadline]:
            self._overdue += 1
            del self._looking[identity]
            self._on_looked(identity)

    def deadlines(self) -> Iterable[float]:
        for staged in self._stagings.values():
            yield staged.give_up_at if staged.extent is None else staged.deadline
        yield from self._looking.values()

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.close(_CLOSE_S)

    # -------------------------------------------------------- inside

    def _allocate(self, staged: _Staged, now: float) -> None:
        assert self._disk is not None
        assert self._helpers is not None
        disk, filed = self._disk, staged.filed
        try:
            extent = self._cpu.reserve(filed.nbytes)
        except TooLarge:
            self._end(staged, "too_large")
            return
        except OutOfMemory:
            return
        staged.extent = extent
        staged.deadline = now + self._read_timeout_s
        landing = self._arena.buffer[extent.offset : extent.offset + filed.nbytes]
        self._helpers.submit(lambda: disk.read(filed.identity, landing), lambda found: self._read(staged, found))

    def _read(self, staged: _Staged, found: Filed | None) -> None:
        assert staged.extent is not None
        identity = staged.filed.identity
        overdue = self._stagings.get(identity) is not staged
        self._overdue -= overdue
        if found is None:
            self._cpu.release(staged.extent)
            if not overdue:
                self._end(staged, "unreadable")
            return
        entry = self._cpu.publish(staged.extent, identity, found.nbytes, found.rows, found.dim, found.dtype)
        if not overdue:
            del self._stagings[identity]
            self._counters.add("stagings", outcome="staged")
        self._counters.add("staged_bytes", found.nbytes)
        self._counters.add("staging_seconds", time.monotonic() - staged.started_at)
        self._on_staged(entry, staged.started_at)

    def _end(self, staged: _Staged, reason: str) -> None:
        del self._stagings[staged.filed.identity]
        self._counters.add("stagings", outcome=reason)
        self._on_failed(staged.filed.identity, reason)

    def _looked(self, identity: bytes) -> None:
        if self._looking.pop(identity, None) is None:
            self._overdue -= 1
        else:
            self._on_looked(identity)
