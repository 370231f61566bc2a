"""What one node says to one directory, without sockets."""

from __future__ import annotations

import logging

import pytest

from ec_p2p.control.announcing import Announcing
from ec_p2p.control.messages import PROTOCOL_VERSION, Announce, Heartbeat, Hello, HelloAgain, Welcome
from tests.control.harness import advert, node

HEARTBEAT_S, TIMEOUT_S = 1.0, 4.0
EPOCH = b"e" * 16
WELCOME = Welcome(PROTOCOL_VERSION, EPOCH, 1)


def said(announcing: Announcing, now: float) -> list[Hello | Announce | Heartbeat]:
    """Everything that is to be said now, as taken by a socket that never blocks."""
    messages = []
    announcing.tick(now)
    while (message := announcing.next_message(now)) is not None:
        announcing.sent(message, now)
        messages.append(message)
    return messages


@pytest.fixture
def announcing() -> Announcing:
    """Welcomed at time 0, with one entry."""
    announcing = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    announcing.store(advert(1))
    assert said(announcing, 0.0) == [Hello(PROTOCOL_VERSION, node(1))]
    announcing.take(WELCOME, 0.0)
    assert said(announcing, 0.0) == [Announce(node(1).incarnation, 1, [advert(1)], [])]
    return announcing


def test_a_silent_directory_is_not_told_everything_again(
    announcing: Announcing, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for second in range(1, 21):
            assert said(announcing, float(second)) == [Heartbeat(node(1).incarnation, 1)]
            assert announcing.connected(second) == (second <= TIMEOUT_S)
    assert caplog.messages == ["directory directory is silent"]
    announcing.store(advert(2))
    assert said(announcing, 20.0) == [Announce(node(1).incarnation, 2, [advert(2)], [])]
    announcing.take(WELCOME, 20.5)
    assert announcing.connected(20.5)
    assert said(announcing, 20.5) == []


@pytest.mark.parametrize("answer", [HelloAgain(EPOCH), Welcome(PROTOCOL_VERSION, b"f" * 16, 1)])
def test_one_that_has_forgotten_meanwhile_is(announcing: Announcing, answer: HelloAgain | Welcome) -> None:
    assert said(announcing, 10.0) == [Heartbeat(node(1).incarnation, 1)]
    announcing.take(answer, 10.5)
    assert said(announcing, 10.5) == [Hello(PROTOCOL_VERSION, node(1))]
    announcing.take(Welcome(PROTOCOL_VERSION, b"f" * 16, 1), 10.5)
    assert said(announcing, 10.5) == [Announce(node(1).incarnation, 1, [advert(1)], [])]
