"""The codec is total: what it accepts round-trips, everything else is a BadFrame."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.control import messages
from ec_p2p.control.codec import MAX_FRAME, BadFrame, decode, encode
from ec_p2p.control.messages import (
    MAX_CHANGES,
    Advert,
    Announce,
    Card,
    Events,
    FromDirectory,
    FromPeer,
    Heartbeat,
    Hello,
    NodeInfo,
    SnapshotChunk,
    SnapshotNode,
    ToDirectory,
    ToPeer,
)
from ec_p2p.node.messages import FromNode, Inspection, ToNode

UNIONS = {
    "to directory": ToDirectory,
    "from directory": FromDirectory,
    "to peer": ToPeer,
    "from peer": FromPeer,
    "events": Events,
    "to node": ToNode,
    "from node": FromNode,
}


NODE = NodeInfo(incarnation=b"i" * 16, name="host-1", address="tcp://10.0.0.1:4000")
ADVERT = Advert(
    identity=b"k" * 32,
    state=messages.EntryState.RESIDENT,
    nbytes=4 << 20,
    rows=1024,
    dim=2048,
    dtype="bfloat16",
    offset=1 << 40,
    record=64,
    generation=(1 << 64) - 1,
)


naturals = st.integers(0, (1 << 63) - 1)
identities = st.binary(min_size=32, max_size=32)
incarnations = st.binary(min_size=16, max_size=16)
adverts = st.builds(
    Advert,
    identity=identities,
    state=st.sampled_from([0, 1, 2]),
    nbytes=naturals,
    rows=naturals,
    dim=naturals,
    dtype=st.text(st.characters(codec="utf-8"), min_size=1, max_size=16),
    offset=naturals,
    record=naturals,
    generation=st.integers(0, (1 << 64) - 1),
)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=255)
nodes = st.builds(NodeInfo, incarnation=incarnations, name=names, address=names)
announces = st.builds(
    Announce,
    incarnation=incarnations,
    seq=naturals,
    adverts=st.lists(adverts, max_size=4),
    withdrawn=st.lists(identities, max_size=4),
)
snapshots = st.builds(
    SnapshotChunk,
    token=naturals,
    index=naturals,
    epoch=incarnations,
    seq=naturals,
    last=st.booleans(),
    nodes=st.lists(st.builds(SnapshotNode, node=nodes, adverts=st.lists(adverts, max_size=3)), max_size=3),
)


@given(
    st.one_of(announces, st.builds(Hello, version=naturals, node=nodes), st.builds(Heartbeat, incarnations, naturals))
)
def test_what_a_node_says_round_trips(message: msgspec.Struct) -> None:
    assert decode(encode(message), ToDirectory) == message


@given(snapshots)
def test_snapshots_round_trip(message: SnapshotChunk) -> None:
    assert decode(memoryview(encode(message)), FromDirectory) == message


def test_messages_with_maps_and_floats_round_trip() -> None:
    message = Inspection(token=1, node={"name": "a"}, counters={"hits": 1.5}, gauges={}, peers=["b"])
    assert decode(encode(message), FromNode) == message


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
@given(frame=st.binary(max_size=200))
def test_random_bytes_are_bad_frames(union: object, frame: bytes) -> None:
    refuses_or_round_trips(frame, union)


@given(
    message=st.one_of(announces, snapshots),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 50),
)
def test_mutated_frames_never_raise_anything_else(
    message: msgspec.Struct, edits: list[tuple[int, int]], cut: int
) -> None:
    frame = bytearray(encode(message))
    for position, value in edits:
        frame[position % len(frame)] = value
    for union in UNIONS.values():
        refuses_or_round_trips(bytes(frame[: len(frame) - cut]), union)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
TAGS = (
    "hello",
    "announce",
    "heartbeat",
    "goodbye",
    "snapshot?",
    "welcome",
    "hello!",
    "snapshot",
    "events",
    "card",
    "want",
)


@given(tag=st.sampled_from(TAGS), fields=st.lists(plain, max_size=9))
def test_right_tags_over_wrong_fields_never_raise_anything_else(tag: str, fields: list[object]) -> None:
    frame = msgpack.packb([tag, *fields], unicode_errors="surrogatepass")
    for union in UNIONS.values():
        refuses_or_round_trips(frame, union)


def refuses_or_round_trips(frame: bytes, union: object) -> None:
    try:
        message = decode(frame, union)
    except BadFrame:
        return
    assert decode(encode(message), union) == message


def announce(**fields: object) -> bytes:
    return encode(msgspec.structs.replace(Announce(NODE.incarnation, 1, [ADVERT], []), **fields))


def advert(**fields: object) -> bytes:
    return announce(adverts=[msgspec.structs.replace(ADVERT, **fields)])


@pytest.mark.parametrize(
    "frame",
    [
        announce(incarnation=b"i" * 15),
        announce(incarnation="i" * 16),
        announce(seq=-1),
        announce(seq=True),
        announce(seq=1.5),
        announce(withdrawn=[b"short"]),
        announce(adverts=[ADVERT] * (MAX_CHANGES + 1)),
        advert(identity=b"k" * 33),
        advert(state=3),
        advert(state=-1),
        advert(nbytes=-1),
        advert(rows=1 << 63),
        advert(dtype=""),
        advert(dtype="x" * 17),
        encode(Hello(1, msgspec.structs.replace(NODE, address="a" * 256))),
    ],
)
def test_values_out_of_bounds_are_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame, ToDirectory)


def goodbye(more: bytes) -> bytes:
    """A message with one element more than it has fields, which is skipped."""
    return b"\x93" + msgpack.packb("goodbye") + msgpack.packb(NODE.incarnation) + more


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "invalid opcode"),
        (b"\x91" * 5000 + b"\xc0", "Expected `str`, got `array`"),
        (goodbye(b"\x91" * 5000 + b"\xc0"), "RecursionError"),
        (goodbye(b"\x81\xa1a" * 5000 + b"\xc0"), "RecursionError"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
        (b"\xdf\xff\xff\xff\xff", "Expected `array`, got `object`"),
        (b"\xdb\xff\xff\xff\xff", "truncated"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\xd4\x05x", "Expected `array`, got `ext`"),
        (goodbye(b"\xdd\xff\xff\xff\xff"), "truncated"),
        (goodbye(b"\xdf\xff\xff\xff\xff"), "truncated"),
        (goodbye(b"\xc6\xff\xff\xff\xff"), "truncated"),
        (goodbye(b"\xc1"), "invalid opcode"),
        (msgpack.packb(["heartbeat", NODE.incarnation, msgpack.ExtType(5, b"x")]), "Expected `int`, got `ext`"),
        (msgpack.packb(["hello", 1, [NODE.incarnation, b"name", "address"]]), "Expected `str`, got `bytes`"),
        (encode(Hello(1, NODE)).replace(b"host", b"h\xffst"), "UTF-8"),
        (msgpack.packb({"goodbye": NODE.incarnation}), "Expected `array`, got `object`"),
        (msgpack.packb(["goodbye", b"i" * 16]) + b"\xc0", "trailing"),
        (msgpack.packb(["unheard of"]), "unheard of"),
        (b"\xc0" * (MAX_FRAME + 1), f"at most {MAX_FRAME}"),
    ],
)
def test_reasons_say_what_was_wrong(frame: bytes, reason: str) -> None:
    with pytest.raises(BadFrame, match=reason):
        decode(frame, ToDirectory)


def packed(nbytes: int) -> bytes:
    return nbytes.to_bytes(4, "big")


def filled(head: bytes, element: bytes, tail: bytes = b"") -> bytes:
    """A frame of the largest size: `head`, the header of an array, as many elements as there is room for, `tail`."""
    count = (MAX_FRAME - len(head) - 5 - len(tail)) // len(element)
    return head + b"\xdd" + packed(count) + element * count + tail


SNAPSHOT = b"\x97" + b"".join(map(msgpack.packb, ["snapshot", 1, 0, b"e" * 16, 1, True]))
EVENTS = b"\x93" + msgpack.packb("events") + msgpack.packb(b"e" * 16)
CARD = b"\x97" + b"".join(map(msgpack.packb, ["card", 1, b"i" * 16, "nixl", 1, 1]))
LARGEST = {
    "snapshot of nodes without entries": (FromDirectory, filled(SNAPSHOT, msgpack.packb([[b"i" * 16, "a", "b"], []]))),
    "events of nodes that went": (Events, filled(EVENTS, msgpack.packb(["down", b"i" * 16]))),
    "instances": (
        Events,
        filled(EVENTS, msgpack.packb(["changed", b"i" * 16, [], [], [["\u0100", "\u0100", ""]] * 256])),
    ),
    "short adverts": (
        FromDirectory,
        filled(
            SNAPSHOT, msgpack.packb([[b"i" * 16, "a", "b"], [[b"k" * 32, 1, 300, 1, 1, "ab", 300, 300, 300]] * 4096])
        ),
    ),
    "names of peers": (
        FromNode,
        filled(b"\x96" + b"".join(map(msgpack.packb, ["inspection", 1, {}, {}, {}])), msgpack.packb("ab")),
    ),
    "wanted items": (
        ToNode,
        filled(b"\x97" + msgpack.packb("want") + b"\1", msgpack.packb([b"k" * 32, 300]), b"\1\1\1\xc2"),
    ),
    "what no field is for": (ToDirectory, filled(goodbye(b""), b"\x91\x80")),
    "an array said to be long": (FromDirectory, SNAPSHOT + b"\xdd" + packed(1 << 28)),
    "a map said to be long": (FromNode, b"\x96" + msgpack.packb("inspection") + b"\1\xdf" + packed(1 << 28)),
    "bytes said to be long": (FromPeer, CARD + b"\xc6" + packed(1 << 30)),
}


@pytest.mark.parametrize(("union", "frame"), LARGEST.values(), ids=LARGEST)
def test_no_frame_makes_the_decoder_allocate_much_more_than_itself(union: object, frame: bytes) -> None:
    assert len(frame) <= MAX_FRAME
    with suppress(BadFrame):
        decode(goodbye(b"\xc0"), union)
    tracemalloc.start()
    try:
        with suppress(BadFrame):
            decode(frame, union)
        assert tracemalloc.get_traced_memory()[1] < 32 * MAX_FRAME
    finally:
        tracemalloc.stop()


def test_a_reason_that_quotes_the_sender_is_short() -> None:
    with pytest.raises(BadFrame) as caught:
        decode(msgpack.packb(["x" * 10_000]), ToDirectory)
    assert len(caught.value.reason) < 250


def test_fields_added_at_the_end_by_a_newer_sender_are_ignored() -> None:
    frame = msgpack.packb(["heartbeat", NODE.incarnation, 7, "new"])
    assert decode(frame, ToDirectory) == Heartbeat(NODE.incarnation, 7)


def test_the_largest_legal_messages_fit_one_frame() -> None:
    largest = (1 << 63) - 1
    entry = Advert(b"k" * 32, 2, largest, largest, largest, "\U0001f600" * 16, largest, largest, (1 << 64) - 1)
    message = Announce(NODE.incarnation, largest, [entry] * MAX_CHANGES, [b"k" * 32] * MAX_CHANGES)
    assert decode(encode(message), ToDirectory) == message


def test_a_card_carries_opaque_bytes() -> None:
    card = Card(
        version=1, incarnation=b"i" * 16, transport="nixl", revision=2, registered=256 << 20, blob=bytes(range(256))
    )
    assert decode(encode(card), FromPeer) == card
