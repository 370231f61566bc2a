"""Key pairs for tests, and sockets of members and strangers."""

from __future__ import annotations

import zmq

from ec_p2p.control.sockets import Context, Socket, open_socket
from ec_p2p.curve import Security, new_pair, secure_client


class Pair:
    """A key pair, and the `Security` of whoever has it."""

    def __init__(self) -> None:
        self.public, self.secret = new_pair()

    def security(self, *others: Pair, directory: Pair | None = None) -> Security:
        """Allows itself and `others`; takes the directories' key for its own unless told."""
        allow = frozenset(pair.public for pair in (self, *others))
        return Security(self.public, self.secret, allow, (directory or self).public)


def dial(context: Context, kind: int, endpoint: str, security: Security | None, server_key: bytes = b"") -> Socket:
    """A client's socket, connecting."""
    socket = open_socket(context, kind, endpoint)
    if security:
        secure_client(socket, security, server_key or security.directory)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket
