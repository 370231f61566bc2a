"""The messages of the control plane, one struct each.

Owns the words that travel between nodes, directories and replicas. Must never know how they are sent,
what memory an extent lies in, or what vLLM is. Every message is a tagged MessagePack array
(`array_like`): the first element is the tag, the rest are the fields in the order written here, and a field may
only ever be added at the end, with a default.

Identities are the 32 bytes of sha256(namespace || identifier); incarnations are 16 random bytes.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

PROTOCOL_VERSION = 1
"""Spoken by both sides of every control-plane socket; a peer that says another number is refused."""


class EntryState(IntEnum):
    """Where an advertised entry is, from the reader's point of view."""

    PENDING = 0
    """Being encoded right now; there is no extent to read yet."""
    RESIDENT = 1
    """In the holder's arena: may be read one-sided."""
    DISK = 2
    """Only on the holder's disk: must be staged first."""


class Advert(msgspec.Struct, frozen=True, array_like=True):
    """'Node N holds entry K.' N is the sender's incarnation and is not repeated here."""

    identity: bytes
    state: int
    nbytes: int
    rows: int
    dim: int
    dtype: str
    offset: int
    """Byte offset of the extent in the holder's arena."""
    record: int
    """Byte offset, in the same arena, of the extent's 64-byte generation record."""
    generation: int


class NodeInfo(msgspec.Struct, frozen=True, array_like=True):
    """Who a node is and where it answers. `address` is a ZMQ endpoint that peers dial for the card."""

    incarnation: bytes
    name: str
    address: str


# ---------------------------------------------------------------- node -> directory (DEALER -> ROUTER)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a node to a directory, and again whenever the directory's epoch changes.

    A hello drops everything the directory knew of that incarnation: a full announcement follows.
    """

    version: int
    node: NodeInfo


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="announce"):
    """Changes of one node since its last message. `seq` counts from 1 after each hello, without gaps."""

    incarnation: bytes
    seq: int
    adverts: list[Advert]
    withdrawn: list[bytes]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """'Still alive', with the seq of the last announce, so that a lost one is noticed."""

    incarnation: bytes
    seq: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """A clean leave: everything of this incarnation goes at once."""

    incarnation: bytes


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="snapshot?"):
    """A replica asks for the whole state; `token` is echoed in every chunk of the answer."""

    version: int
    token: int


# ---------------------------------------------------------------- directory -> node (ROUTER -> DEALER)


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to hello and to snapshot requests: the directory's epoch and where its PUB socket is."""

    version: int
    epoch: bytes
    pub_port: int
    """TCP port of the PUB socket, on the host that was dialled."""


class HelloAgain(msgspec.Struct, frozen=True, array_like=True, tag="hello!"):
    """The directory does not know this incarnation, or missed a message of it: say hello and announce all."""

    epoch: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The directory will not talk to this peer; `reason` is for people."""

    reason: str


class SnapshotNode(msgspec.Struct, frozen=True, array_like=True):
    """A slice of one node's adverts inside a snapshot chunk."""

    node: NodeInfo
    adverts: list[Advert]


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Part of a snapshot that is valid at `seq` of the PUB stream of `epoch`; `last` closes it."""

    token: int
    epoch: bytes
    seq: int
    last: bool
    nodes: list[SnapshotNode]


# ---------------------------------------------------------------- directory -> replicas (PUB)


class NodeUp(msgspec.Struct, frozen=True, array_like=True, tag="up"):
    """A node said hello: forget what was known of this incarnation, adverts follow."""

    node: NodeInfo


class NodeDown(msgspec.Struct, frozen=True, array_like=True, tag="down"):
    """A node left or went silent: nothing of it may be used any more."""

    incarnation: bytes


class Changed(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """What one node announced."""

    incarnation: bytes
    adverts: list[Advert]
    withdrawn: list[bytes]


Event = NodeUp | NodeDown | Changed


class Events(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """Payload of one PUB message. The frames are (topic, 8-byte big-endian seq, this), as vLLM frames KV events.

    An empty list is the directory's own heartbeat: it carries the current sequence number, so that a subscriber
    notices a lost tail without waiting for the next change.
    """

    epoch: bytes
    events: list[Event]


# ---------------------------------------------------------------- node <-> node (DEALER -> ROUTER)


class CardRequest(msgspec.Struct, frozen=True, array_like=True, tag="card?"):
    """A peer asks for the card; `reader` lets the holder's transport expect the connection."""

    version: int
    reader: bytes


class Card(msgspec.Struct, frozen=True, array_like=True, tag="card"):
    """What a peer needs to read this node's arena. `transport` names the implementation, `blob` is its own."""

    version: int
    incarnation: bytes
    transport: str
    revision: int
    """Grows when the arena grows; an advert outside the registered range asks for a newer card."""
    registered: int
    """Bytes from the arena's start that may be read with this card."""
    blob: bytes


class Knock(msgspec.Struct, frozen=True, array_like=True, tag="knock"):
    """'I am about to connect or read': the holder makes transport progress quickly for a short while."""

    reader: bytes


ToDirectory = Hello | Announce | Heartbeat | Goodbye | SnapshotRequest
FromDirectory = Welcome | HelloAgain | Refused | SnapshotChunk
ToPeer = CardRequest | Knock
FromPeer = Card | Refused
