"""What a client is told, in how many datagrams, and what happens when it does not read."""

from __future__ import annotations

import logging
import socket

import pytest

from ec_p2p.node.link import Link
from ec_p2p.node.messages import Attached, Inspection, Missing, PeerCard, Synced
from ec_p2p.node.outbox import TOGETHER, UNSENT, Outbox


@pytest.fixture
def ends():
    """The node's outbox, and the client's link."""
    node, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with node, client:
        node.setblocking(False)
        client.setblocking(False)
        yield Outbox(node, "worker/1"), Link(client, Attached(1, bytes(16), "n", 0, 0, 0, 0), 0.0)


def test_nothing_is_said_before_the_flush(ends):
    outbox, link = ends
    outbox.add(Synced(1))
    assert outbox
    assert list(link.receive()) == []
    outbox.flush()
    assert not outbox
    assert list(link.receive()) == [Synced(1)]


def test_messages_of_one_turn_come_in_one_datagram_and_in_their_order(ends):
    outbox, link = ends
    said = [Missing(1, index, "no_source") for index in range(16)]
    for message in said:
        outbox.add(message)
    outbox.flush()
    assert list(link.receive()) == said
    assert list(link.receive()) == []


def test_many_messages_come_in_several_and_an_inspection_alone(ends):
    outbox, link = ends
    inspection = Inspection(7, {}, {}, {}, [])
    said = [*(Synced(index) for index in range(TOGETHER + 1)), inspection, Synced(1), Synced(2)]
    for message in said:
        outbox.add(message)
    outbox.flush()
    heard = []
    while datagram := link.receive():
        heard.append(list(datagram))
    assert list(map(len, heard)) == [TOGETHER, 1, 1, 2]
    assert [message for datagram in heard for message in datagram] == said


def test_a_client_that_does_not_read_loses_messages_beyond_a_bound_and_no_others(ends, caplog):
    outbox, link = ends
    said = 0
    with caplog.at_level(logging.WARNING):
        while not caplog.records:
            outbox.add(Synced(said))
            outbox.flush()
            said += 1
    assert "worker/1 does not read its messages" in caplog.text
    tokens = []
    while True:
        while datagram := link.receive():
            tokens += [message.token for message in datagram]
        if not outbox:
            break
        outbox.flush()
    assert tokens == list(range(said - 1))
    assert len(tokens) >= UNSENT


def test_a_client_that_is_gone_is_nothing_to_wait_for(ends):
    outbox, link = ends
    link.close()
    outbox.add(Synced(1))
    outbox.flush()
    assert not outbox


def long_inspection(names, counts):
    peers = [f"gpu-node-{number:05}.cluster.local" for number in range(names)]
    counters = {f"count_{number:032}": 1.0 for number in range(counts)}
    return Inspection(7, {"name": "n"}, counters, {"entries": 1.0}, peers)


@pytest.mark.parametrize(
    ("names", "counts", "left_out"),
    [(100_000, 10, "peers"), (100_000, 100_000, "peers, counters, gauges"), (0, 100_000, "counters, gauges")],
)
def test_an_inspection_that_is_too_long_says_what_it_leaves_out(ends, caplog, names, counts, left_out):
    outbox, link = ends
    for _ in range(2):
        outbox.add(long_inspection(names, counts))
        outbox.add(Synced(1))
        outbox.flush()
        [answer] = link.receive()
        assert answer.token == 7
        assert answer.node == {"name": "n", "left_out": left_out}
        assert answer.peers == []
        assert len(answer.counters) == (10 if left_out == "peers" else 0)
        assert list(link.receive()) == [Synced(1)]
    [complaint] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "Inspection of" in complaint.getMessage()
    assert "too long for one datagram to worker/1" in complaint.getMessage()


@pytest.mark.parametrize(
    ("buffer", "names"), [(64 << 10, 10_000), (4 << 20, 50_000)], ids=["socket takes less", "client takes less"]
)
def test_an_inspection_is_shortened_for_the_socket_and_for_the_client(ends, buffer, names):
    outbox, link = ends
    outbox._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    outbox.add(long_inspection(names, 10))
    outbox.flush()
    [answer] = link.receive()
    assert answer.node["left_out"] == "peers"


def test_what_is_too_long_and_cannot_be_shortened_is_lost_with_a_warning(ends, caplog):
    outbox, link = ends
    outbox.add(long_inspection(100_000, 10))
    outbox.flush()
    assert link.receive()
    outbox.add(PeerCard(bytes(16), bytes(8 << 20)))
    outbox.add(Synced(1))
    outbox.flush()
    assert not outbox
    assert list(link.receive()) == [Synced(1)]
    assert "PeerCard of" in caplog.text
