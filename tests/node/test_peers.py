"""What a node says of the peers that it cannot get on with. The sockets are real, the transport is played."""

from __future__ import annotations

import itertools
import logging
import os
from contextlib import ExitStack

import pytest
import zmq

from ec_p2p.control.messages import PROTOCOL_VERSION, Card, NodeInfo
from ec_p2p.node.peers import Peers, PeerState
from ec_p2p.transport.interface import TransportError

from .conftest import until


class Transport:
    """Connects where it is told to."""

    kind = "played"

    def __init__(self):
        self.reachable = True
        self.tries = 0

    def connect(self, peer, card):
        self.tries += 1
        if not self.reachable:
            raise TransportError("nothing answers")

    def forget(self, peer):
        pass


@pytest.fixture
def two():
    """Peers of two nodes, what the directory says of the holder, and the reader's transport."""
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        transport = Transport()

        def peers(incarnation):
            card = Card(PROTOCOL_VERSION, incarnation, "played", 1, 1 << 20, b"")
            unused = (lambda *_: None,) * 4
            made = Peers(context, transport, incarnation, "127.0.0.1", 0, lambda: card, *unused)
            stack.callback(made.close)
            return made

        incarnation = os.urandom(16)
        holder = peers(incarnation)
        info = NodeInfo(incarnation, "holder", f"tcp://127.0.0.1:{holder.port}")
        yield holder, peers(os.urandom(16)), info, transport


def test_a_peer_that_cannot_be_connected_to_is_complained_of_once_each_time(two, caplog):
    holder, reader, info, transport = two
    seconds = itertools.count(step=2)

    def tried(times):
        """Time passes until so many more cards were looked at."""
        wanted = transport.tries + times

        def looked():
            reader.tick(float(next(seconds)))
            for each in (holder, reader):
                for target in each.poll_targets():
                    each.on_ready(target)
            return transport.tries >= wanted

        until(looked, "the holder's card")

    def complaints():
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    transport.reachable = False
    reader.up(info, float(next(seconds)))
    tried(3)
    assert reader.get(info.incarnation).state is PeerState.UNUSABLE
    assert complaints() == ["cannot connect to node holder: nothing answers"]
    transport.reachable = True
    tried(1)
    assert reader.get(info.incarnation).state is PeerState.READY
    transport.reachable = False
    reader.ask(reader.get(info.incarnation), float(next(seconds)))
    tried(3)
    assert reader.get(info.incarnation).state is PeerState.ASKING, "what could be read still can"
    assert len(complaints()) == 2


def test_peers_for_which_no_socket_is_left_are_dialled_once_there_is_one():
    with ExitStack() as stack:
        few, many = zmq.Context(), zmq.Context()
        few.max_sockets = 8
        for context in (few, many):
            stack.callback(context.destroy, linger=0)
        first_door, door = many.socket(zmq.ROUTER), many.socket(zmq.ROUTER)
        addresses = [f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in (first_door, door)]
        told = []
        unused = (lambda *_: None,) * 3
        reader = Peers(few, Transport(), os.urandom(16), "127.0.0.1", 0, lambda: None, told.append, *unused)
        stack.callback(reader.close)
        infos = [NodeInfo(os.urandom(16), f"node{n}", addresses[n >= 7]) for n in range(12)]
        for info in infos:
            reader.up(info, 0.0)
        peers = [reader.get(info.incarnation) for info in infos]
        assert [peer.state for peer in peers] == [PeerState.ASKING] * 7 + [PeerState.UNUSABLE] * 5
        assert told == peers[7:], "who waits for one of them learns that it is in vain"
        reader.tick(0.9)
        assert len(told) == 5, "it is not tried all the time"
        for info in infos[:7]:
            reader.down(info.incarnation)
        routes, seconds = set(), itertools.count(1)

        def asked():
            reader.tick(float(next(seconds)))
            while door.poll(0):
                routes.add(door.recv_multipart()[0])
            return len(routes) >= 5 and all(peer.socket for peer in peers[7:])

        until(asked, "requests by all that have a socket now")
        assert {peer.socket for peer in peers[7:]} <= set(reader.poll_targets())
