"""What is ZMQ's own in directories, announcers and replicas: sockets, versions, the published stream."""

from __future__ import annotations

import errno
import logging
import time

import pytest
import zmq
from processes import free_port

from ec_p2p.control.codec import MAX_FRAME, decode, encode
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    FromDirectory,
    Hello,
    Refused,
    SnapshotRequest,
    ToDirectory,
    Welcome,
)
from ec_p2p.control.replica import Replica
from ec_p2p.control.sockets import open_socket
from ec_p2p.wire import dead_peers
from tests.control.harness import NEVER_S, PATIENCE_S, Loop, advert, node

ONE, TWO = advert(1).identity, advert(2).identity


def in_step(directory: Directory, replica: Replica) -> bool:
    """The replica stands where the directory stands."""
    return replica.position == (directory.epoch, directory.stats()["seq"]) and replica.fresh


def test_a_directory_that_comes_back_at_both_its_ports_is_told_again(loop: Loop) -> None:
    first = Directory(f"tcp://127.0.0.1:{free_port()}", heartbeat_s=0.1)
    first.start()
    announcers = [loop.announcer(first.endpoint, node(number)) for number in (1, 2)]
    replica = loop.replica(first.endpoint)
    for announcer in announcers:
        announcer.store(advert(1))
    loop.until(lambda: in_step(first, replica) and len(replica.lookup(ONE)) == 2)
    first.close()
    announcers[0].withdraw(ONE)
    announcers[1].store(advert(2))
    second = loop.directory(first.endpoint, pub_port=first.pub_port, heartbeat_s=0.1)

    def converged() -> bool:
        assert replica.lookup(ONE), "the other node holds it all the time"
        return replica.lookup(ONE) == [(node(2), advert(1))] and bool(replica.lookup(TWO))

    loop.until(converged)
    loop.until(lambda: in_step(second, replica))
    assert second.stats()["entries"] == len(replica) == 2


def test_a_lost_publication_is_noticed_and_mended(loop: Loop) -> None:
    directory = loop.directory(heartbeat_s=0.2)
    announcer = loop.announcer(directory.endpoint, node(1))
    replica = loop.replica(directory.endpoint)
    announcer.store(advert(1))
    loop.until(lambda: in_step(directory, replica) and replica.lookup(ONE))
    _, sub = replica.sockets
    sub.setsockopt(zmq.UNSUBSCRIBE, b"ec")
    loop.until(lambda: replica.counters["silences"], "unsubscribed")
    announcer.store(advert(2))
    announcer.withdraw(ONE)
    loop.until(lambda: directory.stats()["withdrawals"] == 1)
    sub.setsockopt(zmq.SUBSCRIBE, b"ec")
    loop.until(lambda: in_step(directory, replica) and replica.lookup(TWO))
    loop.until(lambda: not replica.lookup(ONE), "what was withdrawn meanwhile to go")


def test_what_a_directory_has_heard_when_it_ends_it_passes_on(loop: Loop) -> None:
    directory = Directory("tcp://127.0.0.1:0", node_timeout_s=NEVER_S)
    directory.start()
    announcer, replica = loop.announcer(directory.endpoint, node(1)), loop.replica(directory.endpoint)
    loop.until(lambda: in_step(directory, replica) and replica.nodes() == [node(1)])
    assert directory.knows(node(1).incarnation)
    announcer.goodbye()
    loop.until(lambda: not directory.knows(node(1).incarnation))
    directory.close()
    loop.until(lambda: not replica.nodes())


def test_changes_are_coalesced_while_the_directory_does_not_read(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who reads nothing for long is taken for gone, and dialled anew.
    monkeypatch.setattr(dead_peers, "_DEAD_AFTER_MS", 1000 * int(NEVER_S))
    router = open_socket(loop.context, zmq.ROUTER, "tcp://127.0.0.1:0", receive_hwm=1)
    with router:
        router.bind("tcp://127.0.0.1:*")
        calm = {"heartbeat_s": NEVER_S, "timeout_s": NEVER_S}
        announcer = loop.announcer(router.getsockopt_string(zmq.LAST_ENDPOINT), node(1), **calm)
        loop.until(lambda: router.poll(0))
        route, hello = router.recv_multipart()
        assert decode(hello, ToDirectory) == Hello(PROTOCOL_VERSION, node(1))
        router.send_multipart([route, encode(Welcome(PROTOCOL_VERSION, b"e" * 16, 1))])
        loop.until(lambda: announcer.connected)
        for round_ in range(5):
            for number in range(20_000):
                announcer.store(advert(number, generation=round_ + 1))
            loop.turn(0)
        assert 0 < announcer.pending <= 20_000
        held: dict[bytes, int] = {}
        seqs: list[int] = []

        def drain() -> bool:
            while router.poll(0):
                message = decode(router.recv_multipart()[1], ToDirectory)
                seqs.append(message.seq)
                held.update({entry.identity: entry.generation for entry in getattr(message, "adverts", [])})
            return not announcer.pending and len(held) == 20_000 and set(held.values()) == {5}

        loop.until(drain)
        announces = sorted(set(seqs))
        assert announces == list(range(announces[0], announces[-1] + 1))


def test_another_protocol_version_is_refused_and_nothing_else(loop: Loop) -> None:
    directory = loop.directory()
    with open_socket(loop.context, zmq.DEALER, directory.endpoint) as stranger:
        stranger.connect(directory.endpoint)
        for message in (Hello(PROTOCOL_VERSION + 1, node(1)), SnapshotRequest(PROTOCOL_VERSION + 1, 7)):
            assert stranger.poll(PATIENCE_S * 1000, zmq.POLLOUT)
            stranger.send(encode(message))
            assert stranger.poll(PATIENCE_S * 1000)
            answer = decode(stranger.recv(), FromDirectory)
            assert isinstance(answer, Refused)
            assert f"{PROTOCOL_VERSION + 1} is not spoken" in answer.reason
    assert (directory.stats()["refused"], directory.stats()["nodes"]) == (2, 0)


@pytest.mark.parametrize("answer", [Refused("go away"), Welcome(PROTOCOL_VERSION + 1, b"e" * 16, 1)])
def test_those_who_are_refused_say_so_once_and_stay_calm(
    loop: Loop, answer: Refused | Welcome, caplog: pytest.LogCaptureFixture
) -> None:
    with open_socket(loop.context, zmq.ROUTER, "tcp://127.0.0.1:0") as router:
        router.bind("tcp://127.0.0.1:*")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        announcer = loop.announcer(endpoint, node(1), heartbeat_s=NEVER_S)
        loop.replica(endpoint)
        asked = 0

        def refuse() -> bool:
            nonlocal asked
            while router.poll(0):
                route, _ = router.recv_multipart()
                router.send_multipart([route, encode(answer)])
                asked += 1
            return "refuses this replica" in caplog.text and bool(announcer.refused)

        with caplog.at_level(logging.ERROR):
            loop.until(refuse)
            before, calm_until = asked, time.monotonic() + 0.5
            loop.until(lambda: (refuse(), time.monotonic() > calm_until)[1])
        assert before >= 2
        assert asked <= before + 1, "what the replica had asked again before it was refused"
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
        assert not announcer.connected


def test_the_first_that_can_bind_is_the_directory(loop: Loop) -> None:
    directory = loop.directory()
    with pytest.raises(zmq.ZMQError) as caught:
        Directory(directory.endpoint)
    assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(zmq.ZMQError) as caught:
        Directory("tcp://127.0.0.1:0", pub_port=directory.pub_port)
    assert caught.value.errno == errno.EADDRINUSE
    for bad in ("127.0.0.1:5", "ipc:///tmp/x", "tcp://:5", "tcp://host", "tcp://host:http"):
        with pytest.raises(ValueError, match="accepted"):
            Directory(bad)


def test_no_socket_can_wait_or_grow_without_bound(loop: Loop) -> None:
    replica = loop.replica("tcp://127.0.0.1:9")
    announcer = loop.announcer("tcp://127.0.0.1:9", node(1))
    for opened in (*replica.sockets, announcer.socket):
        assert 0 < opened.getsockopt(zmq.CONNECT_TIMEOUT) <= 2_000
        assert 0 < opened.getsockopt(zmq.RECONNECT_IVL_MAX) <= 1_000
        assert 0 <= opened.getsockopt(zmq.LINGER) <= 500
        assert 0 < opened.getsockopt(zmq.SNDHWM) <= 1_000
        assert 0 < opened.getsockopt(zmq.RCVHWM) <= 1_000
        assert opened.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME
        assert opened.getsockopt(zmq.TCP_KEEPALIVE) == 1
