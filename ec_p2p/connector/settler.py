"""Something that has to be done as soon as a device is past a mark, by a thread that waits for it.

Owns the thread. It must never hold a lock while it waits, nor exist where nothing has ever to be waited for: on the
host, copies are over when their calls return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ec_p2p.node.at_exit import close_at_exit
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
        self._call_off_exit: Callable[[], object] = lambda: None

    def wake(self) -> None:
        """There is something to wait for. Never waits; starts the thread if there is none yet."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="ec-p2p-settler", daemon=True)
            self._thread.start()
            self._call_off_exit = close_at_exit(self.close)
        self._awake.set()

    def close(self) -> None:
        """End the thread, without waiting for what it waits for. Idempotent. The caller holds none of its locks."""
        self._call_off_exit()
        self._closed = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

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
