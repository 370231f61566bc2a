"""ZMQ sockets with every option set before the first bind or connect.

Owns the options and the endpoint syntax. Must never bind or connect by itself, nor leave a default of ZMQ in place
that can block or grow without bound, or keep a fleet small.
"""

from __future__ import annotations

from typing import TypeAlias

import zmq

from ec_p2p.control.codec import MAX_FRAME
from ec_p2p.wire.dead_peers import end_dead_connections

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

_CONNECT_TIMEOUT_MS = 2_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000


def new_context() -> Context:
    """A context with as many sockets as libzmq can give, not the 1,023 that it gives unless told: several go to each
    peer, and the process' limit of descriptors is the one that shall count."""
    context: Context = zmq.Context()
    context.max_sockets = context.get(zmq.SOCKET_LIMIT)
    return context


def open_socket(
    context: Context,
    kind: int,
    endpoint: str,
    *,
    send_hwm: int = 1_000,
    receive_hwm: int = 1_000,
    linger_ms: int = 0,
    max_frame: int = MAX_FRAME,
) -> Socket:
    """A socket of `kind`, not yet bound or connected, that is meant for `endpoint`.

    A frame that comes in longer than `max_frame` ends its connection. A peer that does not answer is given up after
    two seconds and dialled again at least once a second. Nothing is queued for a peer that is not connected. A
    connection whose other end is gone, or does not read for so long, ends after five seconds.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.SNDHWM, send_hwm)
    socket.setsockopt(zmq.RCVHWM, receive_hwm)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    end_dead_connections(socket)
    return socket


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """('tcp://host', 'port') of a TCP endpoint. Raises ValueError for anything else."""
    host, colon, port = endpoint.rpartition(":")
    if (
        not host.startswith("tcp://")
        or len(host) == len("tcp://")
        or not colon
        or not (port.isdecimal() or port == "*")
    ):
        raise ValueError(f"endpoint {endpoint!r} cannot be used; accepted: text like 'tcp://host:14579'")
    return host, port


def bound_port(socket: Socket) -> int:
    """TCP port that a bound socket listens on."""
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def send_now(socket: Socket, *frames: bytes) -> bool:
    """Send without waiting. False: the peer is not connected, is gone, or its queue is full; nothing was sent."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def receive_now(socket: Socket) -> list[bytes] | None:
    """The next message's frames, or None when there is none yet."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
