"""CURVE: the keys of a process, and how they get onto its ZMQ sockets.

Owns which key stands on which side of a connection, and how a key is written down. Must never show a secret: not in a
log, an error, or a repr.

Whoever binds is the server: it proves to have the key that the client expects of it. The client proves to have its own,
and the gate (`control.security`) says whether that one may come in. Without a gate nobody does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from ec_p2p.wire.notation import KEY

KEY_BYTES = 32
_DOMAIN = b"ec-p2p"
_ENVELOPE = 512
"""Bytes that encryption adds to a frame, or that a frame of a handshake has, at most. Both count against MAXMSGSIZE."""


@dataclass(frozen=True, slots=True)
class Security:
    """The keys of one process, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)
    allow: frozenset[bytes]
    """Public keys of those who may connect to this process, and to whose nodes it connects. Its own is one of them."""
    directory: bytes
    """Public key of the directories."""


def new_pair() -> tuple[bytes, bytes]:
    """(public, secret) of a new key pair."""
    public, secret = zmq.curve_keypair()
    return key_of(public.decode()), key_of(secret.decode())


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret one."""
    return key_of(zmq.curve_public(z85.encode(secret)).decode())


def key_text(key: bytes) -> str:
    """A key as people and files have it."""
    return z85.encode(key).decode()


def key_of(text: str) -> bytes:
    """The key that `text` stands for. Raises ValueError, which does not quote it, if that is none."""
    if not KEY.fullmatch(text):
        raise ValueError(f"not the {len(z85.encode(bytes(KEY_BYTES)))} characters of a key in Z85")
    try:
        return z85.decode(text.encode())
    except struct.error:  # five characters may stand for more than four bytes hold
        raise ValueError("not a key in Z85") from None


def why_not(security: Security | None, key: bytes) -> str:
    """Why a process with these keys does not connect to one with that public key; empty if it does."""
    if security is None:
        return "it has keys, and this node has none: set `security`" if key else ""
    if not key:
        return "it has no keys, and this node has"
    return "" if key in security.allow else f"its key {key_text(key)!r} is not in `allow`"


def secure_server(socket: zmq.Socket[bytes], security: Security | None) -> None:
    """Let only members connect to what this socket is going to bind to; without keys everybody. Before any bind."""
    # With a domain libzmq refuses ZMTP before 3.0, which has no handshake that could fail: a request of HTTP passes for
    # it, and libzmq would keep some of those connections for ever.
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    if security is None:
        return
    _present(socket, security)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    # Enforced: where nobody answers for the domain (no gate yet, or it has ended), nobody comes in.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], security: Security | None, server_key: bytes) -> None:
    """Talk only to a server that has `server_key`. Nothing without keys. Before any connect."""
    if security is None:
        return
    _present(socket, security)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)


def _present(socket: zmq.Socket[bytes], security: Security) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, security.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret)
    longest = socket.getsockopt(zmq.MAXMSGSIZE)
    if isinstance(longest, int) and longest >= 0:
        socket.setsockopt(zmq.MAXMSGSIZE, longest + _ENVELOPE)
