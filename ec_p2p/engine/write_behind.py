"""Entries on their way to the disk: a put leaves them here and goes on.

Owns the queue (bounded in bytes, one place per key), the thread that empties it, and the pins that came with the
entries: each is closed exactly once, when its entry stands or was given up. Must never do I/O itself; what writing
means is the caller's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ec_p2p.engine.cpu import Pin
from ec_p2p.engine.filed import Abandoned

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """An entry to write; `payload` stays as it is while the pin is open."""

    pin: Pin
    payload: memoryview


class Offer(Enum):
    TAKEN = "taken"
    QUEUED = "queued"
    FULL = "full"
    CLOSED = "closed"


class WriteBehind:
    """One thread that calls `write` for each job taken, in turn. What `write` raises is logged and ends that job only,
    except for Abandoned, which ends the thread."""

    def __init__(self, queue_bytes: int, write: Callable[[Job], None]) -> None:
        self._queue_bytes = queue_bytes
        self._write = write
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._keys: set[bytes] = set()
        self._bytes = 0
        self._taken = 0
        self._done = 0
        self._closing = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="ec-p2p-disk-writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait or are being written."""
        return self._bytes

    @property
    def queued_entries(self) -> int:
        """Entries that wait or are being written."""
        return len(self._keys)

    def abandoned(self) -> bool:
        """Whether `close` has given up waiting: what is being written must not be touched any more."""
        return self._abandoned

    def holds(self, identity: bytes) -> bool:
        """Whether this entry waits or is being written."""
        return identity in self._keys

    def offer(self, pin: Pin, payload: memoryview) -> Offer:
        """TAKEN: the pin is ours from now on. An entry larger than the whole queue is taken when nothing else is."""
        identity = pin.entry.identity
        with self._changed:
            if self._closing:
                return Offer.CLOSED
            if identity in self._keys:
                return Offer.QUEUED
            if self._keys and self._bytes + len(payload) > self._queue_bytes:
                return Offer.FULL
            self._waiting.append(Job(pin, payload))
            self._keys.add(identity)
            self._bytes += len(payload)
            self._taken += 1
            self._changed.notify_all()
            return Offer.TAKEN

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all that was taken before is written or given up. False: it took longer than that."""
        with self._changed:
            target = self._taken
            self._changed.wait_for(lambda: self._done >= target or self._abandoned, timeout_s)
            return self._done >= target

    def close(self, timeout_s: float | None) -> bool:
        """Take nothing more, `flush`, and end the thread. False: it is still at work, and the pins it has stay open."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._abandoned = self._thread.is_alive()
            self._changed.notify_all()
        return not self._abandoned

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._write(job)
            except Abandoned:
                return
            except Exception:
                logger.exception("could not write entry %s", job.pin.entry.identity.hex())
            if self._abandoned:
                return
            self._end(job)
            del job  # else an idle thread would hold a view of the arena

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting and not self._abandoned else None

    def _end(self, job: Job) -> None:
        # Under no lock: closing a pin takes the CPU tier's, under which others offer.
        job.pin.close()
        with self._changed:
            self._keys.discard(job.pin.entry.identity)
            self._bytes -= len(job.payload)
            self._done += 1
            self._changed.notify_all()
