"""Something that has to be done as soon as a device is past a mark, by a thread that waits for it.

Owns the thread. It must never hold a lock while it waits, nor exist where nothing has ever to be waited for: on the
host, copies are over when their calls return.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from ec_p2p.node.device import Mark

_JOIN_S = 5.0
"""A thread that waits for a device that hangs ends with the process."""


class Settler:
    """`settle` does what can be done by now, and returns what the rest waits for; None: there is no rest.

    It is called by the thread, and takes the locks that it needs; its errors go to `on_error`.
    """

    def __init__(self, settle: Callable[[], Mark | None], on_error: Callable[[Exception], None]) -> None:
        self._settle = settle
        self._on_error = on_error
        self._awake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = 0

    def wake(self) -> None:
        """There is something to wait for. Never waits; starts the thread if there is none yet."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="ec-p2p-settler", daemon=True)
            self._thread.start()
            # The interpreter ends its daemon threads where they are. One that is within the device's library then takes
            # the process down, with a core dump.
            self._process = os.getpid()
            atexit.register(self._close_at_exit)
        self._awake.set()

    def close(self) -> None:
        """End the thread, without waiting for what it waits for. Idempotent. The caller holds none of its locks."""
        atexit.unregister(self._close_at_exit)
        self._closed = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process:  # a child that it forked has no such thread
            self.close()

    def _run(self) -> None:
        while not self._closed:
            self._awake.wait()
            self._awake.clear()
            try:
                while not self._closed and (mark := self._settle()) is not None:
                    self._wait(mark)
            except Exception as error:
                self._on_error(error)

    def _wait(self, mark: Mark) -> None:
        try:
            mark.wait()
        except RuntimeError:
            pass  # the device has failed: whoever made the copy is told so by the mark
