"""What a client had said when its session ends: all of it counts, however it ends."""

from __future__ import annotations

import contextlib
import os
import select
import socket

import pytest

from ec_p2p.config import make_config
from ec_p2p.control.codec import encode
from ec_p2p.node.address import attach_address
from ec_p2p.node.link import hail, hear_answer
from ec_p2p.node.messages import CLIENT_PROTOCOL_VERSION, Attach, Attached, Sync
from ec_p2p.node.sessions import Sessions
from tests.transport.ends import start_process

from .conftest import until

MANY = 2000
"""Messages; a socket whose buffer is of the usual size takes some 500, which is more than one reading takes."""


class Listening:
    """Sessions without a node: what they hear, and of whose end."""

    def __init__(self):
        self.config = make_config({"node_name": f"sessions-{os.getpid()}"})
        self.heard = []
        self.gone = []
        self.arena_fd = os.memfd_create("arena")
        self.sessions = Sessions(
            self.config,
            lambda: Attached(CLIENT_PROTOCOL_VERSION, bytes(16), "n", 0, 0, 0, 0),
            lambda: self.arena_fd,
            lambda session, message: self.heard.append(message.token),
            self.gone.append,
            lambda where, error: pytest.fail(f"a bad frame from a {where}: {error}"),
        )

    def hear(self):
        for fd in select.select(self.sessions.poll_targets(), [], [], 0.01)[0]:
            self.sessions.on_ready(fd)

    def close(self):
        self.sessions.close()
        os.close(self.arena_fd)


@pytest.fixture
def listening():
    listening = Listening()
    yield listening
    listening.close()


def talkative(pipe, config):
    """Attach, and say as much as the socket takes. A child keeps the socket open for as long as the pipe is."""
    sock = hail(attach_address(config), Attach(CLIENT_PROTOCOL_VERSION, "tool", "test", -1))
    until(lambda: hear_answer(sock))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    said = 0
    with contextlib.suppress(BlockingIOError):
        while said < MANY:
            sock.send(encode(Sync(said)))
            said += 1
    if os.fork():
        pipe.send(said)
    with contextlib.suppress(EOFError):
        pipe.recv()


@pytest.mark.parametrize("end", ["its process ends", "its socket closes", "the node leaves"])
def test_all_that_has_arrived_counts(listening, end):
    process, pipe = start_process(talkative, listening.config)
    until(lambda: listening.hear() or len(listening.sessions))
    [session] = listening.sessions.all()
    said = pipe.recv()
    assert said > 256
    if end == "the node leaves":
        listening.sessions.dismiss()
    elif end == "its process ends":
        process.kill()
        until(lambda: select.select([session.pidfd], [], [], 0)[0])
        listening.sessions.on_ready(session.pidfd)
    pipe.close()
    process.wait()
    until(lambda: listening.gone or listening.sessions.on_ready(session.fd))
    assert listening.heard == list(range(said))
    assert listening.gone == [session]


def test_a_node_that_leaves_has_heard_all_before_it_ends_any_session(listening, monkeypatch):
    """A lease that ended with the first could make room for a window of the second, over what the first has leased."""
    socks = [
        hail(attach_address(listening.config), Attach(CLIENT_PROTOCOL_VERSION, "tool", f"t{i}", -1)) for i in (1, 2)
    ]
    until(lambda: listening.hear() or len(listening.sessions) == 2)
    for token, sock in enumerate(socks):
        sock.send(encode(Sync(token)))
    heard_at_ends = []
    monkeypatch.setattr(listening.sessions, "_on_closed", lambda session: heard_at_ends.append(sorted(listening.heard)))
    listening.sessions.dismiss()
    for sock in socks:
        sock.close()
    assert heard_at_ends == [[0, 1], [0, 1]]
