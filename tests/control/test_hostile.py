"""Whatever is sent to a port, by whom and in whatever order: counted, dropped, and the next good frame works."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from ec_p2p.control.codec import MAX_FRAME, decode, encode
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Announce,
    Events,
    Goodbye,
    Heartbeat,
    Hello,
    NodeUp,
    SnapshotChunk,
    SnapshotNode,
    SnapshotRequest,
    Welcome,
)
from ec_p2p.control.sockets import Context, Socket, open_socket, send_now, split_endpoint
from tests.control.harness import PATIENCE_S, Loop, advert, node

ONE = advert(1).identity
GOOD = encode(Announce(node(1).incarnation, 1, [advert(1)], []))
JUNK = [
    b"",
    b"\xc1",
    b"hello",
    b"{}",
    b"\x91" * 10_000,
    GOOD[:-1],
    GOOD + b"\0",
    GOOD.replace(b"announce", b"announcE"),
    encode(Events(b"e" * 16, [])),
    encode(SnapshotRequest(PROTOCOL_VERSION, 1))[:-1],
    b"\0" * MAX_FRAME,
    random.Random(7).randbytes(500),
]


def dealer(context: Context, directory: Directory) -> Socket:
    stranger = open_socket(context, zmq.DEALER, directory.endpoint, linger_ms=2_000)
    stranger.connect(directory.endpoint)
    assert stranger.poll(PATIENCE_S * 1000, zmq.POLLOUT)
    return stranger


@pytest.fixture
def served(loop: Loop) -> Iterator[Directory]:
    """A directory that must, whatever the test does to it, still take an announcement and pass it on at the end."""
    directory = loop.directory()
    replica = loop.replica(directory.endpoint)
    loop.until(lambda: replica.fresh)
    yield directory
    announcer = loop.announcer(directory.endpoint, node(200))
    announcer.store(advert(200))
    loop.until(lambda: replica.lookup(advert(200).identity) and replica.fresh)
    newcomer = loop.replica(directory.endpoint)
    loop.until(lambda: newcomer.lookup(advert(200).identity))


def test_junk_frames_are_counted(loop: Loop, served: Directory) -> None:
    with dealer(loop.context, served) as stranger:
        for frame in JUNK:
            stranger.send(frame)
        stranger.send_multipart([GOOD, GOOD])
        loop.until(lambda: served.stats()["bad_frames"] == len(JUNK) + 1)
        assert served.stats()["nodes"] == 0


def subscriber(directory: Directory) -> socket.socket:
    """A connection that has said it is a subscriber, as ZMTP 3.0 has it: ZMQ's own would crash itself."""
    host, _ = split_endpoint(directory.endpoint)
    raw = socket.create_connection((host.removeprefix("tcp://"), directory.pub_port))
    raw.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"NULL".ljust(52, b"\0"))
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return raw


def test_junk_to_the_publisher_is_ignored_or_hung_up_on(loop: Loop, served: Directory) -> None:
    with subscriber(served) as raw, suppress(ConnectionError):
        for frame in JUNK:
            for payload in (b"\0" + frame, b"\1" + frame, frame):
                if len(payload) < 256:
                    raw.sendall(b"\0" + bytes([len(payload)]) + payload)
        raw.sendall(b"\0\x01\x01")
        raw.settimeout(PATIENCE_S)
        heard = b""
        while b"events" not in heard:
            more = raw.recv(4096)
            if not more:
                break
            heard += more


def test_a_subscription_as_long_as_a_stack_is_deep_ends_its_connection_only(loop: Loop, served: Directory) -> None:
    with subscriber(served) as raw:
        raw.sendall(b"\2" + struct.pack(">Q", 1_000_001))
        raw.settimeout(PATIENCE_S)
        with suppress(ConnectionError):
            raw.sendall(b"\1" * 1_000_001)
            while raw.recv(4096):
                pass


@pytest.mark.parametrize("port", ["router", "pub"])
@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0") + b"\xff" * 50,
        b"",
    ],
)
def test_peers_that_do_not_speak_zmtp_are_ignored(loop: Loop, served: Directory, port: str, opening: bytes) -> None:
    host, router_port = split_endpoint(served.endpoint)
    target = int(router_port) if port == "router" else served.pub_port
    with socket.create_connection((host.removeprefix("tcp://"), target)) as raw:
        raw.sendall(opening)
        raw.settimeout(0.2)
        with suppress(OSError):  # It may have hung up already, or say nothing.
            raw.recv(64)
            raw.sendall(b"\xff" * 1_000)


def test_an_oversized_frame_ends_its_connection_only(loop: Loop, served: Directory) -> None:
    hello = encode(Hello(PROTOCOL_VERSION, node(1)))

    def greeted() -> bool:
        """What follows at once is lost with the connection; ZMQ dials again by itself."""
        send_now(stranger, hello)
        return served.stats()["nodes"] == 1

    with dealer(loop.context, served) as stranger:
        stranger.send(b"x" * (MAX_FRAME + 1))
        loop.until(greeted)
        stranger.send(encode(Goodbye(node(1).incarnation)))
        loop.until(lambda: served.stats()["nodes"] == 0)
    assert served.stats()["bad_frames"] == 0


def test_messages_in_the_wrong_order_change_nothing(loop: Loop, served: Directory) -> None:
    announce = [encode(Announce(node(1).incarnation, seq, [advert(seq)], [])) for seq in range(5)]
    with dealer(loop.context, served) as stranger:
        for frame in (announce[1], encode(Heartbeat(node(1).incarnation, 3)), encode(Goodbye(node(1).incarnation))):
            stranger.send(frame)
        hello = encode(Hello(PROTOCOL_VERSION, node(1)))
        for frame in (hello, announce[0], announce[1], announce[1], announce[3], announce[2], announce[2]):
            stranger.send(frame)
        loop.until(lambda: served.stats()["adverts"] == 2)
        assert (served.stats()["nodes"], served.stats()["entries"]) == (1, 2)
        with dealer(loop.context, served) as other:
            other.send(announce[3])
            assert other.poll(PATIENCE_S * 1000), "told to say hello"
        stranger.send(encode(Goodbye(node(1).incarnation)))
        loop.until(lambda: served.stats()["nodes"] == 0)


def test_snapshot_requests_by_those_who_never_read_hold_nobody_up(loop: Loop, served: Directory) -> None:
    with dealer(loop.context, served) as holder:
        holder.send(encode(Hello(PROTOCOL_VERSION, node(3))))
        for seq in range(1, 11):
            batch = [advert(1000 * seq + number) for number in range(1000)]
            holder.send(encode(Announce(node(3).incarnation, seq, batch, [])))
        loop.until(lambda: served.stats()["entries"] == 10_000)
        greedy = [dealer(loop.context, served) for _ in range(8)]
        for token in range(50):
            for stranger in greedy:
                stranger.send(encode(SnapshotRequest(PROTOCOL_VERSION, token)))
        patient = loop.replica(served.endpoint)
        loop.until(lambda: len(patient) == 10_000 and patient.fresh)
        for stranger in greedy:
            stranger.close(linger=0)
        holder.send(encode(Goodbye(node(3).incarnation)))


class Impostor:
    """Speaks a directory's sockets, and says what the test wants."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.router = open_socket(loop.context, zmq.ROUTER, "tcp://127.0.0.1:0")
        self.router.bind("tcp://127.0.0.1:*")
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.pub = open_socket(loop.context, zmq.XPUB, self.endpoint)
        self.pub.bind("tcp://127.0.0.1:*")
        self.pub_port = int(self.pub.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def welcome(self) -> bytes:
        return encode(Welcome(PROTOCOL_VERSION, b"e" * 16, self.pub_port))

    def next_request(self) -> tuple[bytes, bytes]:
        self.loop.until(lambda: self.router.poll(0))
        route, frame = self.router.recv_multipart()
        return route, frame

    def close(self) -> None:
        self.router.close()
        self.pub.close()


@pytest.fixture
def impostor(loop: Loop) -> Iterator[Impostor]:
    impostor = Impostor(loop)
    yield impostor
    impostor.close()


def test_a_replica_survives_whatever_a_directory_sends(loop: Loop, impostor: Impostor) -> None:
    replica = loop.replica(impostor.endpoint, node_timeout_s=3600.0)
    route, _ = impostor.next_request()
    for frame in JUNK:
        impostor.router.send_multipart([route, frame])
    impostor.router.send_multipart([route, GOOD, GOOD])
    impostor.router.send_multipart([route, impostor.welcome()])
    loop.until(lambda: replica.counters["bad_frames"] == len(JUNK) + 1)
    loop.until(lambda: impostor.pub.poll(0), "subscribed")
    events = encode(Events(b"e" * 16, [NodeUp(node(1))]))
    for frames in ([b"ec"], [b"ec", b"\1", events], [b"ec", bytes(8), b"junk"], [b"ecx", bytes(8), events]):
        impostor.pub.send_multipart(frames)
    loop.until(lambda: replica.counters["bad_frames"] == len(JUNK) + 5)

    def answered() -> bool:
        while impostor.router.poll(0):
            route, frame = impostor.router.recv_multipart()
            token = decode(frame, SnapshotRequest).token
            chunk = SnapshotChunk(token, 0, b"e" * 16, 0, True, [SnapshotNode(node(1), [advert(1)])])
            impostor.router.send_multipart([route, encode(chunk)])
        return bool(replica.lookup(ONE))

    loop.until(answered)


def test_an_announcer_survives_whatever_a_directory_sends(loop: Loop, impostor: Impostor) -> None:
    announcer = loop.announcer(impostor.endpoint, node(1))
    announcer.store(advert(1))
    route, _ = impostor.next_request()
    for frame in JUNK:
        impostor.router.send_multipart([route, frame])
    impostor.router.send_multipart([route, GOOD, GOOD])
    loop.until(lambda: announcer.counters["bad_frames"] == len(JUNK) + 1)
    assert not announcer.connected
    impostor.router.send_multipart([route, impostor.welcome()])
    loop.until(lambda: announcer.connected and not announcer.pending)
