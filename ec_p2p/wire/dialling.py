"""Connections that client sockets make, and make anew where libzmq has given up.

libzmq dials again by itself after whatever happened to a connection, but for one thing: a handshake that it could not
follow, or was refused in. It then never tries again, although whatever answered there (a stranger's server, one with
other keys, one that did not know our key yet) may be the right one by now.
"""

from __future__ import annotations

from contextlib import suppress

import zmq

_PATIENCE_S = 5.0
"""Longer than one attempt to connect, its handshake and the pause before the next: none of them is to be cut short."""


class Line:
    """Connects `socket` to `endpoint`, and again whenever that was down for a while. Whoever uses the socket tells how
    it looks. One thread's. Raises zmq.ZMQError for an endpoint that cannot be dialled.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._down_since: float | None = None
        socket.connect(endpoint)

    def look(self, now: float, up: bool) -> None:
        """`up`: there is a connection, or the first one is being made. `now` is seconds of any steady clock."""
        if up:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        elif now - self._down_since > _PATIENCE_S:
            self._down_since = now
            self.redial()

    def redial(self) -> None:
        """Give the connection up, if there is one, with what waits to be sent by it; and dial."""
        with suppress(zmq.ZMQError):  # ENOENT: libzmq has given it up itself
            self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)
