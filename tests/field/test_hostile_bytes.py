"""Every decoder, fed with bytes from anywhere: it accepts them or raises its one error, in bounded memory.

Messages are made from their structs, so that one that is added later is fed to its decoder, too.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack
import pytest
import yaml
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from ec_p2p.config import KINDS, ConfigError, check_value, make_config, read_value
from ec_p2p.config_sources import load_ec_engine_config
from ec_p2p.control.codec import BadFrame, decode
from ec_p2p.control.messages import Advert, Event, Events, FromDirectory, FromPeer, NodeInfo, ToDirectory, ToPeer
from ec_p2p.engine.filed import Damaged, Filed, pack_header, unpack_header
from ec_p2p.engine.generation import RECORD_BYTES, Record, pack, unpack
from ec_p2p.keys import new_key_file, security_of
from ec_p2p.node.messages import Attach, Attached, AttachRefused, FromNode, ToNode
from ec_p2p.transport import nixl
from ec_p2p.transport import zmq as zmq_frames
from ec_p2p.transport.checks import unpack_card
from ec_p2p.transport.interface import Span, State, TransportError
from ec_p2p.transport.zmq_reading import Peer, ZmqReading, cut

unhurried = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
patient = settings(unhurried, max_examples=500)

IDENTITY = b"k" * 32
FIXED_BYTES, BYTES_EACH = 256 << 10, 40
"""Memory that a decoder may take: so much, and so much for each byte that it is given."""


# ------------------------------------------------------------ a message of every kind


def sample(type_: inspect.Type) -> Any:
    """A value of this type, as plain data: the shortest, and of a list or a map one element."""
    match type_:
        case inspect.IntType(ge=least):
            return least or 0
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case inspect.StrType(min_length=least):
            return "x" * (least or 1)
        case inspect.BytesType(min_length=least):
            return b"x" * (least or 1)
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [sample(item)]
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(key): sample(value)}
        case inspect.Metadata(type=inner):
            return sample(inner)
        case inspect.UnionType(types=types):
            return sample(next(one for one in types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType(tag=tag, fields=fields):
            values = (1 if field.name == "version" else sample(field.type) for field in fields)
            return [*([tag] if tag else []), *values]
    raise AssertionError(f"no sample of {type_}")


def frames_of(union: Any) -> list[bytes]:
    """A frame of every member of a union."""
    known = inspect.type_info(union)
    members = known.types if isinstance(known, inspect.UnionType) else (known,)
    return [msgpack.packb(sample(member)) for member in members]


class Decoder(NamedTuple):
    valid: list[bytes]
    """What it accepts: the material to mutate."""
    feed: Callable[[bytes], object]
    refuses: type[Exception] | None
    """The one error that it may raise; None: it raises nothing."""


UNIONS = {
    "to a directory": ToDirectory,
    "from a directory": FromDirectory,
    "published": Events,
    "event": Event,
    "to a peer": ToPeer,
    "from a peer": FromPeer,
    "to a node": ToNode,
    "from a node": FromNode,
    "attach": Attach,
    "answer to attach": Attached | AttachRefused,
    "node": NodeInfo,
    "adverts": list[Advert],
}
FRAMES = {
    name: Decoder(frames_of(union), lambda frame, union=union: decode(frame, union), BadFrame)
    for name, union in UNIONS.items()
}


# ------------------------------------------------------------ what peers, disks and operators give


def card_of(body: bytes) -> bytes:
    """Whoever makes a bad card knows how to make its digest, too."""
    return blake2b(body, digest_size=16).digest() + body


CARDS = {
    "NIXL card": (nixl._parse, msgpack.packb(["nixl", 1, "peer", 4096, [1 << 20, 2 << 20], 8192, b"metadata" * 8])),
    "ZMQ card": (zmq_frames._parse, msgpack.packb(["zmq", 1, "peer", "tcp://127.0.0.1:9", 1 << 20, b"k" * 32])),
}
HEADER = pack_header(Filed(IDENTITY, 16 * 128 * 2, 16, 128, "bfloat16"), "0" * 32)
DECODERS = {
    **FRAMES,
    **{
        name: Decoder([body], lambda data, parse=parse: parse("peer", card_of(data)), TransportError)
        for name, (parse, body) in CARDS.items()
    },
    "card with any digest": Decoder(
        [card_of(CARDS["NIXL card"][1])],
        lambda data: unpack_card(data, "nixl", 1, "peer"),
        TransportError,
    ),
    "request for bytes": Decoder(
        [msgpack.packb([1, "holder", 7, 4096, 64])], lambda data: zmq_frames._request(zmq.Frame(data)), None
    ),
    "header of a file": Decoder([HEADER], lambda data: unpack_header(data, IDENTITY, 4096 + 4096), Damaged),
    "record": Decoder(
        [pack(Record(3, IDENTITY, 4096, 16, 128, "bfloat16"))],
        lambda data: unpack(data[:RECORD_BYTES].ljust(RECORD_BYTES, b"x")),
        None,
    ),
}


# ------------------------------------------------------------ what is done to it


@st.composite
def mutated(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """One of these, with bytes set, put in, taken out and said twice."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        piece = data[start : start + draw(st.integers(0, 40))]
        match draw(st.sampled_from(["set", "insert", "remove", "repeat", "end"])):
            case "set":
                data[start : start + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                data[start:start] = draw(st.binary(max_size=9))
            case "remove":
                del data[start : start + len(piece)]
            case "repeat":
                data[start:start] = piece * draw(st.integers(1, 200))
            case "end":
                del data[start:]
    return bytes(data)


def error_of(feed: Callable[[], object]) -> Exception | None:
    try:
        feed()
    except Exception as error:
        return error
    return None


def accepts_or_refuses(decoder: Decoder, data: bytes) -> None:
    tracemalloc.start()
    try:
        error = error_of(lambda: decoder.feed(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A subclass would be another error: which one comes must not be for the sender to choose.
    assert error is None or type(error) is decoder.refuses, f"{error!r} over {data!r}"
    assert len(str(error)) < 1_000, "an error must not be as long as what it is about"
    assert peak < FIXED_BYTES + BYTES_EACH * len(data), f"{peak} bytes over {len(data)}"


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_what_is_valid_is_accepted(decoder: Decoder) -> None:
    """Else the mutations would start from nowhere."""
    for data in decoder.valid:
        assert decoder.feed(data) is not None


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_bytes_from_anywhere_are_refused_by_the_one_error(decoder: Decoder) -> None:
    @unhurried
    @given(data=st.binary(max_size=300) | mutated(decoder.valid))
    def check(data: bytes) -> None:
        accepts_or_refuses(decoder, data)

    check()


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 200_000,
        b"\x81\xa1a" * 70_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff" * 9,
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x94" + b"\xdc\xff\xff" * 60_000,
        b"\x98" + msgpack.packb("x" * 200_000) * 3,
        b"[" * 200_000,
        b"{" * 4_096,
    ],
    ids=["arrays", "maps", "long array", "long map", "long text", "long bytes", "wide", "texts", "brackets", "braces"],
)
def test_depth_and_lengths_that_are_only_said_cost_nothing(decoder: Decoder, data: bytes) -> None:
    accepts_or_refuses(decoder, data)


@pytest.mark.parametrize("decoder", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("tail", [b"\x91" * 50_000 + b"\xc0", b"\x81\xa1a" * 50_000 + b"\xc0", b"\xdd\xff\xff\xff\xff"])
def test_what_stands_where_a_later_version_has_more_fields_costs_nothing(decoder: Decoder, tail: bytes) -> None:
    for frame in decoder.valid:
        accepts_or_refuses(decoder, bytes([frame[0] + 1]) + frame[1:] + tail)


# ------------------------------------------------------------ answers to a READ


class Reader:
    """One connection's end, with a READ of 128 bytes to offset 64 in flight, that is handed what its holder sent."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.memory = bytearray(256)
        self.peer = Peer(self.context, "holder", "tcp://127.0.0.1:9", None, b"", memoryview(self.memory), lambda: None)

    def take(self, frames: list[bytes]) -> ZmqReading:
        reading = ZmqReading(self.peer, cut([Span(0, 64, 128)]))
        self.peer._owed = {7: (reading, reading.chunks.popleft())}
        reading.owed = 1
        self.memory[:] = bytes(256)
        self.peer._take([zmq.Frame(frame) for frame in frames])
        return reading

    def close(self) -> None:
        self.peer.close("the test is over")
        self.context.destroy(linger=0)


ANSWER = [msgpack.packb([7]), b"\1" * 128]
REFUSAL = [msgpack.packb([7, "no"])]


def test_answers_from_anywhere_write_their_own_chunk_or_nothing() -> None:
    @unhurried
    @given(
        header=st.just(ANSWER[0]) | mutated([ANSWER[0], *REFUSAL]) | st.binary(max_size=60),
        rest=st.lists(st.binary(max_size=200) | st.just(ANSWER[1]), max_size=2),
    )
    def check(header: bytes, rest: list[bytes]) -> None:
        reading = reader.take([header, *rest])
        assert bytes(reader.memory[:64]) == bytes(64)
        assert bytes(reader.memory[192:]) == bytes(64)
        if reading.state is State.DONE:
            assert reader.memory[64:192] == rest[0]
        else:
            assert bytes(reader.memory) == bytes(256)
        assert len(reading.error) < 1_000

    reader = Reader()
    try:
        assert reader.take(ANSWER).state is State.DONE
        assert reader.take(REFUSAL).state is State.FAILED
        check()
    finally:
        reader.close()


# ------------------------------------------------------------ settings

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=60)
    | st.binary(max_size=40)
    | st.from_regex(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}", fullmatch=True)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["public", "secret", "allow", "directory"]), inner)
    ),
    max_leaves=12,
)


names = st.sampled_from(list(KINDS))
texts = st.text(max_size=60) | values.map(repr) | st.sampled_from(["9" * 5_000, "1e999", "{" * 5_000, '{"a":' * 5_000])


def is_a_value_or_one_error(name: str, check: Callable[[], object]) -> None:
    error = error_of(check)
    assert error is None or type(error) is ConfigError, repr(error)
    assert error is None or (str(error).startswith(f"{name}=") and "; accepted: " in str(error))


@patient
@given(names, values)
def test_a_setting_is_a_value_or_one_error_that_names_it(name: str, value: object) -> None:
    is_a_value_or_one_error(name, lambda: check_value(name, value))


@patient
@given(names, texts)
def test_text_from_the_environment_is_a_value_or_one_error_that_names_it(name: str, text: str) -> None:
    is_a_value_or_one_error(name, lambda: check_value(name, read_value(name, text)))


CONFIGURATIONS = [
    yaml.safe_dump(
        {"ec": {"local_disk": "/a", "directory": ["tcp://a:1"], "expect_s": 1}, "ec_slab_size": "1MiB"}
    ).encode(),
    yaml.safe_dump({"max_local_cpu_size": 5, "ec": {"security": {"public": "x" * 40, "secret": "y" * 40}}}).encode(),
]


@unhurried
@given(content=st.binary(max_size=300) | mutated(CONFIGURATIONS))
def test_a_configuration_file_is_read_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile.yaml"
    file.write_bytes(content)
    with suppress(ConfigError):
        load_ec_engine_config(config_file=file, environ={})


@unhurried
@given(content=st.binary(max_size=300) | mutated([new_key_file()[1].encode()]))
def test_a_key_file_is_read_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with suppress(ConfigError):
        security_of(str(file), "security")


@unhurried
@given(st.dictionaries(st.sampled_from([*KINDS, "unheard_of"]) | st.text(max_size=9), values, max_size=5))
def test_any_settings_at_all_make_a_configuration_or_one_error(given_: dict[str, object]) -> None:
    with suppress(ConfigError):
        make_config(given_)
