"""What every transport checks before it believes an offset or a card.

Owns the error texts for bad offsets and the bounds on what a peer may send as its card. Must never touch memory.
"""

from __future__ import annotations

from hashlib import blake2b

import msgpack

from ec_p2p.transport.interface import TransportError

MAX_CARD_BYTES = 4 << 20
MAX_CARD_ITEMS = 1 << 14
"""Elements of any list in a card. A card lists the slabs of an arena: this is 4 TiB of them at the default size."""

_DIGEST_BYTES = 16


def check_span(whose: str, offset: int, nbytes: int, registered: int) -> None:
    """Raise TransportError unless these bytes are a part of the registered ones, which start at offset 0."""
    if offset < 0 or nbytes <= 0 or offset + nbytes > registered:
        raise TransportError(
            f"{whose}: {nbytes} bytes at offset {offset} are not among the {registered} bytes registered"
        )


def check_next_range(offset: int, nbytes: int, registered: int, arena_bytes: int) -> None:
    """Raise TransportError unless this range continues what is registered and ends within the arena."""
    if offset != registered or nbytes <= 0 or offset + nbytes > arena_bytes:
        raise TransportError(
            f"cannot register {nbytes} bytes at offset {offset}: "
            f"{registered} bytes are registered already, the arena has {arena_bytes}"
        )


def pack_card(kind: str, version: int, name: str, *fields: object) -> bytes:
    body: bytes = msgpack.packb([kind, version, name, *fields])
    return _digest(body) + body


def unpack_card(card: bytes, kind: str, version: int, name: str) -> list[object]:
    """The fields of a card that a peer called `name` made with `pack_card`. Raises TransportError.

    The digest is there because UCX kills the process over one wrong byte in an address. It does not prove who made
    the card."""
    if len(card) > MAX_CARD_BYTES:
        raise TransportError(f"the card of {name} has {len(card)} bytes; accepted: up to {MAX_CARD_BYTES}")
    body = card[_DIGEST_BYTES:]
    if card[:_DIGEST_BYTES] != _digest(body):
        raise TransportError(f"the card of {name} ({len(card)} bytes) is damaged: its digest does not match")
    try:
        fields = msgpack.unpackb(body, max_array_len=MAX_CARD_ITEMS, max_map_len=0, max_ext_len=0)
    except Exception as error:  # whatever the decoder makes of hostile bytes
        raise TransportError(f"the card of {name} cannot be decoded: {type(error).__name__}: {error}") from error
    if not isinstance(fields, list) or fields[:3] != [kind, version, name]:
        said = repr(fields[:3] if isinstance(fields, list) else fields)[:100]
        raise TransportError(f"the card of {name} starts with {said}; accepted: {[kind, version, name]}")
    return fields[3:]


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
