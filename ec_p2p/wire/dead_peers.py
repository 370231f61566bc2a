"""How a ZMQ socket gets rid of a connection whose other end is gone.

The kernel does it. ZMQ's own heartbeats (ZMQ_HEARTBEAT_IVL) must never be turned on: libzmq (4.3.5) aborts the process
when one is due on a connection that broke while its queue was full, and any peer can bring that about.
"""

from __future__ import annotations

import zmq

_IDLE_S = 2
_BETWEEN_S = 1
_PROBES = 3
_DEAD_AFTER_MS = 5_000


def end_dead_connections(socket: zmq.Socket[bytes]) -> None:
    """Before bind or connect. A connection ends when for five seconds nothing has come back from the other end: no
    answer to what was sent, or to the kernel's probes, and no room for more."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _BETWEEN_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, _DEAD_AFTER_MS)
