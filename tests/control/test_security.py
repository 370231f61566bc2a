"""A directory with keys: who reads it, who speaks to it, and for whom."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import zmq

from ec_p2p.control.codec import decode, encode
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Announce,
    FromDirectory,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    NodeInfo,
    Refused,
    SnapshotChunk,
    SnapshotRequest,
    Welcome,
)
from ec_p2p.control.security import Gate
from ec_p2p.control.sockets import Socket, bound_port, open_socket, split_endpoint
from ec_p2p.wire.curve import Security, secure_server
from tests.control.harness import PATIENCE_S, Loop, advert, node
from tests.control.keys import Pair, dial, say_while_open, strangers
from tests.field.junk import CURVE, NULL
from tests.node.conftest import free_ports

SERVER, ALICE, BOB, OTHER = Pair(), Pair(), Pair(), Pair()
OURS = SERVER.security(ALICE, BOB)
AS_ALICE, AS_BOB = ALICE.security(BOB, directory=SERVER), BOB.security(ALICE, directory=SERVER)
OPENING_MS = 300
"""How long what must not come is waited for; a member is served within a few."""

STRANGERS = strangers(SERVER, ALICE)


def info(number: int, pair: Pair, **fields: int) -> NodeInfo:
    plain = node(number, **fields)
    return NodeInfo(plain.incarnation, plain.name, plain.address, key=pair.public)


@pytest.fixture
def served(loop: Loop) -> Iterator[Directory]:
    """A directory with keys, and Alice's node; whatever the test does, both go on, and Bob finds out everything."""
    directory = loop.directory(security=OURS)
    announcer = loop.announcer(directory.endpoint, info(1, ALICE), security=AS_ALICE)
    announcer.store(advert(1))
    loop.until(lambda: directory.stats()["entries"] == 1)
    yield directory
    announcer.store(advert(2))
    replica = loop.replica(directory.endpoint, security=AS_BOB)
    loop.until(lambda: replica.fresh and len(replica) == 2)
    assert replica.nodes() == [info(1, ALICE)]


def pub_endpoint(directory: Directory) -> str:
    return f"{split_endpoint(directory.endpoint)[0]}:{directory.pub_port}"


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_hear_nothing_and_are_not_heard(loop: Loop, served: Directory, stranger: str) -> None:
    security, server_key = STRANGERS[stranger]
    before = served.stats()
    with (
        dial(loop.context, zmq.DEALER, served.endpoint, security, server_key, immediate=0) as dealer,
        dial(loop.context, zmq.SUB, pub_endpoint(served), security, server_key) as subscriber,
    ):
        messages = (
            SnapshotRequest(PROTOCOL_VERSION, 1),
            Hello(PROTOCOL_VERSION, node(7)),
            Announce(node(7).incarnation, 1, [advert(7)], []),
            Goodbye(node(1).incarnation),
        )
        say_while_open(dealer, map(encode, messages))
        watched = loop.announcer(served.endpoint, info(3, BOB), security=AS_BOB)
        watched.store(advert(3))
        loop.until(lambda: served.stats()["entries"] == 2)  # which is published
        deadline = time.monotonic() + OPENING_MS / 1000
        loop.until(lambda: time.monotonic() > deadline)
        assert not dealer.poll(0)
        assert not subscriber.poll(0)
    stats = served.stats()
    assert (stats["nodes"], stats["snapshots"], stats["bad_frames"]) == (2, before["snapshots"], before["bad_frames"])
    watched.goodbye()
    loop.until(lambda: served.stats()["nodes"] == 1)


def test_a_member_with_keys_is_not_heard_by_a_directory_without(loop: Loop) -> None:
    directory = loop.directory()
    secured = loop.announcer(directory.endpoint, info(1, ALICE), security=AS_ALICE)
    plain = loop.announcer(directory.endpoint, node(2))
    loop.until(lambda: plain.connected)
    assert (secured.connected, directory.stats()["nodes"]) == (False, 1)


class Speaker:
    """A member's DEALER in the hands of the test."""

    def __init__(self, loop: Loop, directory: Directory, security: Security) -> None:
        self.socket: Socket = dial(loop.context, zmq.DEALER, directory.endpoint, security)
        self._until = loop.until

    def say(self, message: object) -> FromDirectory:
        self.tell(message)
        return self.hear()

    def tell(self, message: object) -> None:
        assert self.socket.poll(PATIENCE_S * 1000, zmq.POLLOUT)
        self.socket.send(encode(message))  # type: ignore[arg-type]

    def hear(self) -> FromDirectory:
        self._until(lambda: self.socket.poll(0))
        answer: FromDirectory = decode(self.socket.recv(), FromDirectory)
        return answer


@pytest.fixture
def bob(loop: Loop, served: Directory) -> Iterator[Speaker]:
    speaker = Speaker(loop, served, AS_BOB)
    yield speaker
    speaker.socket.close()


@pytest.mark.parametrize(
    "claim",
    [
        info(1, ALICE),
        info(1, BOB),
        NodeInfo(node(1).incarnation, "elsewhere", "tcp://10.9.9.9:9", key=BOB.public),
        info(1, BOB, life=1),
        info(9, ALICE),
        node(9),
    ],
    ids=["her node", "her incarnation", "her incarnation elsewhere", "her place", "her key", "no key"],
)
def test_a_member_cannot_speak_for_another(served: Directory, bob: Speaker, claim: NodeInfo) -> None:
    answer = bob.say(Hello(PROTOCOL_VERSION, claim))
    assert isinstance(answer, Refused)
    assert "another key" in answer.reason
    for message in (
        Announce(node(1).incarnation, 2, [advert(66)], [advert(1).identity]),
        Heartbeat(claim.incarnation, 0),
    ):
        assert isinstance(bob.say(message), HelloAgain)
    bob.tell(Goodbye(node(1).incarnation))
    assert isinstance(bob.say(Hello(PROTOCOL_VERSION, info(8, BOB))), Welcome)
    bob.tell(Goodbye(info(8, BOB).incarnation))
    assert bob.say(Heartbeat(info(8, BOB).incarnation, 0)), "the goodbye before it has been heard"
    assert served.stats()["nodes"] == 1
    assert served.stats()["refused"] == 2


def test_who_has_lost_its_connection_may_still_say_goodbye(loop: Loop, served: Directory, bob: Speaker) -> None:
    assert isinstance(bob.say(Hello(PROTOCOL_VERSION, info(8, BOB))), Welcome)
    again = Speaker(loop, served, AS_BOB)
    again.tell(Goodbye(info(8, BOB).incarnation))
    loop.until(lambda: served.stats()["nodes"] == 1)
    again.socket.close()


def half_open(port: int, opening: bytes) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port))
    raw.sendall(opening)
    return raw


EPOCH = b"e" * 16
HELLO = b"\x04\xc8\x05HELLO\x01\0" + bytes(72) + b"k" * 32 + bytes(8) + b"b" * 80


def test_half_open_handshakes_by_the_hundred_hold_nobody_up(loop: Loop, served: Directory) -> None:
    """They are hung up on after two seconds; members come and go meanwhile."""
    ports = [int(split_endpoint(served.endpoint)[1]), served.pub_port]
    openings = [b"", CURVE[:10], CURVE[:32], CURVE, CURVE + HELLO[:100], CURVE + HELLO]
    with ExitStack() as strangers:
        connections = [
            strangers.enter_context(half_open(port, opening))
            for port in ports
            for opening in openings
            for _ in range(25)
        ]
        member = loop.announcer(served.endpoint, info(3, BOB), security=AS_BOB)
        member.store(advert(3))
        reader = loop.replica(served.endpoint, security=AS_BOB)
        loop.until(lambda: reader.lookup(advert(3).identity))
        loop.forget(reader)
        member.goodbye()
        loop.until(lambda: served.stats()["nodes"] == 1)

        def hung_up_on() -> bool:
            for raw in list(connections):
                raw.setblocking(False)
                with suppress(BlockingIOError):
                    try:
                        gone = not raw.recv(4096)
                    except ConnectionError:
                        gone = True
                    if gone:
                        connections.remove(raw)
            return not connections

        loop.until(hung_up_on)


@pytest.mark.parametrize("port", ["router", "pub"])
@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 2_000,
        CURVE + b"\xff" * 2_000,
        CURVE + b"\x04\x05\x04JUNK",
        CURVE + HELLO[:-1] + b"\0" + HELLO,
        CURVE + b"\x06" + (1 << 40).to_bytes(8, "big") + b"x" * 1_000,
        NULL + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB",
    ],
    ids=["http", "ones", "ones in curve", "junk command", "bad hello", "huge command", "null"],
)
def test_junk_instead_of_a_handshake_is_hung_up_on(loop: Loop, served: Directory, port: str, opening: bytes) -> None:
    number = int(split_endpoint(served.endpoint)[1]) if port == "router" else served.pub_port
    with half_open(number, opening) as raw:
        raw.settimeout(PATIENCE_S)
        with suppress(ConnectionError):
            while raw.recv(4096):
                pass


def nonsense_at(endpoint: str) -> Callable[[], None]:
    """A server that greets as one of ours does, and then makes no sense. Returns what ends it."""
    host, port = split_endpoint(endpoint)
    listener = socket.create_server((host.removeprefix("tcp://"), int(port)))
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            with suppress(OSError), listener.accept()[0] as raw:
                raw.sendall(CURVE + b"\xff" * 200)

    thread = threading.Thread(target=serve)
    thread.start()

    def close() -> None:
        stopping.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

    return close


@pytest.mark.parametrize("before", ["nonsense", "no keys", "other keys", "not allowed"])
def test_who_was_turned_away_comes_in_once_it_may(loop: Loop, before: str) -> None:
    """Without a restart, although libzmq does not dial again after some of these."""
    endpoint = f"tcp://127.0.0.1:{free_ports()}"
    if before == "nonsense":
        close = nonsense_at(endpoint)
    else:
        first = {"no keys": None, "other keys": OTHER.security(ALICE), "not allowed": SERVER.security()}[before]
        close = loop.directory(endpoint, security=first).close
    announcer = loop.announcer(endpoint, info(1, ALICE), security=AS_ALICE)
    announcer.store(advert(1))
    replica = loop.replica(endpoint, security=AS_ALICE)
    deadline = time.monotonic() + 1.0
    loop.until(lambda: time.monotonic() > deadline)
    assert not announcer.connected
    close()
    loop.directory(endpoint, security=OURS)
    loop.until(lambda: announcer.connected and replica.lookup(advert(1).identity))


def binds(socket: Socket, endpoint: str) -> bool:
    """Not at once, where a socket has just been closed: ZMQ does that later."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True


def test_a_subscription_is_made_anew_where_another_answered_at_its_port(loop: Loop) -> None:
    """The directory is heard at once; its second port has belonged to somebody else for a while."""
    with Gate(loop.context, OURS), ExitStack() as sockets:

        def server(kind: int, security: Security | None, port: int | str = "*") -> Socket:
            socket = sockets.enter_context(open_socket(loop.context, kind, ""))
            secure_server(socket, security)
            loop.until(lambda: binds(socket, f"tcp://127.0.0.1:{port}"))
            return socket

        router = server(zmq.ROUTER, OURS)
        other = server(zmq.XPUB, None)
        port = bound_port(other)
        replica = loop.replica(f"tcp://127.0.0.1:{bound_port(router)}", security=AS_ALICE)

        def answered() -> bool:
            while router.poll(0):
                route, frame = router.recv_multipart()
                token = decode(frame, SnapshotRequest).token
                for answer in (Welcome(PROTOCOL_VERSION, EPOCH, port), SnapshotChunk(token, 0, EPOCH, 0, True, [])):
                    router.send_multipart([route, encode(answer)])
            return replica.counters["silences"] > 0

        loop.until(answered)
        other.close()
        publisher = server(zmq.XPUB, OURS, port)
        loop.until(lambda: answered() and publisher.poll(0), "a subscription")
