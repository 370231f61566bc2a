"""NIXL over UCX: one-sided READs between two arenas.

Owns the process's one NIXL agent, what is registered with it, the peers it knows and the handles of READs in flight. It
must never free, or let go of, a handle that the library may still be working on, and never spin: without a progress
thread, everything happens inside `progress` and `Reading.poll`.

Transfers go to the binding layer directly. That saves a third of a small READ's cost, and it keeps the life of a
handle in our hands: the wrapper objects release theirs whenever they happen to be collected.
"""

from __future__ import annotations

import importlib
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgpack

from ec_p2p.transport import NIXL_PACKAGES
from ec_p2p.transport.interface import Span, State, TransportError

CARD_VERSION = 1
MAX_CARD_BYTES = 4 << 20
MAX_RANGES = 1 << 14
PIECE_BYTES = 8 << 20
"""Shared-memory READs copy inside the call that posts them, so a long one goes out in pieces, one per poll."""

_ENVIRONMENT = {
    # Keepalives make a READ from a stopped but living process hang; a dead one is reported without them too.
    "UCX_KEEPALIVE_INTERVAL": "inf",
    # UCX would take SIGHUP for itself and flood the log on it.
    "UCX_DEBUG_SIGNO": "0",
    "NIXL_LOG_LEVEL": "ERROR",
}

_Descs = list[tuple[int, int, int]]
_Batch = tuple[_Descs, _Descs]


def _import_nixl() -> ModuleType:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    refusals = []
    for package in NIXL_PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            refusals.append(f"{package}: {error}")
    raise TransportError(f"NIXL cannot be imported ({'; '.join(refusals)})")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _Ranges:
    """Adjacent registered ranges of one arena, from offset 0. A READ may use bytes of one range only."""

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.ends = list(ends)

    @property
    def nbytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def check(self, whose: str, offset: int, nbytes: int) -> None:
        index = bisect_right(self.ends, offset)
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise TransportError(
                f"{whose}: {nbytes} bytes at offset {offset} are not within the registered bytes 0..{self.nbytes}"
            )
        if bisect_left(self.ends, offset + nbytes) != index:
            raise TransportError(
                f"{whose}: {nbytes} bytes at offset {offset} cross the end of a registered range at {self.ends[index]}"
            )


class _Peer:
    """What a card said about a peer."""

    def __init__(self, base: int, ranges: _Ranges) -> None:
        self.base = base
        self.ranges = ranges
        self.forgotten = False


class NixlReading:
    """See `Reading`. `error` says why it FAILED; it is empty before."""

    __slots__ = ("_agent", "_batches", "_handles", "_peer", "_state", "error", "peer")

    def __init__(self, agent: _Agent, name: str, peer: _Peer, batches: deque[_Batch]) -> None:
        self.peer = name
        self.error = ""
        self._agent = agent
        self._peer = peer
        self._batches = batches
        self._handles: list[int] = []
        self._state = State.POSTED

    def poll(self) -> State:
        if self._state is not State.POSTED:
            return self._state
        if self._handles:
            self._handles = [handle for handle in self._handles if self._in_progress(handle)]
        if self._peer.forgotten and self._batches:
            self._fail("the peer was forgotten")
        self._post()
        if not self._handles and not self._batches:
            self._state = State.FAILED if self.error else State.DONE
        return self._state

    def release(self) -> bool:
        if self._state is State.POSTED:
            # What has not been posted yet never will be; the rest must become terminal first.
            self._fail("released by the reader")
            self.poll()
        return self._state is not State.POSTED

    def _post(self) -> None:
        """Post batches until one completes inside its own call: then the caller's loop gets a turn first."""
        while self._batches:
            local, remote = self._batches.popleft()
            try:
                handle, done = self._agent.post(self.peer, local, remote)
            except Exception as error:  # the library's errors share no base class
                self._fail(_said(error))
                return
            if done:
                return
            self._handles.append(handle)

    def _in_progress(self, handle: int) -> bool:
        try:
            if not self._agent.done(handle):
                return True
        except Exception as error:
            self._fail(_said(error))
        self._agent.free(handle)
        return False

    def _fail(self, why: str) -> None:
        self._batches.clear()
        self.error = self.error or f"READ from {self.peer}: {why}"


class _Agent:
    """The few binding calls that transfers need, bound once."""

    def __init__(self, api: ModuleType, agent: Any) -> None:
        bind = api.nixlBind
        self._descs = bind.nixlXferDList
        self._dram = bind.DRAM_SEG
        self._read = bind.NIXL_READ
        self._success = bind.NIXL_SUCCESS
        self._in_progress = bind.NIXL_IN_PROG
        self._create = agent.agent.createXferReq
        self._start = agent.agent.postXferReq
        self._status = agent.agent.getXferStatus
        self._release = agent.agent.releaseXferReq

    def post(self, peer: str, local: _Descs, remote: _Descs) -> tuple[int, bool]:
        """Start a READ. Returns its handle and False, or, when it is already done and freed, True."""
        handle = self._create(self._read, self._descs(self._dram, local), self._descs(self._dram, remote), peer)
        try:
            done = self._is_done(self._start(handle))
        except Exception:
            self.free(handle)
            raise
        if done:
            self.free(handle)
        return handle, done

    def done(self, handle: int) -> bool:
        return self._is_done(self._status(handle))

    def free(self, handle: int) -> None:
        self._release(handle)

    def _is_done(self, status: Any) -> bool:
        if status == self._success:
            return True
        if status == self._in_progress:
            return False
        raise TransportError(f"unexpected status {status}")


class NixlTransport:
    """See `Transport`. `name` must be unique in the fleet; one per process, because UCX wants it so.

    base, nbytes: the whole mapping of the arena in this process, registered or not."""

    def __init__(self, name: str, base: int, nbytes: int, *, backend: str = "UCX") -> None:
        self.name = name
        self._base = base
        self._nbytes = nbytes
        self._ranges = _Ranges()
        self._peers: dict[str, _Peer] = {}
        self._card: bytes | None = None
        self._registered: list[Any] = []
        api = _import_nixl()
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[backend])
            self._nixl: Any = api.nixl_agent(name, config)
        except Exception as error:
            raise TransportError(f"cannot make a NIXL agent with backend {backend}: {_said(error)}") from error
        if backend not in self._nixl.backends:
            plugins = ", ".join(self._nixl.get_plugin_list())
            raise TransportError(f"this NIXL has no backend {backend!r}; it has {plugins}")
        self._agent = _Agent(api, self._nixl)

    def register(self, offset: int, nbytes: int) -> None:
        if offset != self._ranges.nbytes or nbytes <= 0 or offset + nbytes > self._nbytes:
            raise TransportError(
                f"cannot register {nbytes} bytes at offset {offset}: the next range starts at {self._ranges.nbytes} "
                f"and ends by {self._nbytes}"
            )
        try:
            self._registered.append(self._nixl.register_memory([(self._base + offset, nbytes, 0, "")], "DRAM"))
        except Exception as error:
            raise TransportError(f"cannot register {nbytes} bytes at offset {offset}: {_said(error)}") from error
        self._ranges.ends.append(offset + nbytes)
        self._card = None

    def card(self) -> bytes:
        if self._card is None:
            metadata = self._nixl.get_agent_metadata()
            card: bytes = msgpack.packb([CARD_VERSION, self.name, self._base, self._ranges.ends, metadata])
            self._card = card
        return self._card

    def connect(self, peer: str, card: bytes) -> None:
        base, ranges, metadata = _parse_card(peer, card)
        if peer == self.name:
            raise TransportError(f"{peer} is this transport itself")
        known = self._peers.get(peer)
        if known and known.base == base and known.ranges.ends == ranges.ends:
            return
        try:
            loaded = self._nixl.add_remote_agent(metadata).decode()
            if loaded != peer:
                raise TransportError(f"the metadata is of {loaded!r}")
            self._nixl.make_connection(peer)
        except Exception as error:
            raise TransportError(f"cannot connect to {peer}: {_said(error)}") from error
        if known:
            known.base, known.ranges = base, ranges
        else:
            self._peers[peer] = _Peer(base, ranges)

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        known.forgotten = True
        self._nixl.remove_remote_agent(peer)

    def read(self, peer: str, spans: Sequence[Span]) -> NixlReading:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"unknown peer {peer!r}")
        reading = NixlReading(self._agent, peer, known, self._batches(peer, known, spans))
        reading.poll()
        if reading.error:
            raise TransportError(reading.error)
        return reading

    def progress(self) -> None:
        self._nixl.get_new_notifs()

    def sockets(self) -> Sequence[object]:
        return ()

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)

    def _batches(self, peer: str, known: _Peer, spans: Sequence[Span]) -> deque[_Batch]:
        batches: deque[_Batch] = deque()
        room = 0
        for remote, local, nbytes in spans:
            known.ranges.check(f"peer {peer}", remote, nbytes)
            self._ranges.check("our arena", local, nbytes)
            source, target = known.base + remote, self._base + local
            while nbytes:
                if not room:
                    here: _Descs = []
                    there: _Descs = []
                    batches.append((here, there))
                    room = PIECE_BYTES
                piece = min(room, nbytes)
                here.append((target, piece, 0))
                there.append((source, piece, 0))
                source, target, nbytes, room = source + piece, target + piece, nbytes - piece, room - piece
        if not batches:
            raise TransportError(f"a READ from {peer} needs at least one span")
        return batches


def _parse_card(peer: str, card: bytes) -> tuple[int, _Ranges, bytes]:
    """Base address, ranges and agent metadata of a card that claims to be of `peer`. Raises TransportError."""
    if len(card) > MAX_CARD_BYTES:
        raise TransportError(f"the card of {peer} has {len(card)} bytes; accepted: up to {MAX_CARD_BYTES}")
    try:
        fields = msgpack.unpackb(card, max_array_len=MAX_RANGES, max_ext_len=0, max_map_len=0)
    except Exception as error:
        raise TransportError(f"the card of {peer} cannot be read: {_said(error)}") from error
    match fields:
        case [int(version), str(name), int(base), list(ends), bytes(metadata)] if version == CARD_VERSION:
            if name != peer:
                raise TransportError(f"the card of {peer} is of {name!r}")
            ascending = all(isinstance(end, int) for end in ends) and [0, *ends] == sorted({0, *ends})
            if not ascending or base <= 0 or (ends and base + ends[-1] >= 1 << 64):
                raise TransportError(f"the card of {peer} has ranges {ends[:4]!r} at base {base}, which cannot be")
            return base, _Ranges(ends), metadata
    raise TransportError(f"the card of {peer} is not a NIXL card of version {CARD_VERSION}")
