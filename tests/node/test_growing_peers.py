"""How often a node asks a peer for its card while that one's arena grows. The sockets are real, the transport is
played; time stands still where a test does not say otherwise."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import zmq

from ec_p2p.control.messages import PROTOCOL_VERSION, Card, NodeInfo
from ec_p2p.node.peers import Peers, PeerState

from .conftest import until

SLAB = 1 << 20


class Grower:
    """A holder that counts how often it was asked, and a reader that knows it."""

    def __init__(self, stack):
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        self.transport = SimpleNamespace(kind="played", connect=lambda *_: None, forget=lambda *_: None)
        self.incarnation = os.urandom(16)
        self.slabs = 1
        self.asked = 0
        self.ready = 0
        self.on_ready = lambda peer: None
        unused = lambda *_: None  # noqa: E731
        where = (context, self.transport)
        here = ("127.0.0.1", 0)
        self.holder = Peers(*where, self.incarnation, *here, self.card, *(unused,) * 4)
        self.reader = Peers(*where, os.urandom(16), *here, self.card, self.heard, *(unused,) * 3)
        stack.callback(self.holder.close)
        stack.callback(self.reader.close)
        self.reader.up(NodeInfo(self.incarnation, "holder", f"tcp://127.0.0.1:{self.holder.port}"), 0.0)
        self.peer = self.reader.get(self.incarnation)
        self.hear_cards(1, now=0.0)

    def card(self):
        self.asked += 1
        return Card(PROTOCOL_VERSION, self.incarnation, "played", self.slabs, self.slabs * SLAB, b"")

    def heard(self, peer):
        self.ready += 1
        self.on_ready(peer)

    def hear_cards(self, cards, now):
        wanted = self.ready + cards

        def heard():
            self.reader.tick(now)
            for each in (self.holder, self.reader):
                for target in each.poll_targets():
                    each.on_ready(target)
            return self.ready >= wanted

        until(heard, "the holder's card")


@pytest.fixture
def grower():
    with ExitStack() as stack:
        yield Grower(stack)


def test_an_arena_that_grows_and_grows_is_asked_for_at_once(grower):
    for slabs in range(2, 6):
        grower.slabs = slabs
        grower.reader.ask(grower.peer, now=0.0)
        grower.hear_cards(1, now=0.0)
        assert (grower.peer.registered, grower.peer.state) == (slabs * SLAB, PeerState.READY)
    assert grower.asked == 5


def test_what_waits_for_a_slab_more_than_the_card_covers_is_not_kept_waiting(grower):
    """It turned up between the request and the card."""
    grower.slabs = 2

    def grow(peer):
        if grower.slabs == 2:
            grower.slabs = 3
            grower.reader.ask(peer, now=0.0)

    grower.on_ready = grow
    grower.reader.ask(grower.peer, now=0.0)
    grower.hear_cards(2, now=0.0)
    assert (grower.peer.registered, grower.peer.state) == (3 * SLAB, PeerState.READY)


def test_a_request_is_not_repeated_before_its_answer(grower):
    grower.slabs = 2
    for _ in range(3):
        grower.reader.ask(grower.peer, now=0.0)
    grower.hear_cards(1, now=0.0)
    assert grower.asked == 2


def test_a_peer_whose_cards_never_cover_what_it_advertises_is_asked_once_a_second(grower):
    grower.on_ready = lambda peer: grower.reader.ask(peer, now=grower.now)
    asked = grower.asked
    for grower.now in (1.0, 1.5, 2.0, 2.9, 3.0):
        grower.reader.ask(grower.peer, now=grower.now)
        if grower.now.is_integer():
            grower.hear_cards(1, now=grower.now)
    assert grower.asked == asked + 3
