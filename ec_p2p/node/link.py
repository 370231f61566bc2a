"""A client's attachment to a node: the handshake on the Unix socket, and the link that it results in.

Owns the sockets of one attachment and the descriptor that comes with the answer. Nothing here blocks, retries or
decides: see `client`.
"""

from __future__ import annotations

import array
import os
import socket

import zmq

from ec_p2p.control.codec import decode, encode
from ec_p2p.node.messages import Attach, Attached, AttachRefused


class Link:
    """One attachment: alive until the Unix socket closes."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sock: socket.socket, attached: Attached, now: float
    ) -> None:
        self.sock = sock
        self.attached = attached
        self.since = now
        self.dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.rcvhwm = self.dealer.sndhwm = 100_000
        self.dealer.setsockopt(zmq.IDENTITY, attached.token)
        self.dealer.connect(attached.endpoint)
        self.poller = zmq.Poller()
        self.poller.register(self.dealer, zmq.POLLIN)
        self.poller.register(sock, zmq.POLLIN)

    def alive(self) -> bool:
        try:
            return bool(self.sock.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self.dealer.close()
        self.sock.close()


def hail(address: str, hello: Attach) -> socket.socket:
    """A connected, non-blocking socket on which the hello has been sent. Raises OSError, at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        sock.connect(address)
        sock.send(encode(hello))
    except BaseException:
        sock.close()
        raise
    return sock


def hear_answer(sock: socket.socket) -> tuple[Attached, int] | None:
    """What the node answered, and the arena's descriptor, which is then the caller's; None while it has not.

    Raises OSError when it refused or is gone, BadFrame when the answer cannot be read.
    """
    try:
        frame, fds = _recv_with_fds(sock)
    except BlockingIOError:
        return None
    try:
        answer: Attached | AttachRefused = decode(frame, Attached | AttachRefused)
        if isinstance(answer, AttachRefused):
            raise OSError(f"refused: {answer.reason}")
        if len(fds) != 1:
            raise OSError("the node sent no arena")
        return answer, fds.pop()
    finally:
        for fd in fds:
            os.close(fd)


def _recv_with_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it, close-on-exec and now the caller's. Raises BlockingIOError."""
    frame, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            fds.extend(received)
    for fd in fds:
        os.set_inheritable(fd, False)
    return frame, fds
