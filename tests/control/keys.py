"""Key pairs for tests, and sockets of members and strangers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import zmq

from ec_p2p.control.sockets import Context, Socket, open_socket
from ec_p2p.wire.curve import Security, key_text, new_pair, secure_client


class Pair:
    """A key pair, and the `Security` of whoever has it."""

    def __init__(self) -> None:
        self.public, self.secret = new_pair()

    def security(self, *others: Pair, directory: Pair | None = None) -> Security:
        """Allows itself and `others`; takes the directories' key for its own unless told."""
        allow = frozenset(pair.public for pair in (self, *others))
        return Security(self.public, self.secret, allow, (directory or self).public)

    def settings(self, *others: Pair, directory: Pair | None = None) -> dict[str, object]:
        """The same as an operator writes it."""
        return {
            "public": key_text(self.public),
            "secret": key_text(self.secret),
            "allow": [key_text(pair.public) for pair in others],
            "directory": key_text((directory or self).public),
        }

    def file(self, path: Path, *others: Pair, directory: Pair | None = None) -> str:
        """A key file with that."""
        path.touch(0o600)
        path.write_text(json.dumps(self.settings(*others, directory=directory)))
        return str(path)


Stranger: TypeAlias = "tuple[Security | None, bytes]"
"""Keys of somebody who must not come in, and the key that is expected of the server."""


def strangers(server: Pair, member: Pair) -> dict[str, Stranger]:
    """All kinds of those who know, of a server and a member of its fleet, no more than public keys."""
    own = Pair()
    return {
        "no keys": (None, b""),
        "keys of its own": (own.security(), own.public),
        "the server's public key": (own.security(), server.public),
        # libzmq itself does not ask for the secret that belongs to the public key it is given.
        "a member's public key": (Security(member.public, own.secret, frozenset(), b""), server.public),
    }


def dial(
    context: Context,
    kind: int,
    endpoint: str,
    security: Security | None,
    server_key: bytes = b"",
    *,
    immediate: int = 1,
) -> Socket:
    """A client's socket, connecting. Not `immediate`: it takes messages that go once there is a connection."""
    socket = open_socket(context, kind, endpoint)
    socket.setsockopt(zmq.IMMEDIATE, immediate)
    if security:
        secure_client(socket, security, server_key or security.directory)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket


def say_while_open(stranger: Socket, frames: Iterable[bytes]) -> None:
    """Sends what a socket still takes: libzmq ends its pipe the moment that the handshake is refused, at any time."""
    with contextlib.suppress(zmq.Again):
        for frame in frames:
            stranger.send(frame, zmq.NOBLOCK)
