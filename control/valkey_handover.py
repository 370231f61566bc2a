"""What passes between a loop and a thread that talks to a Valkey or Redis server.

Owns two queues, one for each way, and the descriptor that wakes the loop. Both are bounded: the thread waits for room,
the loop is told that there is none. Neither must hold a lock while it does anything else.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ToLoop(Generic[T]):
    """What the thread has for the loop, in order. Poll `fd`, then `take`."""

    def __init__(self, room: int) -> None:
        """`room`: how much may lie here before `post` waits, in whatever it is that `size` counts."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._room = room
        self._items: deque[tuple[T, int]] = deque()
        self._size = 0
        self._changed = threading.Condition()
        self._closed = False

    def post(self, item: T, size: int = 1) -> None:
        """By the thread. Waits for room; forgotten once this is closed."""
        with self._changed:
            while self._size >= self._room and not self._closed:
                self._changed.wait()
            if not self._closed:
                self._items.append((item, size))
                self._size += size
                os.eventfd_write(self.fd, 1)

    def wake(self) -> None:
        """By the thread: there is something else for the loop to see."""
        with self._changed:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def take(self, most: int) -> list[T]:
        """By the loop: up to `most` by size, and one more; `fd` stays readable when something is left."""
        taken = []
        with self._changed:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            size = 0
            while self._items and size < most:
                item, cost = self._items.popleft()
                taken.append(item)
                size += cost
            self._size -= size
            if self._items:
                os.eventfd_write(self.fd, 1)
            self._changed.notify()
        return taken

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._items.clear()
                os.close(self.fd)
                self._changed.notify()


class ToThread(Generic[T]):
    """What the loop has for the thread, in order: the first one stays the first until it is done."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def unfinished(self) -> list[T]:
        with self._changed:
            return list(self._items)

    def offer(self, item: T) -> bool:
        """By the loop. False: there is no room, it was not taken."""
        with self._changed:
            if self._closed or len(self._items) >= self._room:
                return False
            self._items.append(item)
            self._changed.notify()
            return True

    def replace(self, item: T) -> None:
        """By the loop: this, instead of everything that is not done yet."""
        with self._changed:
            if not self._closed:
                self._items.clear()
                self._items.append(item)
                self._changed.notify()

    def first(self, wait_s: float | None = None) -> T | None:
        """By the thread. None: there was nothing for so long, or there is nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, wait_s)
            return self._items[0] if self._items else None

    def done(self, item: T) -> None:
        """By the thread, with what `first` gave. It may have been replaced meanwhile."""
        with self._changed:
            if self._items and self._items[0] is item:
                self._items.popleft()

    def close(self) -> None:
        """By the loop: nothing more comes; what is here may still be done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
