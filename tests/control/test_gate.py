"""Who comes in at a server socket with keys, and what the gate leaves behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from ec_p2p.control.codec import MAX_FRAME
from ec_p2p.control.security import Gate, receive_with_key
from ec_p2p.control.sockets import Context, Socket, bound_port, open_socket
from ec_p2p.wire.curve import Security, key_of, key_text, new_pair, public_of, secure_client, secure_server
from ec_p2p.wire.dialling import Line
from tests.control.harness import await_closed, opened
from tests.control.keys import Pair, dial

SERVER, MEMBER, STRANGER = Pair(), Pair(), Pair()
REFUSED_FOR_MS = 500
"""How long a test waits for what must not come; where it would come, it comes within a few."""
PATIENCE_MS = 60_000


class Door:
    """A ROUTER with keys, and the gate before it."""

    def __init__(self) -> None:
        self.security = SERVER.security(MEMBER)
        self.context: Context = zmq.Context()
        self.gate = Gate(self.context, self.security)
        self.router = open_socket(self.context, zmq.ROUTER, "")
        secure_server(self.router, self.security)
        self.router.bind("tcp://127.0.0.1:*")
        self.endpoint = f"tcp://127.0.0.1:{bound_port(self.router)}"
        self._clients: list[Socket] = []

    def dial(self, security: Security | None, server_key: bytes = SERVER.public) -> Socket:
        self._clients.append(dial(self.context, zmq.DEALER, self.endpoint, security, server_key))
        return self._clients[-1]

    def hears(self, client: Socket, frame: bytes) -> tuple[list[bytes], bytes]:
        assert client.poll(PATIENCE_MS, zmq.POLLOUT), "not connected"
        client.send(frame)
        assert self.router.poll(PATIENCE_MS)
        received = receive_with_key(self.router)
        assert received is not None
        return received

    def close(self) -> None:
        self.gate.close()
        self.context.destroy(linger=0)  # with what a test that failed has left open

    def change_gate(self, security: Security) -> None:
        """ZMQ gives the endpoint of a closed socket back a little later."""
        self.gate.close()
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while True:
            try:
                self.gate = Gate(self.context, security)
                return
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def test_a_member_comes_in_and_is_known_by_its_key(door: Door) -> None:
    for pair in (SERVER, MEMBER):
        frames, key = door.hears(door.dial(pair.security()), b"hello")
        assert (frames[1:], key) == ([b"hello"], pair.public)


def test_the_longest_frame_fits_into_its_envelope(door: Door) -> None:
    frames, _ = door.hears(door.dial(MEMBER.security()), b"x" * MAX_FRAME)
    assert frames[1] == b"x" * MAX_FRAME


@pytest.mark.parametrize(
    ("security", "server_key"),
    [
        (None, b""),
        (STRANGER.security(), SERVER.public),
        (STRANGER.security(), STRANGER.public),
        (MEMBER.security(), STRANGER.public),
        # Who has read a member's public key somewhere has not got its secret.
        (Security(MEMBER.public, STRANGER.secret, frozenset(), SERVER.public), SERVER.public),
    ],
    ids=["no keys", "not allowed", "wrong keys", "wrong server", "stolen public key"],
)
def test_strangers_stay_outside(door: Door, security: Security | None, server_key: bytes) -> None:
    stranger = door.dial(security, server_key)
    assert not stranger.poll(REFUSED_FOR_MS, zmq.POLLOUT)
    assert not door.router.poll(0)
    door.hears(door.dial(MEMBER.security()), b"hello")


def test_a_refused_key_is_counted_and_named_once(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        door.dial(STRANGER.security())
    for _ in range(PATIENCE_MS // 10):
        if door.gate.refused >= 3:
            break
        door.router.poll(10)
    assert door.gate.refused >= 3
    assert [key_text(STRANGER.public) in record.getMessage() for record in caplog.records] == [True]


def test_who_is_allowed_later_comes_in_when_it_dials_anew(door: Door) -> None:
    """libzmq itself does not try again after a refusal."""
    client = open_socket(door.context, zmq.DEALER, door.endpoint)
    secure_client(client, STRANGER.security(), SERVER.public)
    line = Line(client, door.endpoint)
    assert not client.poll(REFUSED_FOR_MS, zmq.POLLOUT)
    door.change_gate(SERVER.security(STRANGER))
    assert not client.poll(REFUSED_FOR_MS, zmq.POLLOUT)
    for now in (0.0, 4.0, 5.5):
        line.look(now, up=False)
    door.hears(client, b"hello")
    client.close()


def test_without_a_gate_nobody_comes_in(door: Door) -> None:
    door.gate.close()
    assert not door.dial(MEMBER.security()).poll(REFUSED_FOR_MS, zmq.POLLOUT)


def test_a_context_has_one_gate(door: Door) -> None:
    with pytest.raises(zmq.ZMQError):
        Gate(door.context, SERVER.security())
    door.hears(door.dial(MEMBER.security()), b"hello")


def test_nothing_stays_of_a_gate() -> None:
    before = opened()
    for _ in range(5):
        door = Door()
        door.hears(door.dial(MEMBER.security()), b"hello")
        door.dial(STRANGER.security())
        door.close()
        door.gate.close()
    await_closed(before)


def test_keys_as_text() -> None:
    public, secret = new_pair()
    assert key_of(key_text(public)) == public
    assert public_of(secret) == public


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "\u00e9" * 40, "~" * 40, "#" * 40, " " * 40, "x" * 40 + "\n"])
def test_text_that_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="Z85") as caught:
        key_of(text)
    assert not text or text not in str(caught.value)


def test_a_secret_does_not_show() -> None:
    security = SERVER.security(MEMBER)
    for shown in (repr(security), str(security), f"{security}"):
        assert repr(SERVER.secret) not in shown
        assert repr(SERVER.public) in shown
