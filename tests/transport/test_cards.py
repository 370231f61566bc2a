"""Cards come from the network: what is not a card is refused, with a reason, and does no harm."""

from __future__ import annotations

import msgpack
import pytest

from ec_p2p.transport.checks import MAX_CARD_BYTES, pack_card
from ec_p2p.transport.interface import TransportError

ENDPOINT = "tcp://127.0.0.1:9"
BAD_FIELDS = {
    "nixl": [
        (),
        (4096, [4096], 4096),
        ("4096", [4096], 4096, b"metadata"),
        (4096, "4096", 4096, b"metadata"),
        (4096, [4096, 4096], 4096, b"metadata"),
        (4096, [8192, 4096], 4096, b"metadata"),
        (4096, [-1], 4096, b"metadata"),
        (4096, [1 << 62], 4096, b"metadata"),
        (-4096, [4096], 4096, b"metadata"),
        (4096, [4096], 1 << 63, b"metadata"),
        (4096, [4096], 4096, "metadata"),
    ],
    "zmq": [
        (),
        (ENDPOINT,),
        (ENDPOINT, -1),
        (ENDPOINT, 1 << 62),
        (ENDPOINT, "4096"),
        (b"tcp://127.0.0.1:9", 4096),
        ("inproc://elsewhere", 4096),
        ("ipc:///tmp/elsewhere", 4096),
        ("tcp://127.0.0.1", 4096),
        (f"tcp://{'a' * 300}:9", 4096),
    ],
}


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (b"", "damaged"),
        (b"\xc1", "damaged"),
        (bytes(500), "damaged"),
        (bytes(MAX_CARD_BYTES + 1), f"accepted: up to {MAX_CARD_BYTES}"),
    ],
)
def test_bytes_that_are_no_card(reader, holder, card, said):
    with pytest.raises(TransportError, match=said):
        reader.transport.connect("somebody", card)
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


def test_every_damaged_byte_is_noticed(reader, holder):
    for place in range(len(holder.card)):
        damaged = bytearray(holder.card)
        damaged[place] ^= 1
        with pytest.raises(TransportError, match="damaged"):
            reader.transport.connect(holder.name, bytes(damaged))
        with pytest.raises(TransportError, match="damaged"):
            reader.transport.connect(holder.name, holder.card[:place])
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


def test_a_card_of_somebody_else(reader, holder):
    with pytest.raises(TransportError, match=f"the card of somebody starts with .*{holder.name}"):
        reader.transport.connect("somebody", holder.card)


def test_our_own_card(reader):
    with pytest.raises(TransportError, match="itself"):
        reader.transport.connect(reader.transport.name, reader.transport.card())


@pytest.mark.parametrize(("other_kind", "other_version"), [("carrier-pigeon", 1), (None, 2), (None, -1)])
def test_a_card_of_another_kind_or_version(kind, reader, other_kind, other_version):
    card = pack_card(other_kind or kind, other_version, "somebody")
    with pytest.raises(TransportError, match="the card of somebody starts with"):
        reader.transport.connect("somebody", card)


def test_a_card_whose_fields_cannot_be(kind, reader, holder):
    for fields in BAD_FIELDS[kind]:
        with pytest.raises(TransportError, match="the card of somebody has no"):
            reader.transport.connect("somebody", pack_card(kind, 1, "somebody", *fields))
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


def test_a_card_that_would_take_all_memory(kind, reader):
    bottomless: list[object] = []
    for _ in range(500):
        bottomless = [bottomless]
    for field in (bottomless, [0] * 100_000, {"a": 1}, msgpack.ExtType(1, b"x"), "x" * MAX_CARD_BYTES):
        with pytest.raises(TransportError, match="somebody"):
            reader.transport.connect("somebody", pack_card(kind, 1, "somebody", field))
