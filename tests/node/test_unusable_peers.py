"""Nodes that a node can never read from: each is known as such, so that nobody waits for it. Sockets are real."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from ec_p2p.control.codec import decode, encode
from ec_p2p.control.directories import announce_to
from ec_p2p.control.messages import PROTOCOL_VERSION, Advert, Card, EntryState, NodeInfo, Refused, StageRequest, ToPeer
from ec_p2p.node.messages import Missing
from ec_p2p.node.peers import Peers, PeerState

from .conftest import until

NOWHERE = "tcp://no such host:1"


class Reader:
    """The peers of one node, whom it was told of, and the socket of a peer that answers what the test says."""

    def __init__(self, stack):
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        self.door = context.socket(zmq.ROUTER)
        port = self.door.bind_to_random_port("tcp://127.0.0.1")
        self.info = NodeInfo(os.urandom(16), "other", f"tcp://127.0.0.1:{port}")
        transport = SimpleNamespace(kind="played", connect=lambda *_: None, forget=lambda *_: None)
        self.told = []
        unused = (lambda *_: None,) * 3
        own = os.urandom(16)
        self.peers = Peers(context, transport, own, "127.0.0.1", 0, lambda: None, self.told.append, *unused)
        stack.callback(self.peers.close)

    @property
    def peer(self):
        return self.peers.get(self.info.incarnation)

    def asked(self, now):
        """Wait until the peer is asked, and return by whom."""

        def heard():
            self.peers.tick(now)
            return self.door.poll(0)

        until(heard, "a request")
        return self.door.recv_multipart()[0]

    def answered(self, route, message):
        before = len(self.told)
        self.door.send_multipart([route, encode(message)])

        def heard():
            for target in self.peers.poll_targets():
                self.peers.on_ready(target)
            return len(self.told) > before

        until(heard, "the answer")

    def card(self, transport="played"):
        return Card(PROTOCOL_VERSION, self.info.incarnation, transport, 1, 1 << 20, b"")


@pytest.fixture
def reader():
    with contextlib.ExitStack() as stack:
        yield Reader(stack)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"address": NOWHERE}, "which cannot be dialled: "), ({"key": b"k" * 32}, "is not connected to: it has keys")],
)
def test_a_node_that_cannot_be_connected_to_is_known_all_the_same(reader, caplog, changes, said):
    targets = reader.peers.poll_targets()
    odd = msgspec.structs.replace(reader.info, **changes)
    for now in (0.0, 1.0, 2.0):
        reader.peers.up(odd, now)
        reader.peers.tick(now)
    assert (reader.peer.state, reader.peers.names(), reader.peers.ready_count()) == (PeerState.UNUSABLE, ["other"], 0)
    assert reader.told == [reader.peer], "who waits for it learns that it is in vain"
    assert reader.peers.poll_targets() == targets
    [line] = warnings(caplog)
    assert said in line
    assert not reader.peers.stage(reader.peer, b"i" * 32)
    reader.peers.up(reader.info, 3.0)  # it is dialled as it says now
    reader.answered(reader.asked(3.0), reader.card())
    assert reader.peer.state is PeerState.READY
    reader.peers.up(odd, 4.0)
    assert reader.peer.state is PeerState.UNUSABLE
    reader.peers.down(reader.info.incarnation)
    assert (reader.peer, reader.peers.poll_targets()) == (None, targets)


def test_a_peer_that_refuses_is_asked_again_and_not_waited_for(reader, caplog):
    reader.peers.up(reader.info, 0.0)
    for now in (0.0, 2.0):
        reader.answered(reader.asked(now), Refused("another version"))
        assert reader.peer.state is PeerState.UNUSABLE
    assert warnings(caplog) == ["node other refused: another version"]
    route = reader.asked(4.0)
    assert reader.peer.state is PeerState.UNUSABLE
    reader.answered(route, reader.card())
    assert reader.peer.state is PeerState.READY


def test_a_peer_of_another_transport_is_asked_once(reader, caplog):
    reader.peers.up(reader.info, 0.0)
    reader.answered(reader.asked(0.0), reader.card("carrier pigeon"))
    assert (reader.peer.state, len(reader.told)) == (PeerState.UNUSABLE, 1)
    reader.peers.tick(1000.0)
    assert reader.peers.stage(reader.peer, b"i" * 32)
    until(lambda: reader.door.poll(0), "the next request")
    assert isinstance(decode(reader.door.recv_multipart()[1], ToPeer), StageRequest)
    assert warnings(caplog) == [
        "node other uses transport carrier pigeon, this node uses played: nothing can be read from it"
    ]


def test_what_only_such_a_node_holds_is_not_waited_for(zmq_fleet):
    """The address of the holder cannot be dialled."""
    [(node, client)] = zmq_fleet.connected("reader")
    identity, stop = os.urandom(32), threading.Event()
    context = zmq.Context()
    info = NodeInfo(os.urandom(16), "ghost", NOWHERE)
    ghost = announce_to(context, node.config.directories[0], info, heartbeat_s=0.2, timeout_s=20.0)
    ghost.store(Advert(identity, EntryState.RESIDENT, 128, 1, 64, "bfloat16", 1 << 20, 4096, 5))

    def announce():
        while not stop.is_set():
            ghost.tick(time.monotonic())
            ghost.sockets[0].poll(20)
            ghost.on_readable()

    thread = threading.Thread(target=announce)
    thread.start()
    try:
        until(lambda: client.inspect().peers == ["ghost"], "the node to hear of it")

        def failed():
            [answer] = client.want(identity)
            assert isinstance(answer, Missing)
            return answer.reason == "failed"

        until(failed, "the node to hear of its entry")
        fetches = {name for name in client.inspect().counters if name.startswith("fetches{")}
        assert fetches == {"fetches{outcome=unusable}"}
    finally:
        stop.set()
        thread.join()
        ghost.close()
        context.destroy(linger=0)
