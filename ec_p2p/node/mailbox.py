"""Calls that other threads leave for the node's loop, and the few threads to which the loop leaves what blocks.

Owns the queue, the descriptor that wakes the loop, and the threads. The loop must never block on a disk; the threads
must never touch what the loop owns: what they have to say goes through the mailbox.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 1024
"""Calls of one `run`: a scan of the disk leaves hundreds of thousands, and the loop has other things to do."""


class Mailbox:
    """`post` may be called from any thread at any time; everything else by the loop. Calls run in the order posted."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop call this soon. Forgotten once the mailbox is closed."""
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                os.eventfd_write(self.fd, 1)

    def run(self) -> None:
        """Call what was posted; `fd` stays readable when something is left."""
        with self._lock:
            os.eventfd_read(self.fd)
        try:
            for _ in range(min(len(self._calls), _AT_ONCE)):
                self._calls.popleft()()
        finally:
            with self._lock:
                if self._calls:
                    os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.clear()
                os.close(self.fd)


class Helpers:
    """`count` threads for blocking calls, used by the loop. Daemons: a disk that hangs keeps nothing alive."""

    def __init__(self, mailbox: Mailbox, count: int, name: str) -> None:
        self._mailbox = mailbox
        self.idle = count
        """Threads that would take a job at once."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Call `job` on an idle thread, now, then `done` with its result on the loop; with None where it raised.

        There is no queue: who waits for a thread would not know when its job begins, and so not when it is late."""
        assert self.idle, "no thread is idle"
        self.idle -= 1

        def back(result: T | None) -> None:
            self.idle += 1
            done(result)

        def work() -> None:
            result: T | None = None
            try:
                result = job()
            except Exception:
                logger.exception("a call left to a thread failed")
            self._mailbox.post(lambda: back(result))

        self._jobs.put(work)

    def close(self, timeout_s: float) -> None:
        """Let the threads end; wait for those that do."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
