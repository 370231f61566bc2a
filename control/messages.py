"""The messages of the control plane, one struct each.

Owns the words that travel between nodes, directories and replicas. Must never know how they are sent,
what memory an extent lies in, or what vLLM is. Every message is a tagged MessagePack array
(`array_like`): the first element is the tag, the rest are the fields in the order written here, and a field may
only ever be added at the end, with a default.

Identities are the 32 bytes of sha256(namespace || identifier); incarnations are 16 random bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

PROTOCOL_VERSION = 1
"""Spoken by both sides of every control-plane socket; a peer that says another number is refused."""

TOPIC = b"ec"
"""First frame of every PUB message of a directory."""

MAX_CHANGES = 4096
"""Most adverts, and most withdrawals, in one message: keeps the largest legal message under the codec's frame limit."""

MAX_STAGED = 256
"""Most entries in one stage request."""

MAX_INSTANCES = 256
"""Most instances that one node tells of."""

Identity = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Incarnation = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Epoch = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class EntryState(IntEnum):
    """Where an advertised entry is, from the reader's point of view."""

    PENDING = 0
    """Being encoded right now; there is no extent to read yet."""
    RESIDENT = 1
    """In the holder's arena: may be read one-sided."""
    DISK = 2
    """Only on the holder's disk: must be staged first."""


# gc=False: there are millions of them, they hold nothing that could form a cycle, and visiting them is not free.
class Advert(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """'Node N holds entry K.' N is the sender's incarnation and is not repeated here."""

    identity: Identity
    state: Annotated[int, msgspec.Meta(ge=0, le=2)]
    nbytes: Natural
    rows: Natural
    dim: Natural
    dtype: Word
    offset: Natural
    """Byte offset of the extent in the holder's arena."""
    record: Natural
    """Byte offset, in the same arena, of the extent's 64-byte generation record."""
    generation: Annotated[int, msgspec.Meta(ge=0)]


class NodeInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who a node is and where it answers. `address` is a ZMQ endpoint that peers dial for the card."""

    incarnation: Incarnation
    name: Name
    address: Name
    started_at: Natural = 0
    """Unix time of the start, by the node's clock: for people only. 0: not told."""
    key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """The node's CURVE public key, with which peers must expect it to prove itself; empty where there is none."""


class InstanceInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A vLLM engine that is attached to a node."""

    name: Name
    role: Word
    """'producer', 'consumer' or 'both'."""
    namespace: Annotated[str, msgspec.Meta(max_length=64)]
    """Of its entries. Who knows it and an identifier knows the identity."""


Instances = Annotated[list[InstanceInfo], msgspec.Meta(max_length=MAX_INSTANCES)]


# ---------------------------------------------------------------- node -> directory (DEALER -> ROUTER)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a node to a directory, and again whenever the directory's epoch changes.

    A hello drops everything the directory knew of that incarnation: a full announcement follows.
    """

    version: Natural
    node: NodeInfo


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="announce"):
    """Changes of one node since its last message. `seq` counts from 1 after each hello, without gaps.

    Withdrawals are applied first, then adverts. `instances`, where it is given, replaces those told before.
    """

    incarnation: Incarnation
    seq: Natural
    adverts: Annotated[list[Advert], msgspec.Meta(max_length=MAX_CHANGES)]
    withdrawn: Annotated[list[Identity], msgspec.Meta(max_length=MAX_CHANGES)]
    instances: Instances | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """'Still alive', with the seq of the last announce, so that a lost one is noticed."""

    incarnation: Incarnation
    seq: Natural


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """A clean leave: everything of this incarnation goes at once."""

    incarnation: Incarnation


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="snapshot?"):
    """A replica asks for the whole state; `token` is echoed in every chunk of the answer."""

    version: Natural
    token: Natural


# ---------------------------------------------------------------- directory -> node (ROUTER -> DEALER)


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to hello, heartbeat and snapshot request: the directory's epoch and where its PUB socket is."""

    version: Natural
    epoch: Epoch
    pub_port: Port
    """TCP port of the PUB socket, on the host that was dialled."""
    seq: Natural | None = None
    """That of the heartbeat, when it is answered: all announces up to there were read. 0 to anything else. None: this
    directory does not tell."""


class HelloAgain(msgspec.Struct, frozen=True, array_like=True, tag="hello!"):
    """The directory does not know this incarnation, or missed a message of it: say hello and announce all."""

    epoch: Epoch


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The directory will not talk to this peer; `reason` is for people."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class SnapshotNode(msgspec.Struct, frozen=True, array_like=True):
    """A slice of one node's adverts inside a snapshot chunk."""

    node: NodeInfo
    adverts: Annotated[list[Advert], msgspec.Meta(max_length=MAX_CHANGES)]
    instances: Instances = []
    """In every slice of the node."""


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Part of a snapshot that is valid at `seq` of the PUB stream of `epoch`; `last` closes it.

    `index` counts the chunks of one answer from 0.
    """

    token: Natural
    index: Natural
    epoch: Epoch
    seq: Natural
    last: bool
    nodes: list[SnapshotNode]


# ---------------------------------------------------------------- directory -> replicas (PUB)


class NodeUp(msgspec.Struct, frozen=True, array_like=True, tag="up"):
    """A node said hello: what was known of this incarnation does not count any more, its adverts follow.

    A subscriber may forget at once, or wait a little for what is announced again.
    """

    node: NodeInfo


class NodeDown(msgspec.Struct, frozen=True, array_like=True, tag="down"):
    """A node left or went silent: nothing of it may be used any more."""

    incarnation: Incarnation


class Changed(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """What one node announced. Withdrawals are applied first, then adverts; `instances` replaces those told before."""

    incarnation: Incarnation
    adverts: Annotated[list[Advert], msgspec.Meta(max_length=MAX_CHANGES)]
    withdrawn: Annotated[list[Identity], msgspec.Meta(max_length=MAX_CHANGES)]
    instances: Instances | None = None


Event = NodeUp | NodeDown | Changed


class Events(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """Payload of one PUB message. The frames are (topic, 8-byte big-endian seq, this), as vLLM frames KV events.

    An empty list is the directory's own heartbeat: it carries the current sequence number, so that a subscriber
    notices a lost tail without waiting for the next change.
    """

    epoch: Epoch
    events: list[Event]
    version: Natural = 1
    """PROTOCOL_VERSION of the directory: who only subscribes gets no other word of it."""


# ---------------------------------------------------------------- node <-> node (DEALER -> ROUTER)


class CardRequest(msgspec.Struct, frozen=True, array_like=True, tag="card?"):
    """A peer asks for the card; `reader` lets the holder's transport expect the connection."""

    version: Natural
    reader: Incarnation


class Card(msgspec.Struct, frozen=True, array_like=True, tag="card"):
    """What a peer needs to read this node's arena. `transport` names the implementation, `blob` is its own."""

    version: Natural
    incarnation: Incarnation
    transport: Word
    revision: Natural
    """Grows when the arena grows; an advert outside the registered range asks for a newer card."""
    registered: Natural
    """Bytes from the arena's start that may be read with this card."""
    blob: bytes


class StageRequest(msgspec.Struct, frozen=True, array_like=True, tag="stage?"):
    """A peer wants to read entries that this node advertises as on disk only: bring them into the arena."""

    version: Natural
    identities: Annotated[list[Identity], msgspec.Meta(max_length=MAX_STAGED)]


class StageAnswer(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """One entry of a stage request: where it is by now, or None when it cannot be brought. One answer per identity."""

    identity: Identity
    advert: Advert | None


ToDirectory = Hello | Announce | Heartbeat | Goodbye | SnapshotRequest
FromDirectory = Welcome | HelloAgain | Refused | SnapshotChunk
ToPeer = CardRequest | StageRequest
FromPeer = Card | Refused | StageAnswer
