"""A client's attachment to a node: the handshake on the Unix socket, and the link that it results in.

Owns the socket of one attachment and the descriptor that comes with the answer. Nothing here blocks, retries or
decides: see `client`.
"""

from __future__ import annotations

import array
import errno
import math
import os
import select
import socket
from collections import deque
from collections.abc import Sequence

from ec_p2p.control.codec import decode, encode
from ec_p2p.node.messages import Attach, Attached, AttachRefused, FromNode, Several

_SEND_BUFFER = 1 << 20
MAX_FRAME = 1 << 20
"""Bytes of the longest message that a client takes."""
_MAX_UNSENT = 10_000
_FOR_NOW = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}


class Link:
    """One attachment: a Unix socket, one message a datagram. Alive until the node's end of it closes."""

    def __init__(self, sock: socket.socket, attached: Attached, now: float) -> None:
        self.sock = sock
        self.attached = attached
        self.since = now
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._unsent: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def alive(self) -> bool:
        """True as long as the node is there, or something that it said has not been read."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send(self, frame: bytes) -> bool:
        """False if the node is gone, or has not read for long. Never waits: what the socket has no room for goes with
        the next call, in order."""
        return self.flush() and len(self._unsent) < _MAX_UNSENT and self.send_in_any_case(frame)

    def send_in_any_case(self, frame: bytes) -> bool:
        """For what ends something: lost on a node that reads again some time, it would pin memory. There is never more
        of it than of what it ends."""
        self._unsent.append(frame)
        return self.flush()

    def flush(self) -> bool:
        """Send what was left over. False if the node is gone."""
        while self._unsent:
            try:
                self.sock.send(self._unsent[0])
            except OSError as error:
                return error.errno in _FOR_NOW
            self._unsent.popleft()
        return True

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to receive, or for `timeout_s`."""
        self._poll.poll(math.ceil(timeout_s * 1000))

    def receive(self) -> Sequence[FromNode]:
        """The next messages; none where there are none, or there will be none. Raises BadFrame for what is no
        message."""
        try:
            frame = self.sock.recv(MAX_FRAME)
        except OSError:
            return ()
        if not frame:
            return ()
        heard: FromNode | Several = decode(frame, FromNode | Several)
        return heard.messages if isinstance(heard, Several) else (heard,)

    def close(self) -> None:
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
