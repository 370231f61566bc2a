"""Staging: bringing entries from this node's disk into its arena.

Owns the reads, those that run and those that wait for a thread or for memory, and the extents they land in. It must
never block: the disk is read by helper threads, into memory that the loop has reserved and that the loop turns into an
entry, or frees, when they are done. One read per identity, however many wait for it.

    QUEUED --its turn, a thread is idle, the arena has room--> READING --verified--> (staged)
                                                                      --gone, damaged, disk unwell--> (failed)
    QUEUED --its turn, the arena has no room--> WAITING_MEMORY --some was freed--> QUEUED, in its old place
    QUEUED --its turn, it is not to be found on disk any more--> (failed)
    QUEUED, WAITING_MEMORY --nobody wants it any more, as it came by another way for one--> (dropped)
                           --nobody is as patient as this--> (failed)
    READING --read_timeout_s--> (failed), and OVERDUE --the thread is back, with the entry--> (staged)
                                                      --without it--> (gone)

An entry that another node has written into a shared folder is not known here before somebody has looked: `look` does
that, for an entry that was found nowhere else. Looks wait in the same queue.

A disk may hang, and a thread with it. A job counts as hanging when `read_timeout_s` have passed since a thread took it;
how long it was queued says nothing of the disk. Then who waits for this or for any other that no thread has taken is
told; the memory stays reserved until the thread is back, and until then nothing is found on disk.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from enum import Enum

from ec_p2p.engine.cpu import Entry, OutOfMemory, TooLarge
from ec_p2p.engine.extents import Extent
from ec_p2p.engine.filed import Filed
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Tally
from ec_p2p.node.mailbox import Helpers, Mailbox
from ec_p2p.node.memory import Memory

logger = logging.getLogger(__name__)

_READERS = 2
"""Reads at once: enough to keep a disk busy beside one that is slow to answer."""
_CLOSE_S = 1.0


class Stage(Enum):
    QUEUED = "waiting for a thread"
    WAITING_MEMORY = "waiting for memory"
    RUNNING = "on a thread"
    OVERDUE = "on a thread that does not come back"


class _Job:
    """Something for a thread to do. `number` is its place in the queue."""

    __slots__ = ("identity", "late_at", "number", "stage")

    def __init__(self, number: int, identity: bytes) -> None:
        self.number = number
        self.identity = identity
        self.stage = Stage.QUEUED
        self.late_at = float("inf")

    def __lt__(self, other: _Job) -> bool:
        return self.number < other.number


class _Look(_Job):
    """One look into the folder."""

    __slots__ = ()


class _Read(_Job):
    """One entry on its way from disk."""

    __slots__ = ("extent", "give_up_at", "started_at")

    def __init__(self, number: int, identity: bytes, now: float, give_up_at: float) -> None:
        super().__init__(number, identity)
        self.started_at = now
        self.give_up_at = give_up_at
        self.extent: Extent | None = None


class Staging:
    """All reads from disk of one node. Used by the node's loop only; without a disk tier it finds nothing.

    Each staging that somebody wants to the end calls `on_staged(entry, started_at)` or `on_failed(identity, reason)`
    once, and `on_staged` perhaps once more when an entry comes after all; each look calls `on_looked(identity)` once.
    None of them is called from within `bring` or `look`. `still_wanted` tells whether anybody waits.
    """

    def __init__(
        self,
        storage: StorageManager,
        memory: Memory,
        mailbox: Mailbox,
        counters: Tally,
        read_timeout_s: float,
        on_staged: Callable[[Entry, float], None],
        on_failed: Callable[[bytes, str], None],
        on_looked: Callable[[bytes], None],
        still_wanted: Callable[[bytes], bool],
    ) -> None:
        self._storage = storage
        self._memory = memory
        self._disk = storage.disk
        self._counters = counters
        self._read_timeout_s = read_timeout_s
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._on_looked = on_looked
        self._still_wanted = still_wanted
        self._helpers = Helpers(mailbox, _READERS if self._disk else 0, "ec-p2p-disk-reader")
        self._numbers = itertools.count()
        self._queue: list[_Job] = []
        """A heap, the oldest in front. What has ended meanwhile is still in it."""
        self._reads: dict[bytes, _Read] = {}
        self._looks: dict[bytes, _Look] = {}
        self._overdue = 0

    def __contains__(self, identity: bytes) -> bool:
        """Whether it is on its way."""
        return identity in self._reads

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def can_look(self) -> bool:
        """Whether there is a folder to look into, and it answers."""
        return self._disk is not None and not self._overdue

    def looking(self, identity: bytes) -> bool:
        return identity in self._looks

    def find(self, identity: bytes) -> Filed | None:
        """What is known to be on disk, while that can be read."""
        return None if self._overdue else self._storage.find_on_disk(identity)

    def look(self, identity: bytes) -> None:
        """See whether the folder has got the entry meanwhile. Only where `can_look`; joins one that is under way."""
        if identity not in self._looks:
            look = self._looks[identity] = _Look(next(self._numbers), identity)
            heapq.heappush(self._queue, look)

    def bring(self, identity: bytes, now: float, give_up_at: float) -> bool:
        """Have an entry on its way, for somebody who waits until `give_up_at`; who joins may be more patient than those
        before. False: `find` does not find it."""
        read = self._reads.get(identity)
        if read is not None:
            read.give_up_at = max(read.give_up_at, give_up_at)
            return True
        if self.find(identity) is None:
            return False
        read = self._reads[identity] = _Read(next(self._numbers), identity, now, give_up_at)
        heapq.heappush(self._queue, read)
        return True

    def turn(self, now: float) -> None:
        """Begin what a thread is idle for, the oldest first."""
        while self._may_begin:
            job = heapq.heappop(self._queue)
            if isinstance(job, _Read):
                if self._reads.get(job.identity) is job:
                    self._begin_read(job, now)
            elif self._looks.get(job.identity) is job:
                self._begin_look(job, now)

    def progress(self, now: float) -> None:
        """End what has taken too long, or is not wanted any more."""
        for read in list(self._reads.values()):
            if read.stage is Stage.RUNNING:
                if now >= read.late_at:
                    self._hangs(read)
                    self._end(read, "late")
            elif not self._still_wanted(read.identity):
                self._end(read, "dropped")
            elif now >= read.give_up_at:
                self._end(read, "no_memory" if read.stage is Stage.WAITING_MEMORY else "deadline")
        for look in list(self._looks.values()):
            if look.stage is Stage.RUNNING and now >= look.late_at:
                self._hangs(look)
                self._end_look(look)
        if self._overdue:
            self._give_up_what_waits()

    def deadlines(self) -> Iterable[float]:
        """When there is something to do even if nothing is heard."""
        if self._may_begin:
            yield 0.0
        for read in self._reads.values():
            yield read.late_at if read.stage is Stage.RUNNING else read.give_up_at
        for look in self._looks.values():
            yield look.late_at

    def close(self) -> None:
        self._helpers.close(_CLOSE_S)

    # -------------------------------------------------------- beginning

    @property
    def _may_begin(self) -> bool:
        return bool(self._queue) and self._helpers.idle > 0 and not self._overdue

    def _begin_look(self, look: _Look, now: float) -> None:
        assert self._disk is not None
        disk, identity = self._disk, look.identity
        self._run(look, now, lambda: disk.look(identity), lambda _: self._looked(look))

    def _begin_read(self, read: _Read, now: float) -> None:
        assert self._disk is not None
        if not self._still_wanted(read.identity):
            self._end(read, "dropped")
            return
        # Once more: it may have been found to be gone, or the disk to be unwell, which is worth no eviction.
        filed = self.find(read.identity)
        if filed is None:
            self._end(read, "unreadable")
            return
        try:
            extent = self._memory.reserve(filed.nbytes)
        except TooLarge:
            self._end(read, "too_large")
            return
        except OutOfMemory:
            read.stage = Stage.WAITING_MEMORY
            self._memory.wait(read, lambda now: self._memory_freed(read, now))
            return
        self._memory.leave(read)
        read.extent = extent
        disk, identity = self._disk, read.identity
        landing = self._storage.arena.buffer[extent.offset : extent.offset + filed.nbytes]
        self._run(read, now, lambda: disk.read(identity, landing), lambda found: self._read(read, found))

    def _run(
        self,
        job: _Job,
        now: float,
        work: Callable[[], Filed | None],
        done: Callable[[Filed | None], None],
    ) -> None:
        job.stage = Stage.RUNNING
        job.late_at = now + self._read_timeout_s
        self._helpers.submit(work, done)

    def _memory_freed(self, read: _Read, now: float) -> None:
        if read.stage is Stage.WAITING_MEMORY:  # else it waits for a thread already
            read.stage = Stage.QUEUED
            heapq.heappush(self._queue, read)
        self.turn(now)

    # -------------------------------------------------------- ending

    def _read(self, read: _Read, found: Filed | None) -> None:
        overdue = self._is_back(read)
        entry = None if found is None else self._publish(read, found)
        if entry is None:
            assert read.extent is not None
            self._memory.release(read.extent)
            if not overdue:
                self._end(read, "unreadable")
            return
        if not overdue:
            del self._reads[read.identity]
            self._counters.add("stagings", outcome="staged")
        self._counters.add("staged_bytes", entry.nbytes)
        self._counters.add("staging_seconds", time.monotonic() - read.started_at)
        self._on_staged(entry, read.started_at)

    def _publish(self, read: _Read, found: Filed) -> Entry | None:
        assert read.extent is not None
        try:
            return self._memory.publish(read.extent, read.identity, found.nbytes, found.rows, found.dim, found.dtype)
        except ValueError as error:
            logger.warning("entry %s on disk cannot be stored: %s", read.identity.hex(), error)
            return None

    def _looked(self, look: _Look) -> None:
        if not self._is_back(look):
            self._end_look(look)

    def _end(self, read: _Read, reason: str) -> None:
        """It is over for those who wait for it."""
        self._memory.leave(read)
        del self._reads[read.identity]
        self._counters.add("stagings", outcome=reason)
        if reason != "dropped":
            self._on_failed(read.identity, reason)

    def _end_look(self, look: _Look) -> None:
        del self._looks[look.identity]
        self._on_looked(look.identity)

    # -------------------------------------------------------- a disk that hangs

    def _hangs(self, job: _Job) -> None:
        job.stage = Stage.OVERDUE
        self._overdue += 1

    def _is_back(self, job: _Job) -> bool:
        """Whether those who waited for it have been told already."""
        overdue = job.stage is Stage.OVERDUE
        self._overdue -= overdue
        return overdue

    def _give_up_what_waits(self) -> None:
        """What no thread has taken would find the disk hanging, too: it may be elsewhere."""
        for read in list(self._reads.values()):
            if read.stage is not Stage.RUNNING:
                self._end(read, "late")
        for look in list(self._looks.values()):
            if look.stage is Stage.QUEUED:
                self._end_look(look)
