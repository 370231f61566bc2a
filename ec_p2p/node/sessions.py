"""Clients of a node: attaching, knowing that they live, talking to them.

Owns the attached Unix sockets, on which everything travels, one message a datagram. It must never know what a message
means: `clients` does. A session ends when its socket closes, which the kernel does for every kind of death, when its
process has ended, or with the node; in each case after all that had arrived by then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from ec_p2p.config import Config
from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.node.listening import Listening
from ec_p2p.node.messages import CLIENT_PROTOCOL_VERSION, Attach, Attached, AttachRefused, FromNode, ToNode
from ec_p2p.node.outbox import Outbox

logger = logging.getLogger(__name__)

KINDS = ("scheduler", "worker", "lander", "tool")
_MAX_FRAME = 1 << 16
"""A client's messages are short; one that is cut off here is not read as another."""
_SEND_BUFFER = 1 << 20
_MAX_SESSIONS = 4096
_HELLO_TIMEOUT_S = 5.0
_SO_PEERGROUPS = 59
"""Linux's number, which the socket module does not name."""
_PEERGROUPS_BYTES = 1024
"""The most that Python's getsockopt takes."""


class Session:
    """One attached client. `windows` maps window ids to whatever the service keeps for them."""

    __slots__ = ("attach", "fd", "outbox", "pid", "pidfd", "sid", "sock", "windows")

    def __init__(self, sid: int, sock: socket.socket, attach: Attach) -> None:
        self.sid = sid
        self.sock = sock
        self.fd = sock.fileno()
        self.pid = _pid(sock)
        self.pidfd = _pidfd(self.pid)
        """Readable once the process has ended: a child that it forked may keep its socket open. -1: not to be had."""
        self.attach = attach
        self.windows: dict[int, Any] = {}
        self.outbox = Outbox(sock, f"{attach.kind}/{sid}")


class Sessions:
    """All clients of one node. Driven by the node's loop: `poll_targets` say what to watch, `on_ready` what became
    readable.

    `on_message(session, message)` and `on_closed(session)` are called from `on_ready` and from `dismiss`.
    The constructor raises AlreadyRunning when the name is taken; `on_ready` raises OSError when nobody can be let in,
    since no descriptor is left: who wants in stays in line.
    """

    def __init__(
        self,
        config: Config,
        describe: Callable[[], Attached],
        arena_fd: Callable[[], int],
        on_message: Callable[[Session, ToNode], None],
        on_closed: Callable[[Session], None],
        on_bad_frame: Callable[[str, BadFrame], None],
    ) -> None:
        self._describe = describe
        self._arena_fd = arena_fd
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_bad_frame = on_bad_frame
        self._ids = itertools.count(1)
        self._by_fd: dict[int, Session] = {}
        self._by_pidfd: dict[int, Session] = {}
        self._to_flush: dict[int, Session] = {}
        self._newcomers: dict[int, tuple[socket.socket, float]] = {}
        self._listening = Listening(config)
        self._listener = self._listening.socket
        self._group = self._listening.group

    def __len__(self) -> int:
        return len(self._by_fd)

    def all(self) -> list[Session]:
        return list(self._by_fd.values())

    def workers_of(self, instance: str) -> int:
        return sum(s.attach.kind == "worker" and s.attach.instance == instance for s in self._by_fd.values())

    @property
    def landers(self) -> int:
        # A copy: the thread that serves /metrics asks too.
        return sum(s.attach.kind == "lander" for s in list(self._by_fd.values()))

    def landers_of(self, instance: str) -> dict[int, Session]:
        """By rank, each in the process of the worker of that rank, if there is one: what lands elsewhere, this worker
        cannot load. None where workers of several processes have the rank, as when an instance starts again beside
        what is left of it: whose scheduler asks is not known. Of several in one process the newest."""
        landers: dict[int, Session] = {}
        processes: dict[int, set[int]] = {}
        ours = [session for session in self._by_fd.values() if session.attach.instance == instance]
        for session in ours:
            if session.attach.kind == "worker":
                processes.setdefault(session.attach.rank, set()).add(session.pid)
        for session in ours:
            rank = session.attach.rank
            if session.attach.kind == "lander" and processes.get(rank, {session.pid}) == {session.pid}:
                landers[rank] = session
        return landers

    def schedulers_of(self, instance: str) -> list[Session]:
        return [s for s in self._by_fd.values() if s.attach.kind == "scheduler" and s.attach.instance == instance]

    def poll_targets(self) -> list[Any]:
        return [self._listener.fileno(), *self._by_fd, *self._by_pidfd, *self._newcomers]

    def on_ready(self, target: Any) -> bool:
        """Handle a readable target. True if the set of targets changed."""
        if target == self._listener.fileno():
            return self._accept()
        if target in self._newcomers:
            self._admit(self._newcomers.pop(target)[0])
            return True
        if target in self._by_pidfd:
            self._end(self._by_pidfd[target])
            return True
        if target in self._by_fd:
            session = self._by_fd[target]
            if not self._receive(session):
                self._end(session)
                return True
        return False

    def tick(self, now: float) -> None:
        """Let go of connections that never said hello; try again what a socket had no room for."""
        for session in self._by_fd.values():
            session.outbox.flush()
        for fd, (sock, until) in list(self._newcomers.items()):
            if now >= until:
                del self._newcomers[fd]
                sock.close()

    def send(self, session: Session, message: FromNode) -> None:
        """It leaves with the next `flush`. Never waits. A client that does not read for long loses messages, and a line
        in the log says so."""
        session.outbox.add(message)
        self._to_flush[session.sid] = session

    def flush(self, now: float) -> None:
        """Say what this turn has brought, to each client in one go."""
        while self._to_flush:
            self._to_flush.popitem()[1].outbox.flush()

    def dismiss(self) -> None:
        """End every session, so that no client waits for this node any more. Its name stays taken: whoever connects is
        not answered, and not told that there is no node."""
        # All of them, before the first lease ends: what is promised outlives this node, and no window may cover it.
        for session in self.all():
            self._hear_out(session)
        for session in self.all():
            self._end(session)
        for sock, _ in self._newcomers.values():
            sock.close()
        self._newcomers.clear()

    def close(self) -> None:
        """`dismiss`, and give up the name."""
        self.dismiss()
        self._listening.close()

    # -------------------------------------------------------- inside

    def _receive(self, session: Session) -> bool:
        """Take in what a client has said. False once it is gone."""
        # Bounded, so that one talkative client cannot keep the loop from transfers and peers.
        for _ in range(256):
            try:
                frame = session.sock.recv(_MAX_FRAME)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # it left with messages unread; what it had sent can still be read
            except OSError:
                return False
            if not frame:
                return False
            try:
                message: ToNode = decode(frame, ToNode)
            except BadFrame as error:
                self._on_bad_frame("client", error)
                continue
            self._on_message(session, message)
        return True

    def _accept(self) -> bool:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return False
        sock.setblocking(False)
        if len(self._by_fd) + len(self._newcomers) >= _MAX_SESSIONS or not self._trusted(sock):
            sock.close()
            return False
        self._newcomers[sock.fileno()] = (sock, time.monotonic() + _HELLO_TIMEOUT_S)
        return True

    def _trusted(self, sock: socket.socket) -> bool:
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in (os.getuid(), 0) or (self._group is not None and self._group in (gid, *_groups(sock))):
            return True
        logger.warning("refused process %d of user %d: not this node's user nor in node_group", pid, uid)
        return False

    def _admit(self, sock: socket.socket) -> None:
        try:
            frame = sock.recv(65536)
            if not frame:
                sock.close()  # somebody only looked whether a node listens
                return
            attach: Attach = decode(frame, Attach)
        except OSError:
            sock.close()
            return
        except BadFrame as error:
            self._on_bad_frame("attach", error)
            sock.close()
            return
        refusal = None
        if attach.version != CLIENT_PROTOCOL_VERSION:
            refusal = f"client speaks version {attach.version}, this node speaks {CLIENT_PROTOCOL_VERSION}"
        elif attach.kind not in KINDS:
            refusal = f"kind={attach.kind!r}; accepted: {', '.join(KINDS)}"
        try:
            if refusal is not None:
                sock.send(encode(AttachRefused(refusal)))
                sock.close()
                return
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            socket.send_fds(sock, [encode(self._describe())], [self._arena_fd()])
        except OSError as error:
            logger.warning("a client went away while attaching: %s", error)
            sock.close()
            return
        session = Session(next(self._ids), sock, attach)
        self._by_fd[session.fd] = session
        if session.pidfd >= 0:
            self._by_pidfd[session.pidfd] = session
        logger.info("attached: %s %s rank %d", attach.kind, attach.instance, attach.rank)

    def _hear_out(self, session: Session) -> None:
        """Take in all that has arrived: commits are complete entries. That is what the socket holds, and no more, since
        a child of a dead client could go on for ever."""
        with contextlib.suppress(OSError):  # the other end is closed already
            session.sock.shutdown(socket.SHUT_RD)
        while self._receive(session):
            pass

    def _end(self, session: Session) -> None:
        if session.fd not in self._by_fd:
            return
        self._hear_out(session)
        del self._by_fd[session.fd]
        self._to_flush.pop(session.sid, None)
        session.outbox.flush()
        session.sock.close()
        if session.pidfd >= 0:
            del self._by_pidfd[session.pidfd]
            os.close(session.pidfd)
        logger.info("gone: %s %s rank %d", session.attach.kind, session.attach.instance, session.attach.rank)
        self._on_closed(session)


def _pid(sock: socket.socket) -> int:
    """Of the process that connected; 0 where it has none in this process namespace."""
    (pid,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4))
    return int(pid)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1  # in a process namespace that is not visible from here, or gone: then the socket says so


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the process at the other end."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PEERGROUPS_BYTES)
    except OSError:
        return ()  # more than fit; the primary group still counts
    return struct.unpack(f"{len(raw) // 4}I", raw)
