"""What one node says to one directory, without sockets."""

from __future__ import annotations

import logging

import pytest

from ec_p2p.control.announcing import Announcing, Standing
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Announce,
    FromDirectory,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    InstanceInfo,
    Refused,
    Welcome,
)
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


def test_a_hello_without_an_answer_is_said_again_after_a_heartbeat() -> None:
    announcing = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    announcing.store(advert(1))
    for now in (0.0, 1.0, 2.0):
        assert said(announcing, now) == [Hello(PROTOCOL_VERSION, node(1))]
        assert announcing.standing is Standing.GREETED
        assert said(announcing, now + 0.9) == []
    announcing.take(WELCOME, 2.9)
    assert said(announcing, 2.9) == [Announce(node(1).incarnation, 1, [advert(1)], [])]


def test_what_answers_to_the_time_before_the_last_hello_says_nothing(announcing: Announcing) -> None:
    announcing.take(HelloAgain(EPOCH), 0.5)
    assert said(announcing, 0.5) == [Hello(PROTOCOL_VERSION, node(1))]
    announcing.take(HelloAgain(EPOCH), 0.6)
    assert said(announcing, 0.6) == []
    announcing.take(WELCOME, 0.7)
    assert said(announcing, 0.7) == [Announce(node(1).incarnation, 1, [advert(1)], [])]


def test_of_an_entry_only_the_last_change_is_said(announcing: Announcing) -> None:
    announcing.store(advert(1, generation=2))
    announcing.store(advert(2))
    announcing.withdraw(advert(2).identity)
    announcing.withdraw(b"never held".ljust(32))
    announcing.store(advert(1, generation=3))
    assert announcing.pending == 2
    incarnation = node(1).incarnation
    assert said(announcing, 0.5) == [Announce(incarnation, 2, [advert(1, generation=3)], [advert(2).identity])]
    assert announcing.pending == 0


def test_one_that_always_has_something_to_say_still_asks_whether_it_is_heard(announcing: Announcing) -> None:
    for tenth in range(1, 100):
        now = tenth / 10
        announcing.store(advert(1, generation=tenth))
        for message in said(announcing, now):
            if isinstance(message, Heartbeat):
                announcing.take(WELCOME, now)
        assert announcing.connected(now)


def test_what_changes_until_the_welcome_is_said_after_it_as_it_is_then() -> None:
    announcing = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    engine = InstanceInfo("engine", "both", "ab")
    announcing.store(advert(1))
    announcing.store(advert(2))
    announcing.withdraw(advert(1).identity)
    announcing.describe([engine])
    assert announcing.pending == 1
    said(announcing, 0.0)
    announcing.take(WELCOME, 0.0)
    assert said(announcing, 0.0) == [Announce(node(1).incarnation, 1, [advert(2)], [], [engine])]


@pytest.mark.parametrize("answer", [Refused("no"), Welcome(PROTOCOL_VERSION + 1, EPOCH, 1)])
def test_one_that_is_refused_asks_again_after_a_while(
    announcing: Announcing, answer: FromDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for now in (10.0, 20.0, 30.0):
        announcing.take(answer, now)
        assert announcing.refused
        assert said(announcing, now + 9.9) == []
        assert said(announcing, now + 10.0) == [Hello(PROTOCOL_VERSION, node(1))]
    assert len(caplog.messages) == 1
    announcing.take(WELCOME, 40.0)
    assert announcing.refused == ""
    assert said(announcing, 40.0) == [Announce(node(1).incarnation, 1, [advert(1)], [])]


def test_a_goodbye_is_said_as_soon_as_there_was_a_hello() -> None:
    """The hello may have arrived, and its welcome be on its way."""
    announcing = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    said(announcing, 0.0)
    assert announcing.leave() == Goodbye(node(1).incarnation)


def test_a_goodbye_is_said_while_everything_is_being_said_again(announcing: Announcing) -> None:
    announcing.take(HelloAgain(EPOCH), 0.5)
    assert announcing.leave() == Goodbye(node(1).incarnation)


def test_after_the_goodbye_nothing_is_said(announcing: Announcing) -> None:
    assert announcing.leave() == Goodbye(node(1).incarnation)
    announcing.store(advert(2))
    for answer in (WELCOME, HelloAgain(EPOCH), Refused("no")):
        announcing.take(answer, 1.0)
    assert said(announcing, 100.0) == []
    assert announcing.next_event() == float("inf")
    assert not announcing.connected(1.0)
    assert announcing.leave() is None


def test_whoever_does_not_know_the_node_gets_no_goodbye() -> None:
    strange = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    assert strange.leave() is None
    refused = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    said(refused, 0.0)
    refused.take(Refused("no"), 0.1)
    assert refused.leave() is None


# -------------------------------------------------------- how far ahead


def read(seq: int) -> Welcome:
    return Welcome(PROTOCOL_VERSION, EPOCH, 1, seq)


def numbers(messages: list[Hello | Announce | Heartbeat]) -> list[int]:
    """Seqs, those of heartbeats negated."""
    return [message.seq if isinstance(message, Announce) else -message.seq for message in messages]  # type: ignore[union-attr]


@pytest.fixture
def talkative() -> Announcing:
    """With much to say to a directory that tells what it has read."""
    announcing = Announcing("directory", node(1), HEARTBEAT_S, TIMEOUT_S)
    for number in range(20 * 1024):
        announcing.store(advert(number))
    assert said(announcing, 0.0) == [Hello(PROTOCOL_VERSION, node(1))]
    announcing.take(read(0), 0.0)
    assert numbers(said(announcing, 0.0)) == [1, 2, 3, 4, -4, 5, 6, 7, 8, -8]
    return announcing


def test_no_more_is_on_its_way_than_a_directory_that_is_behind_can_keep(talkative: Announcing) -> None:
    for second in (1.0, 2.0, 3.0):
        assert numbers(said(talkative, second)) == [-8]
    talkative.take(read(4), 3.5)
    assert numbers(said(talkative, 3.5)) == [9, 10, 11, 12, -12]
    talkative.take(read(8), 3.5)
    talkative.take(read(8), 3.5)
    assert numbers(said(talkative, 3.5)) == [13, 14, 15, 16, -16]
    talkative.take(read(16), 3.6)
    assert numbers(said(talkative, 3.6)) == [17, 18, 19, 20]
    assert talkative.pending == 0


def test_a_welcome_that_is_lost_is_asked_for_again(talkative: Announcing) -> None:
    assert numbers(said(talkative, 1.0)) == [-8]
    talkative.take(read(8), 1.1)
    assert numbers(said(talkative, 1.1)) == [9, 10, 11, 12, -12, 13, 14, 15, 16, -16]


def test_what_answers_to_another_life_says_nothing(talkative: Announcing) -> None:
    talkative.take(HelloAgain(EPOCH), 0.5)
    assert said(talkative, 0.5) == [Hello(PROTOCOL_VERSION, node(1))]
    talkative.take(read(0), 0.6)
    said(talkative, 0.6)
    talkative.take(read(100), 0.7)
    assert said(talkative, 0.7) == []


def test_one_that_does_not_tell_is_told_everything_at_once(talkative: Announcing) -> None:
    talkative.take(WELCOME, 0.5)
    assert talkative.pending > 0
    said(talkative, 0.5)
    assert talkative.pending == 0
