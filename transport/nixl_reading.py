"""READs in flight from one peer, over NIXL.

Owns the peer's connection state, and the handles of each READ's pieces until the library has ended them. A reading
must never call itself ended while one of its pieces may still write into landing memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ec_p2p.transport.interface import Span, State

if TYPE_CHECKING:
    from ec_p2p.transport.nixl import Agent

PIECE_BYTES = 8 << 20
"""Through shared memory, the call that posts a READ also does the copying. Long READs go out in pieces of this size,
one per poll, so that the caller's loop gets its turn in between."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 16.0

Stretches = list[tuple[int, int, int]]
"""(address, bytes, device) of each stretch of memory."""

Piece = tuple[Stretches, Stretches]
"""Where to write, and where to read, stretch by stretch."""


class Ground(NamedTuple):
    """Registered memory of one side: byte 0 is at address `base`, each range ends where `ends` say.

    kind: what the library calls it: 'DRAM', or 'VRAM' for a device's, whose number `device` is."""

    base: int
    ends: list[int]
    kind: str = "DRAM"
    device: int = 0


def cut(spans: Sequence[Span], local: Ground, remote: Ground) -> deque[Piece]:
    """Pieces of the spans, by address; every span is within the last end on both sides. No stretch crosses the end of a
    range, because the library looks memory up by range."""
    pieces: deque[Piece] = deque()
    room = 0
    for source, target, nbytes in spans:
        while nbytes:
            if not room:
                here: Stretches = []
                there: Stretches = []
                pieces.append((here, there))
                room = PIECE_BYTES
            to_local_end = local.ends[bisect_right(local.ends, target)] - target
            to_remote_end = remote.ends[bisect_right(remote.ends, source)] - source
            size = min(nbytes, room, to_local_end, to_remote_end)
            here.append((local.base + target, size, local.device))
            there.append((remote.base + source, size, remote.device))
            source, target, nbytes, room = source + size, target + size, nbytes - size, room - size
    return pieces


class Peer:
    """One peer: what its newest card said, and how its connection is."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.name = name
        self.base = 0
        self.ends: list[int] = []
        self.greeting = 0
        self.metadata = b""
        self.in_flight = 0
        self.broken = False
        """A READ failed: the library will not use this connection again."""
        self.forgotten = False
        self._reconnect_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._agent = agent

    @property
    def registered(self) -> int:
        return self.ends[-1] if self.ends else 0

    def post(self, piece: Piece, kind: str) -> int | None:
        """Start one READ into memory of this kind. Returns its handle, or None when it is done already. Raises whatever
        the library does."""
        try:
            handle = self._agent.post(self.name, *piece, kind)
        except Exception:
            self.broken = True
            raise
        if handle is None:
            self._pause_s = _FIRST_PAUSE_S
        else:
            self.in_flight += 1
        return handle

    def ended(self, handle: int) -> bool:
        """Whether the READ is done. Its handle is then gone, as it is after an error, which is raised."""
        try:
            done = self._agent.ended(handle)
        except Exception:
            self.broken = True
            self.in_flight -= 1
            raise
        if done:
            self._pause_s = _FIRST_PAUSE_S
            self.in_flight -= 1
        return done

    def may_reconnect(self, now: float) -> bool:
        """Whether the broken connection may be made anew, which True begins. Until a READ works again, the pauses in
        between grow: each attempt that fails at once costs the process a descriptor, which UCX does not give back."""
        if self.in_flight or now < self._reconnect_at:
            return False
        self._reconnect_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


class NixlReading:
    """See `Reading`."""

    __slots__ = ("_handles", "_kind", "_peer", "_pieces", "_state", "error", "peer")

    def __init__(self, peer: Peer, pieces: deque[Piece], kind: str) -> None:
        """`kind` of the memory that the pieces are written to."""
        self.peer = peer.name
        self.error = ""
        self._kind = kind
        self._peer = peer
        self._pieces = pieces
        self._handles: list[int] = []
        self._state = State.POSTED

    @property
    def unposted(self) -> int:
        return len(self._pieces)

    def poll(self) -> State:
        if self._state is State.POSTED:
            if self._handles:
                self._handles = [handle for handle in self._handles if not self._ended(handle)]
            if self._peer.forgotten:
                self._fail("it was forgotten")
            self._post()
            if not self._handles and not self._pieces:
                self._state = State.FAILED if self.error else State.DONE
        return self._state

    def release(self) -> bool:
        if self._state is State.POSTED:
            self._fail("released")
        return self.poll() is not State.POSTED

    def _post(self) -> None:
        """Post pieces until one of them was copied on the spot: then it is the loop's turn."""
        while self._pieces:
            try:
                handle = self._peer.post(self._pieces.popleft(), self._kind)
            except Exception as error:  # the library's errors share no base class
                self._fail(f"{type(error).__name__}: {error}")
                return
            if handle is None:
                return
            self._handles.append(handle)

    def _ended(self, handle: int) -> bool:
        try:
            return self._peer.ended(handle)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return True

    def _fail(self, why: str) -> None:
        """Post nothing more. What is in flight goes on, and the reading with it."""
        self._pieces.clear()
        self.error = self.error or f"READ from {self.peer}: {why}"
