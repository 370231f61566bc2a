"""When a directory publishes what, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from ec_p2p.control.codec import decode
from ec_p2p.control.messages import TOPIC, Changed, Events, NodeDown
from ec_p2p.control.publications import Publications
from ec_p2p.control.sockets import Socket, open_socket
from tests.control.harness import PATIENCE_S, Loop, advert

EPOCH = b"e" * 16
GONE = [NodeDown(bytes([number]) * 16) for number in range(4)]


@pytest.fixture
def xpub(loop: Loop) -> Iterator[Socket]:
    with open_socket(loop.context, zmq.XPUB, "tcp://127.0.0.1:0") as socket:
        socket.bind("tcp://127.0.0.1:*")
        yield socket


@pytest.fixture
def publications(xpub: Socket) -> Publications:
    return Publications(xpub, EPOCH, heartbeat_s=1000.0)


@contextmanager
def subscriber(loop: Loop, xpub: Socket, topic: bytes = TOPIC) -> Iterator[Socket]:
    """One whose subscription has arrived, but was not read yet."""
    with open_socket(loop.context, zmq.SUB, "tcp://127.0.0.1:0") as socket:
        socket.subscribe(topic)
        socket.connect(xpub.getsockopt_string(zmq.LAST_ENDPOINT))
        # It is sent when the socket is used after the connection was made.
        loop.until(lambda: socket.poll(0) or xpub.poll(0))
        yield socket


def heard(socket: Socket) -> tuple[int, list[object]]:
    """The next message's number and events."""
    assert socket.poll(PATIENCE_S * 1000)
    topic, number, payload = socket.recv_multipart()
    message = decode(payload, Events)
    assert (topic, message.epoch) == (TOPIC, EPOCH)
    return int.from_bytes(number, "big"), message.events


def test_subscribers_are_counted_as_they_come_and_go(loop: Loop, xpub: Socket, publications: Publications) -> None:
    def counted(*used: Socket) -> int:
        for socket in used:
            socket.poll(0)
        publications.hear()
        return publications.subscribers

    with subscriber(loop, xpub) as one, subscriber(loop, xpub, topic=b"other") as other:
        with subscriber(loop, xpub) as second:
            loop.until(lambda: counted(one, other, second) == 2)
        loop.until(lambda: counted(one, other) == 1)
    loop.until(lambda: counted() == 0)


def test_a_new_subscriber_hears_the_number_at_once(loop: Loop, xpub: Socket, publications: Publications) -> None:
    publications.add(GONE[:1])
    publications.tick(0.0, at_once=False)
    publications.tick(1.0, at_once=False)
    with subscriber(loop, xpub) as late:
        publications.hear()
        assert publications.next_event() <= 1.0
        publications.tick(1.0, at_once=False)
        assert heard(late) == (1, [])


def test_what_follows_soon_is_gathered(loop: Loop, xpub: Socket, publications: Publications) -> None:
    with subscriber(loop, xpub) as one:
        publications.hear()
        publications.subscribers = 1000
        publications.tick(0.0, at_once=False)
        assert heard(one) == (0, [])
        publications.add(GONE[:1])
        publications.tick(10.0, at_once=False)
        assert heard(one) == (1, GONE[:1])
        publications.add(GONE[1:2])
        publications.tick(10.001, at_once=False)
        publications.add(GONE[2:3])
        publications.tick(10.002, at_once=False)
        assert 10.01 < publications.next_event() < 10.03, "a moment for a thousand of them"
        publications.tick(publications.next_event(), at_once=False)
        assert heard(one) == (2, GONE[1:3])
        publications.add(GONE[3:])
        publications.tick(10.03, at_once=True)
        assert heard(one) == (3, GONE[3:]), "a snapshot is about to be cut"
        many = [Changed(b"i" * 16, [advert(number) for number in range(2000)], [])]
        publications.add(many)
        publications.tick(10.03, at_once=False)
        assert heard(one) == (4, many), "enough to be a message"


def test_with_few_subscribers_there_is_no_waiting(loop: Loop, xpub: Socket, publications: Publications) -> None:
    publications.subscribers = 2
    for turn in range(1, 4):
        publications.add(GONE[:1])
        publications.tick(turn * 0.0001, at_once=False)
        assert publications.seq == turn
