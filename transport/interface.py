"""The seam between a node and whatever moves bytes between two arenas.

Owns the words span, reading and state. A transport reads a peer's registered memory into our own, one-sided where
the hardware allows it; it knows nothing of entries, generations or directories. All calls of one transport come from
one thread (the node's loop); no call blocks, except `close`.

Addresses are byte offsets into an arena: the whole arena is one contiguous range of virtual memory on either side, of
which a prefix is registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class TransportError(Exception):
    """A transfer, a connection or a registration failed; the text says which peer and what the library said."""


class Span(NamedTuple):
    """`nbytes` bytes at `remote` in the peer's arena, to be written at `local` in ours."""

    remote: int
    local: int
    nbytes: int


class State(Enum):
    """Of a reading. DONE and FAILED are terminal: only then may the landing memory be used or reused."""

    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"


class Reading(Protocol):
    """One posted READ of one or more spans from one peer."""

    peer: str
    error: str
    """Why it FAILED, for people; empty before."""

    @property
    def unposted(self) -> int:
        """Pieces that `poll` itself will copy, one a call: with any left, call again without a pause."""
        ...

    def poll(self) -> State:
        """Make progress and say where the READ is. Never raises; after a terminal state it stays terminal."""
        ...

    def release(self) -> bool:
        """Give the handle back. False while the library still may write into the landing memory: keep the memory
        quarantined and call again later."""
        ...


class Transport(Protocol):
    """One end of the data plane. Made with the arena's base address; closed by its owner."""

    kind: str
    """'nixl' or 'zmq': two ends of different kinds cannot read each other."""
    bad_frames: int
    """Messages of peers that made no sense; they were dropped."""

    def register(self, offset: int, nbytes: int) -> None:
        """Make arena bytes [offset, offset+nbytes) readable by peers and usable as landing memory.

        Calls come in ascending, adjacent order. Raises TransportError."""
        ...

    def card(self) -> bytes:
        """Opaque bytes from which a peer's `connect` learns how to read what is registered now."""
        ...

    def connect(self, peer: str, card: bytes) -> None:
        """Learn (or refresh) a peer from its card and start connecting. Idempotent. Raises TransportError."""
        ...

    def forget(self, peer: str) -> None:
        """Drop a peer. Readings from it turn FAILED or stay POSTED until the library is sure."""
        ...

    def read(self, peer: str, spans: Sequence[Span]) -> Reading:
        """Post one READ. Raises TransportError if the peer is unknown or refuses at once; nothing is then in flight."""
        ...

    def progress(self) -> None:
        """Serve what peers ask of us: connection set-up, and reads on transports that need the holder's help."""
        ...

    def sockets(self) -> Sequence[object]:
        """ZMQ sockets whose readability should wake the loop to call `progress`; empty where there are none."""
        ...

    def close(self) -> None:
        """Free every resource. Idempotent."""
        ...
