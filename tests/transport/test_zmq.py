"""What only ZMQ frames can do: arrive late, wrong, from somebody else, or not at all."""

from __future__ import annotations

import ctypes

import msgpack
import pytest
import zmq

from ec_p2p.transport.checks import pack_card
from ec_p2p.transport.interface import Span, State, TransportError
from ec_p2p.transport.zmq import ZmqTransport
from ec_p2p.transport.zmq_reading import CHUNK_BYTES, PROTOCOL_VERSION, WINDOW
from tests.transport.ends import ARENA, PATIENCE_S, SLAB, End, Holder, unique_name, until

NAME = "scripted"


class ScriptedHolder:
    """A ROUTER in the hands of the test."""

    def __init__(self, context):
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.card = pack_card("zmq", PROTOCOL_VERSION, NAME, f"tcp://127.0.0.1:{port}", ARENA)

    def request(self):
        assert self.router.poll(1000 * PATIENCE_S), "no request came"
        reader, request = self.router.recv_multipart()
        version, name, ticket, offset, nbytes = msgpack.unpackb(request)
        assert (version, name) == (PROTOCOL_VERSION, NAME)
        return reader, ticket, offset, nbytes

    def send(self, *frames):
        self.router.send_multipart(frames)


@pytest.fixture
def end():
    end = End("zmq", unique_name(), slabs=2)
    yield end
    end.close()


@pytest.fixture
def scripted(end):
    scripted = ScriptedHolder(end.context)
    end.transport.connect(NAME, scripted.card)
    yield scripted
    scripted.router.close()


@pytest.fixture
def holder():
    holder = Holder("zmq", slabs=2)
    yield holder
    holder.close()


def dial(end, holder):
    _, _, endpoint, _ = msgpack.unpackb(holder.card[16:])[1:]
    socket = end.context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    return socket


def test_a_reader_asks_for_no_more_than_its_window(end, scripted):
    reading = end.transport.read(NAME, [Span(0, 0, SLAB)])
    asked = [scripted.request() for _ in range(WINDOW)]
    reading.poll()
    assert not scripted.router.poll(100)
    assert [(offset, nbytes) for _, _, offset, nbytes in asked] == [
        (index * CHUNK_BYTES, CHUNK_BYTES) for index in range(WINDOW)
    ]
    reader, ticket, offset, nbytes = asked[3]
    scripted.send(reader, msgpack.packb([ticket]), b"3" * nbytes)
    until(lambda: end.memory[offset : offset + 1] == b"3" if reading.poll() is State.POSTED else None)
    assert scripted.request()[2] == WINDOW * CHUNK_BYTES
    assert not scripted.router.poll(100)


def test_released_readings_keep_their_place_in_the_window(end, scripted):
    for _ in range(3 * WINDOW):
        assert end.transport.read(NAME, [Span(0, 0, 64)]).release()
    assert [scripted.request()[3] for _ in range(WINDOW)] == [64] * WINDOW
    end.transport.progress()
    assert not scripted.router.poll(100)


@pytest.mark.parametrize("give_up", ["release", "forget"])
def test_late_bytes_are_not_written(end, scripted, give_up):
    end.memory[:64] = b"-" * 64
    reading = end.transport.read(NAME, [Span(0, 0, 64)])
    reader, ticket, _, _ = scripted.request()
    if give_up == "release":
        assert reading.release()
    else:
        end.transport.forget(NAME)
        end.transport.connect(NAME, scripted.card)
    scripted.send(reader, msgpack.packb([ticket]), b"x" * 64)

    second = end.transport.read(NAME, [Span(0, 64, 64)])
    reader, ticket, _, _ = scripted.request()
    scripted.send(reader, msgpack.packb([ticket]), b"y" * 64)
    assert end.wait(second) is State.DONE
    assert end.memory[:128] == b"-" * 64 + b"y" * 64
    assert reading.poll() is State.FAILED


@pytest.mark.parametrize("nbytes", [0, 63, 65])
def test_an_answer_of_another_size_fails_the_read(end, scripted, nbytes):
    end.memory[:65] = b"-" * 65
    reading = end.transport.read(NAME, [Span(0, 0, 64)])
    reader, ticket, _, _ = scripted.request()
    scripted.send(reader, msgpack.packb([ticket]), b"x" * nbytes)
    assert end.wait(reading) is State.FAILED
    assert f"{nbytes} bytes came for 64" in reading.error
    assert end.memory[:65] == b"-" * 65
    assert end.transport.bad_frames == 1


def test_a_refusal_fails_the_read(end, scripted):
    reading = end.transport.read(NAME, [Span(0, 0, SLAB)])
    reader, ticket, _, _ = scripted.request()
    scripted.send(reader, msgpack.packb([ticket, "not today"]))
    assert end.wait(reading) is State.FAILED
    assert "not today" in reading.error


JUNK = [
    [b""],
    [b"\xc1"],
    [b"junk", b"junk"],
    [b"", b"", b"", b""],
    [msgpack.packb(None)],
    [msgpack.packb({"a": 1})],
    [msgpack.packb(["1"]), b"x" * 64],
    [msgpack.packb([1, 2, 3]), b"x" * 64],
    [msgpack.packb([1]), b"x" * 64, b""],
    [msgpack.packb([1])],
    [msgpack.packb([1, "no"]), b"x" * 64],
    [b"\xdd\xff\xff\xff\xff"],
    [b"\x91" * 2000],
]


def test_junk_from_a_holder_is_counted_and_dropped(end, scripted):
    reading = end.transport.read(NAME, [Span(0, 0, 64)])
    reader, ticket, _, _ = scripted.request()
    for frames in JUNK:
        scripted.send(reader, *frames)
    scripted.send(reader, msgpack.packb([ticket + 1_000_000]), b"z" * 64)
    scripted.send(reader, msgpack.packb([ticket]), b"y" * 64)
    assert end.wait(reading) is State.DONE
    assert end.memory[:64] == b"y" * 64
    assert end.transport.bad_frames == len(JUNK)


def test_junk_from_a_reader_is_counted_and_dropped(end, holder):
    end.transport.connect(holder.name, holder.card)
    stranger = dial(end, holder)
    for frames in [*JUNK, [msgpack.packb([PROTOCOL_VERSION + 1, holder.name, 1, 0, 64])], [b"x"] * 1000]:
        stranger.send_multipart(frames)
    expected = len(JUNK) + 2
    until(lambda: holder.ask("bad_frames") == expected, f"{expected} bad frames")
    stranger.close()
    assert end.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


def test_a_frame_that_is_too_long_ends_that_connection_only(end, holder):
    end.transport.connect(holder.name, holder.card)
    stranger = dial(end, holder)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.send(bytes(1 << 20))
    assert monitor.poll(1000 * PATIENCE_S), "the holder took it"
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    assert end.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


@pytest.mark.parametrize(
    ("name", "offset", "nbytes", "said"),
    [
        ("another", 0, 64, "this is"),
        (None, ARENA - 63, 64, "not among"),
        (None, -1, 64, "not among"),
        (None, 0, 0, "not among"),
        (None, 0, -1, "not among"),
        (None, 0, CHUNK_BYTES + 1, "at once"),
        (None, 0, (1 << 64) - 1, "at once"),
    ],
)
def test_requests_that_make_no_sense_are_refused(end, holder, name, offset, nbytes, said):
    stranger = dial(end, holder)
    stranger.send(msgpack.packb([PROTOCOL_VERSION, name or holder.name, 7, offset, nbytes]))
    assert stranger.poll(1000 * PATIENCE_S)
    (answer,) = stranger.recv_multipart()
    ticket, reason = msgpack.unpackb(answer)
    assert ticket == 7
    assert said in reason
    stranger.close()


def test_a_stopped_holder_keeps_the_read_waiting(end, holder):
    end.transport.connect(holder.name, holder.card)
    assert end.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]
    holder.stop()
    end.memory[:64] = b"-" * 64
    abandoned = end.transport.read(holder.name, [Span(0, 0, 64)])
    waiting = end.transport.read(holder.name, [Span(0, 64, 64)])
    for _ in range(50):
        end.transport.progress()
        assert waiting.poll() is State.POSTED
    assert abandoned.release()
    holder.resume()
    assert end.wait(waiting) is State.DONE
    assert end.memory[:128] == b"-" * 64 + holder.bytes[:64]


def test_nobody_listens(end):
    listener = end.context.socket(zmq.ROUTER)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    listener.close(linger=0)
    end.transport.connect(NAME, pack_card("zmq", PROTOCOL_VERSION, NAME, f"tcp://127.0.0.1:{port}", 4096))
    reading = end.transport.read(NAME, [Span(0, 0, 64)])
    assert end.wait(reading) is State.FAILED
    with pytest.raises(TransportError, match="lost"):
        end.transport.read(NAME, [Span(0, 0, 64)])


def test_a_peer_that_moved_is_dialled_anew(end, scripted, holder):
    moved = pack_card("zmq", PROTOCOL_VERSION, holder.name, msgpack.unpackb(scripted.card[16:])[3], ARENA)
    end.transport.connect(holder.name, moved)
    doomed = end.transport.read(holder.name, [Span(0, 0, 64)])
    end.transport.connect(holder.name, holder.card)
    assert doomed.poll() is State.FAILED
    assert end.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


def test_sockets_come_and_go_with_peers(end, holder):
    before = end.transport.sockets()
    end.transport.connect(holder.name, holder.card)
    assert len(end.transport.sockets()) > len(before)
    end.transport.forget(holder.name)
    assert end.transport.sockets() == before
    end.transport.close()
    assert not end.transport.sockets()


@pytest.mark.parametrize("host", ["not a host", "192.0.2.1", ""])
def test_an_address_that_cannot_be_bound(host):
    context = zmq.Context()
    with pytest.raises(TransportError, match=f"cannot listen on '{host}'"):
        ZmqTransport("x", 4096, 4096, context=context, bind_host=host, advertise_host="127.0.0.1")
    context.term()


def test_ipv6():
    context = zmq.Context()
    memory = bytearray(4096)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        end = ZmqTransport("x", base, 4096, context=context, bind_host="::1", advertise_host="::1")
    except TransportError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert b"tcp://[::1]:" in end.card()
    end.close()
    context.term()
