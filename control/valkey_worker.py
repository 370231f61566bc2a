"""The thread that talks to a Valkey or Redis server, so that a node's loop need not wait for one.

Owns the thread and its one connection. The loop must never wait for the thread, but a bounded time in `close`; the
thread must never touch what the loop owns: what they have to say goes through `valkey_handover`.

    connect --works--> serve --Unreachable, Refuses--> wait, longer each time, and connect again
            --fails--------------------------------> wait, longer each time, and connect again
            --Moved--> connect to where the keys are said to be; after any other trouble, to the endpoint again

Before each of them the thread may be told to end.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections.abc import Callable

from ec_p2p.control.valkey_server import Connection, Moved, Refuses, Server, Unreachable

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.05
_RETRY_LAST_S = 1.0
_LONGEST_CALL_S = 2.0
_CLOSE_S = 1.0


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
