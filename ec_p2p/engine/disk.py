"""The second tier: entries as files in a folder that other nodes may share.

Owns the folder's files as this process sees them: what is read is verified, what is written counts, what is damaged is
set aside, and a disk that fails is left alone for a while. Must never raise what the disk raises, nor touch a payload
after `close`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress

from ec_p2p.engine.breaker import Breaker
from ec_p2p.engine.cpu import Pin
from ec_p2p.engine.disk_index import DiskIndex, OnFiled, OnLost
from ec_p2p.engine.examine import Examiner
from ec_p2p.engine.filed import Abandoned, Damaged, Filed, fsync_folder, path_of, write_file
from ec_p2p.engine.files import Files
from ec_p2p.engine.policy import LRU, EvictionPolicy
from ec_p2p.engine.scan import Scanner
from ec_p2p.engine.set_aside import SetAside
from ec_p2p.engine.tally import Series, Tally
from ec_p2p.engine.trouble import DELETED, TO_WRITE, Unreadable, is_one_paths
from ec_p2p.engine.write_behind import Job, Offer, WriteBehind

logger = logging.getLogger(__name__)

LAYOUT = "ec-p2p-1"
"""The folder below the configured one: another layout would get another name."""

CLOSE_S = 20.0
"""How long `close` waits for a slow disk, unless told otherwise."""
_MOMENT_S = 0.1
"""What a thread may need to end that has nothing to do."""

_HITS: Series = ("disk_reads", (("outcome", "hit"),))
_READ_BYTES: Series = ("disk_read_bytes", ())
_COUNTS: list[Series] = [
    ("disk_writes", ()),
    ("disk_written_bytes", ()),
    _READ_BYTES,
    ("disk_reads_refused", ()),
    ("disk_evictions", ()),
    ("disk_damaged", ()),
    ("disk_swept", ()),
    *(("disk_reads", (("outcome", outcome),)) for outcome in ("hit", "miss", "damaged", "error")),
    *(("disk_skipped", (("reason", reason),)) for reason in ("queue_full", "breaker", "too_large", "in_use", "closed")),
]


class LocalDiskBackend:
    """Entries of at most `max_local_disk_size` bytes of files, by identity. Any thread may call.

    `on_filed` and `on_lost` hear of each entry that came to be, or stopped being, on disk: by this process or found
    out about others; from the moment the object is made, so before the constructor returns.
    """

    def __init__(
        self,
        folder: str,
        max_local_disk_size: int = 64 << 30,
        *,
        policy: EvictionPolicy | None = None,
        queue_bytes: int = 256 << 20,
        fsync: bool = False,
        rescan_s: float = 300.0,
        on_filed: OnFiled | None = None,
        on_lost: OnLost | None = None,
        files: Files | None = None,
    ) -> None:
        """Creates the folder. Raises OSError if that fails, ValueError for sizes that cannot be meant."""
        if not folder:
            raise ValueError(f"local_disk={folder!r} names no folder")
        for name, value in {"max_local_disk_size": max_local_disk_size, "queue_bytes": queue_bytes}.items():
            if value <= 0:
                raise ValueError(f"{name}={value!r}; accepted: a positive number of bytes")
        if not 0 < rescan_s < float("inf"):
            raise ValueError(f"rescan_s={rescan_s!r}; accepted: a positive number of seconds")
        self._root = os.path.join(os.path.abspath(folder), LAYOUT)
        try:
            os.makedirs(self._root, exist_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"local_disk={folder!r} cannot be made: {error.strerror}", self._root) from None
        self._fsync = fsync
        self._files = Files() if files is None else files
        self._tally = Tally(_COUNTS)
        self._index = DiskIndex(max_local_disk_size, LRU() if policy is None else policy, on_filed, on_lost)
        self.find = self._index.find
        """(identity) -> the entry as far as this process knows; no I/O, no lock. Another may have deleted it."""
        self._write_breaker = Breaker()
        self._read_breaker = Breaker()
        self._closed = False
        self._abandoned = False
        self._close_lock = threading.Lock()
        self._aside = SetAside(self._files, self._root, self._index, self._tally)
        self._examiner = Examiner(
            self._files, self._root, self._index, self._aside, self._tally, lambda: self._abandoned
        )
        self._scanner = Scanner(
            self._files,
            self._root,
            self._index,
            self._examiner,
            self._aside,
            self._tally,
            rescan_s=rescan_s,
            remove=self._remove,
        )
        self._queue = WriteBehind(queue_bytes, self._write)
        self._scanner.start()

    # ------------------------------------------------------------ looking and reading

    def find_readable(self, identity: bytes) -> Filed | None:
        """As `find`; but None while reads are refused because they failed, which is counted. It finds again when the
        next may try."""
        filed = self._index.find(identity)
        if filed is not None and self._read_breaker.refuses():
            self._tally.add("disk_reads_refused")
            return None
        return filed

    def look(self, identity: bytes) -> Filed | None:
        """The entry as the folder has it: what others wrote is found, what they deleted is lost. Blocking.

        Only its header is read. None also while reads are refused because they failed.
        """
        return self._look(identity, None)[0]

    def read(self, identity: bytes, into: memoryview) -> Filed | None:
        """Fill `into`, which has exactly the entry's payload bytes, and verify every byte of it. Blocking.

        None: it is gone, damaged, not of this size, or the disk does not answer; `into` then holds anything. The entry
        becomes the most recently used one.
        """
        into = into.cast("B")
        filed, outcome = self._look(identity, into)
        if filed is not None:
            if filed.nbytes == len(into):
                self._tally.add_all((_HITS, 1.0), (_READ_BYTES, len(into)))
                return filed
            outcome = "miss"
        if outcome:
            self._tally.add("disk_reads", outcome=outcome)
        return None

    def _look(self, identity: bytes, into: memoryview | None) -> tuple[Filed | None, str]:
        """What there is, and how the attempt ended: 'hit', 'miss', 'damaged', 'error', or '' if there was none."""
        if not self._index.begin_read(identity):
            return None, "miss"
        used = False
        try:
            if not self._read_breaker.admit():
                self._tally.add("disk_reads_refused")
                return None, ""
            try:
                filed = self._examiner.examine(identity, into)
            except Damaged:
                self._succeed("read", self._read_breaker)
                return None, "damaged"
            except Abandoned:
                return None, "miss"
            except Unreadable as error:
                self._tally.add_error("read", error)
                self._read_breaker.undecided()
                return None, "miss"
            except OSError as error:
                self._fail("read", self._read_breaker, error)
                if isinstance(error, FileNotFoundError):
                    self._scanner.wake()  # the whole folder: what was in it is lost
                return None, "error"
            if filed is None:
                # That there is no file does not say that one could be read.
                self._read_breaker.undecided()
                return None, "miss"
            self._succeed("read", self._read_breaker)
            used = into is not None and filed.nbytes == len(into)
            return filed, "hit"
        finally:
            self._index.end_read(identity, used)

    # ------------------------------------------------------------ writing

    def offer(self, pin: Pin, payload: memoryview) -> bool:
        """Have the pinned entry written later; `payload` is its bytes. Never blocks, does no I/O.

        True: the pin is closed by the writer, when the file stands or the attempt is over. False: it is still the
        caller's, since the entry is on disk or on its way, or there is no place for it (which is counted).
        """
        identity = pin.entry.identity
        if self._index.find(identity) is not None or self._queue.holds(identity):
            return False
        payload = payload.cast("B")
        if _filed(pin).file_bytes > self._index.capacity_bytes:
            return self._skip("too_large")
        if self._write_breaker.refuses():
            return self._skip("breaker")
        offer = self._queue.offer(pin, payload)
        if offer is Offer.FULL:
            return self._skip("queue_full")
        return offer is Offer.TAKEN

    def _write(self, job: Job) -> None:
        if not self._write_breaker.admit():
            self._skip("breaker")
            return
        try:
            self._scanner.wait_sized()
            written = self._file(_filed(job.pin), job.payload)
        except OSError as error:
            self._fail("write", self._write_breaker, error)
            return
        if written:
            self._succeed("write", self._write_breaker)
        else:
            self._write_breaker.undecided()

    def _file(self, filed: Filed, payload: memoryview) -> bool:
        """Whether the file was written. Raises OSError for what concerns all."""
        with self._index.using(filed.identity) as free:
            if not free:
                return self._skip("in_use")
            with suppress(Damaged, Unreadable):
                if self._examiner.examine(filed.identity) == filed:
                    return False  # another node was first
            if not self._make_room(filed.file_bytes):
                return self._skip("in_use")
            stands = None
            try:
                write_file(self._files, self._root, filed, payload, fsync=self._fsync, abandoned=self._queue.abandoned)
                stands = filed
                if self._fsync:
                    fsync_folder(self._files, self._root, filed.identity)
            except OSError as error:
                if not is_one_paths(self._files, self._root, error, TO_WRITE):
                    raise
                self._tally.add_error("write", error)
                return False
            finally:
                self._index.settle(filed.file_bytes, stands)
                if stands is not None:
                    self._tally.add("disk_writes")
                    self._tally.add("disk_written_bytes", filed.file_bytes)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Reserve room in the index, and in the folder. False, or OSError: nothing is reserved."""
        while True:
            victims = self._index.reserve(nbytes)
            if victims is None:
                # Damaged files give way last, but they must not keep the tier from working.
                self._aside.prune(kept=0)
                victims = self._index.reserve(nbytes)
            if victims is None:
                return False
            removed = False
            try:
                removed = self._remove(victims)
            finally:
                if not removed:
                    self._index.settle(nbytes, None)
            if removed:
                return True

    def _remove(self, victims: list[bytes]) -> bool:
        """Unlink what the index gave up. False: not all could be, and what is left counts on. On OSError, too."""
        left = list(reversed(victims))
        all_gone = True
        try:
            while left:
                try:
                    self._files.unlink(path_of(self._root, left[-1]))
                except OSError as error:
                    if error.errno not in DELETED:
                        self._index.kept(left.pop())
                        if not is_one_paths(self._files, self._root, error, TO_WRITE):
                            raise
                        self._tally.add_error("write", error)
                        all_gone = False
                        continue
                self._index.removed(left.pop())
                self._tally.add("disk_evictions")
        finally:
            for identity in left:
                self._index.spared(identity)
        return all_gone

    # ------------------------------------------------------------ the end, and what is told

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything offered before is on disk or given up. False: it took longer than that."""
        return self._queue.flush(timeout_s)

    def close(self, timeout_s: float | None = CLOSE_S) -> None:
        """`flush`, then end all work; afterwards no payload is touched. Idempotent.

        Takes at most `timeout_s` and a moment, whatever the disk does; None: as long as that takes. What could not be
        written in time is counted as skipped and keeps its pins, and a warning says so: its memory is still in use.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if deadline is None else max(_MOMENT_S, deadline - time.monotonic())

        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._index.refuse_reads()
        if not self._queue.close(left_s()):
            entries, nbytes = self._queue.queued_entries, self._queue.queued_bytes
            self._tally.add("disk_skipped", entries, reason="closed")
            logger.warning("%d entries of %d bytes were not written to %s in time", entries, nbytes, self._root)
        reads = self._index.wait_reads(left_s())
        self._abandoned = reads > 0
        if self._abandoned:
            logger.warning("%d reads from %s did not end in time", reads, self._root)
        if not self._scanner.close(left_s()):
            logger.warning("the scan of %s did not end in time", self._root)

    def __enter__(self) -> LocalDiskBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def counts(self) -> dict[Series, float]:
        """What has happened so far; numbers only grow."""
        return self._tally.values()

    def gauges(self) -> dict[Series, float]:
        """What is the case now."""
        kinds = {
            "used": self._index.used_bytes,
            "capacity": self._index.capacity_bytes,
            "queued": self._queue.queued_bytes,
        }
        gauges: dict[Series, float] = {("disk_bytes", (("kind", kind),)): float(n) for kind, n in kinds.items()}
        gauges["disk_entries", ()] = float(len(self._index))
        for op, breaker in (("write", self._write_breaker), ("read", self._read_breaker)):
            gauges["disk_breaker", (("op", op),)] = float(breaker.is_open)
        return gauges

    def _skip(self, reason: str) -> bool:
        self._tally.add("disk_skipped", reason=reason)
        return False

    def _fail(self, op: str, breaker: Breaker, error: OSError) -> None:
        self._tally.add_error(op, error)
        if breaker.failed():
            logger.warning("%s: a %s failed (%s); the next is tried in %g s", self._root, op, error, breaker.delay_s)

    def _succeed(self, op: str, breaker: Breaker) -> None:
        if breaker.succeeded():
            logger.warning("%s: %ss work again", self._root, op)


def _filed(pin: Pin) -> Filed:
    entry = pin.entry
    return Filed(entry.identity, entry.nbytes, entry.rows, entry.dim, entry.dtype)
