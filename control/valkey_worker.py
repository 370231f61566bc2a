"""The thread that talks to a Valkey or Redis server, so that a node's loop need not wait for one.

Owns the thread, its one connection, and what passes between it and the loop. The loop must never wait for the thread,
but a bounded time in `close`; the thread must never touch what the loop owns.

    connect --works--> serve --Unreachable, Refuses--> wait, longer each time, and connect again
            --fails--------------------------------> wait, longer each time, and connect again
            --Moved--> connect to where the keys are said to be; after any other trouble, to the endpoint again

Before each of them the thread may be told to end.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ec_p2p.control.valkey_server import Connection, Moved, Refuses, Server, Unreachable

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_FIRST_S = 0.05
_RETRY_LAST_S = 1.0
_LONGEST_CALL_S = 2.0
_CLOSE_S = 1.0


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


class Worker:
    """Calls `serve(connection, answers)` in a thread of its own, again and again until `close`. It calls `answers()`
    whenever the server did what was wanted, and returns when its owner wants to end. `on_turn()`, called in the thread,
    follows every change of `answering`.
    """

    def __init__(
        self,
        server: Server,
        endpoint: str,
        what: str,
        node_timeout_s: float,
        serve: Callable[[Connection, Callable[[], None]], None],
        on_turn: Callable[[], None],
    ) -> None:
        self.answering = False
        self.refused = ""
        """Why the server will not do what it is asked; empty while it does, or is not reached."""
        self._server = server
        self._endpoint = endpoint
        self._what = what
        self._node_timeout_s = node_timeout_s
        self._serve = serve
        self._on_turn = on_turn
        self._trouble = ""
        self._retry_s = _RETRY_FIRST_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ec-p2p-valkey-{what}", daemon=True)

    @property
    def ending(self) -> bool:
        return self._ending.is_set()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; wait for it, but not for a server that hangs: then it ends soon, by itself."""
        self._ending.set()
        self._thread.join(_CLOSE_S)

    def _answers(self) -> None:
        if self.answering:
            return
        if self._trouble:
            log.info("directory %s, %s: it answers again", self._endpoint, self._what)
        self.answering = True
        self.refused = self._trouble = ""
        self._retry_s = _RETRY_FIRST_S
        self._on_turn()

    def _run(self) -> None:
        # A call may take long on a busy server, and must not take a lease's time.
        call_s = min(_LONGEST_CALL_S, self._node_timeout_s / 2)
        server = self._server
        while not self.ending:
            try:
                with server.connect(call_s, self._node_timeout_s) as connection:
                    self._serve(connection, self._answers)
            except Moved as moved:
                if server is self._server:
                    server = dataclasses.replace(server, host=moved.host or server.host, port=moved.port)
                    continue
                self._note("unreachable", f"cannot be reached: it sends us on and on: {moved}")
            except Unreachable as error:
                self._note("unreachable", f"cannot be reached: {error}")
            except Refuses as error:
                self.refused = str(error)
                self._note(str(error), f"refuses: {error}")
            except Exception as error:
                if repr(error) != self._trouble:
                    log.exception("the thread for directory %s failed; going on", self._endpoint)
                self._note(repr(error), "cannot be used: an error of this process")
            server = self._server
            # Not all at once, where a server comes back to a whole fleet.
            self._ending.wait(self._retry_s * random.uniform(0.5, 1.0))
            self._retry_s = min(2 * self._retry_s, _RETRY_LAST_S, self._node_timeout_s / 4)

    def _note(self, trouble: str, text: str) -> None:
        """One line for each change of what is wrong."""
        if not self.ending and trouble != self._trouble:
            log.warning("directory %s, %s: %s; trying again", self._endpoint, self._what, text)
        self._trouble = trouble
        self.answering = False
        self._on_turn()
