"""NIXL, over UCX unless told otherwise: one-sided READs between two arenas.

Owns the process's one NIXL agent, what is registered with it, and its connections. It must never drop a connection
while a READ may still write into landing memory: such a READ is reported as an error, and yet writes on as soon as a
peer that was stopped wakes up. So a forgotten peer stays connected until its READs have ended by themselves.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import time
from collections.abc import Sequence
from ctypes import addressof, c_char
from itertools import pairwise
from types import ModuleType
from typing import Any

from ec_p2p.transport import NIXL_PACKAGES
from ec_p2p.transport.checks import check_next_range, check_span, pack_card, unpack_card
from ec_p2p.transport.interconnect import Interconnect, make_backend, said, set_environment
from ec_p2p.transport.interface import Span, State, TransportError
from ec_p2p.transport.nixl_reading import Ground, NixlReading, Peer, Stretches, cut

logger = logging.getLogger(__name__)

CARD_VERSION = 1

_PROGRESS_DELAY_US = 100_000
"""The library's thread sleeps until something happens, but looks for itself this often."""
_CLOSE_S = 1.0
_GREETING_BYTES = 64


def _import_nixl() -> ModuleType:
    refusals = []
    for package in NIXL_PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            refusals.append(f"{package}: {error}")
    raise TransportError(f"NIXL cannot be imported ({'; '.join(refusals)})")


class Agent:
    """The library's agent and its handles. Methods raise whatever the library does, unless they end something.

    Uses the binding layer: a small READ costs a third less than through the wrapper above it, the delay of the progress
    thread can be chosen (the wrapper's makes it spin), and a handle is released when we say so, not when it happens to
    be collected."""

    def __init__(self, name: str, interconnect: Interconnect) -> None:
        bind = _import_nixl().nixlBind
        config = bind.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        self._bind = bind
        self._success = bind.NIXL_SUCCESS
        self._handles: set[int] = set()
        self._nixl: Any = bind.nixlAgent(name, config)
        make_backend(self._nixl, interconnect)

    def register(self, address: int, nbytes: int, kind: str = "DRAM", device: int = 0) -> None:
        """`kind` and `device`: see Ground."""
        self._nixl.registerMem(self._bind.nixlRegDList(self._segment(kind), [(address, nbytes, device, "")]), [])

    def metadata(self) -> bytes:
        metadata: bytes = self._nixl.getLocalMD()
        return metadata

    def load(self, metadata: bytes) -> str:
        """Learn of a peer, or of more of its memory. Returns its name."""
        name: bytes = self._nixl.loadRemoteMD(metadata)
        return name.decode(errors="replace")

    def drop(self, peer: str) -> None:
        """Disconnect from a peer. It may be gone already: the library drops a peer of which a READ fails."""
        try:
            self._nixl.invalidateRemoteMD(peer)
        except Exception as error:
            logger.debug("dropping %s: %s", peer, said(error))

    def post(self, peer: str, local: Stretches, remote: Stretches, kind: str) -> int | None:
        """Start a READ into memory of this kind. Returns its handle, or None when it is done already."""
        bind, nixl = self._bind, self._nixl
        here, there = bind.nixlXferDList(self._segment(kind), local), bind.nixlXferDList(bind.DRAM_SEG, remote)
        handle: int = nixl.createXferReq(bind.NIXL_READ, here, there, peer)
        try:
            done = nixl.postXferReq(handle) == self._success
        except Exception:
            nixl.releaseXferReq(handle)
            raise
        if done:
            nixl.releaseXferReq(handle)
            return None
        self._handles.add(handle)
        return handle

    def ended(self, handle: int) -> bool:
        """Whether the READ is done. Its handle is then gone, as it is after an error."""
        if handle not in self._handles:
            raise TransportError("the transport was closed")
        try:
            if self._nixl.getXferStatus(handle) != self._success:
                return False
        except Exception:
            self._release(handle)
            raise
        self._release(handle)
        return True

    def _segment(self, kind: str) -> Any:
        return self._bind.DRAM_SEG if kind == "DRAM" else self._bind.VRAM_SEG

    def _release(self, handle: int) -> None:
        self._handles.remove(handle)
        self._nixl.releaseXferReq(handle)

    def drain_notifications(self) -> None:
        """We send none; a peer that does must not fill our memory with them."""
        try:
            self._nixl.getNotifs({}, [])
        except Exception as error:
            logger.warning("NIXL gives no notifications: %s", said(error))

    def close(self) -> None:
        """Give READs in flight a moment, then end the agent: without it nothing writes any more."""
        give_up_at = time.monotonic() + _CLOSE_S
        while self._handles and time.monotonic() < give_up_at:
            for handle in list(self._handles):
                try:
                    self.ended(handle)
                except Exception as error:
                    logger.debug("a READ ended while closing: %s", said(error))
            time.sleep(0.001)
        self._handles.clear()
        self._nixl = None


class NixlTransport:
    """See `Transport`. UCX wants one per process at a time.

    name: one that no other transport of the fleet has or had; peers know us by it. base, nbytes: the arena's mapping in
    this process, registered or not. bind_host: if it is a loopback address, only peers on this host can connect; the
    network interface cannot be chosen otherwise, but with UCX_NET_DEVICES. interconnect: what the bytes go over; its
    ucx_tls becomes UCX_TLS of this process. Raises TransportError."""

    kind = "nixl"
    bad_frames = 0  # the library hears peers itself

    def __init__(
        self, name: str, base: int, nbytes: int, *, bind_host: str = "", interconnect: Interconnect | None = None
    ) -> None:
        self.name = name
        self._base = base
        self._nbytes = nbytes
        self._ends: list[int] = []
        self._arena = Ground(base, self._ends)
        self._beyond: Ground | None = None
        self._peers: dict[str, Peer] = {}
        self._greetings: list[NixlReading] = []
        self._card: bytes | None = None
        self._closed = False
        # Every agent has a page that peers read to set the connection up: the arena may not be registered yet.
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._greeting = addressof(c_char.from_buffer(self._page))
        chosen = interconnect or Interconnect()
        set_environment(bind_host, chosen.ucx_tls)
        try:
            self._agent = Agent(name, chosen)
            self._agent.register(self._greeting, _GREETING_BYTES)
        except TransportError:
            raise
        except Exception as error:  # the library's errors share no base class
            raise TransportError(f"cannot make a NIXL agent with backend {chosen.backend}: {said(error)}") from error

    @property
    def _registered(self) -> int:
        return self._ends[-1] if self._ends else 0

    def register(self, offset: int, nbytes: int) -> None:
        self._check_open()
        check_next_range(offset, nbytes, self._registered, self._nbytes)
        try:
            self._agent.register(self._base + offset, nbytes)
        except Exception as error:
            raise TransportError(f"cannot register {nbytes} bytes at offset {offset}: {said(error)}") from error
        self._ends.append(offset + nbytes)
        self._card = None

    def register_beyond(self, address: int, nbytes: int, kind: str, device: int) -> None:
        """Make other memory landing memory, once: as local bytes [arena, arena+nbytes), where `arena` is the arena's
        size. Peers do not read it. kind, device: see Ground. Raises TransportError."""
        self._check_open()
        try:
            self._agent.register(address, nbytes, kind, device)
        except Exception as error:
            raise TransportError(
                f"cannot register {nbytes} bytes of {kind} memory, device {device}: {said(error)}"
            ) from error
        self._beyond = Ground(address - self._nbytes, [self._nbytes + nbytes], kind, device)

    def card(self) -> bytes:
        if self._card is None:
            self._check_open()
            fields = (self._base, self._ends, self._greeting, self._agent.metadata())
            self._card = pack_card(self.kind, CARD_VERSION, self.name, *fields)
        return self._card

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        base, ends, greeting, metadata = _parse(peer, card)
        if peer == self.name:
            raise TransportError(f"{peer} is this transport itself")
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = Peer(self._agent, peer)
        elif known.metadata == metadata and not known.broken:
            known.forgotten = False
            return
        known.forgotten = False
        known.base, known.ends, known.greeting, known.metadata = base, ends, greeting, metadata
        if known.broken:
            self._reconnect(known)
        else:
            self._load(known)

    def forget(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is not None:
            known.forgotten = True
            self._drop_forgotten()

    def read(self, peer: str, spans: Sequence[Span]) -> NixlReading:
        """See `Transport`; one READ is into the arena, or all of it into what was registered beyond."""
        known = self._peers.get(peer)
        if known is None or known.forgotten:
            raise TransportError(f"unknown peer {peer}")
        if not spans:
            raise TransportError(f"a READ from {peer} without a span")
        ground, start, room, whose = self._arena, 0, self._registered, "our arena"
        if self._beyond is not None and spans[0].local >= self._nbytes:
            ground, start, whose = self._beyond, self._nbytes, "beyond our arena"
            room = ground.ends[-1] - start
        for remote, local, nbytes in spans:
            check_span(f"peer {peer}", remote, nbytes, known.registered)
            check_span(whose, local - start, nbytes, room)
        if known.broken:
            self._reconnect(known)
        reading = NixlReading(known, cut(spans, ground, Ground(known.base, known.ends)), ground.kind)
        if reading.poll() is State.FAILED:
            raise TransportError(reading.error)
        return reading

    def progress(self) -> None:
        """Only tidies up: the library's own thread answers peers, as soon as they ask."""
        if self._closed:
            return
        self._agent.drain_notifications()
        self._greetings = [greeting for greeting in self._greetings if greeting.poll() is State.POSTED]
        self._drop_forgotten()

    def sockets(self) -> Sequence[object]:
        return ()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._agent.close()
            self._peers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def _load(self, peer: Peer) -> None:
        try:
            named = self._agent.load(peer.metadata)
            if named != peer.name:
                self._agent.drop(named)
                raise TransportError(f"its metadata is of {named!r}")
        except Exception as error:
            peer.broken = True
            raise TransportError(f"cannot connect to {peer.name}: {said(error)}") from error
        peer.broken = False
        # The library connects with the first READ only, which takes milliseconds, or more where a wire is involved.
        page = Span(0, 0, _GREETING_BYTES)
        ends = [_GREETING_BYTES]
        pieces = cut((page,), Ground(self._greeting, ends), Ground(peer.greeting, ends))
        self._greetings.append(NixlReading(peer, pieces, "DRAM"))
        self._greetings[-1].poll()

    def _reconnect(self, peer: Peer) -> None:
        if not peer.may_reconnect(time.monotonic()):
            raise TransportError(f"the connection to {peer.name} is broken")
        self._agent.drop(peer.name)
        self._load(peer)

    def _drop_forgotten(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.forgotten and not peer.in_flight]:
            del self._peers[peer.name]
            self._agent.drop(peer.name)


def _parse(peer: str, card: bytes) -> tuple[int, list[int], int, bytes]:
    """Address of the arena, ends of its ranges, address of the greeting page, the agent's metadata."""
    match unpack_card(card, NixlTransport.kind, CARD_VERSION, peer):
        case [int(base), list(ends), int(greeting), bytes(metadata)]:
            rising = all(isinstance(end, int) for end in ends) and all(a < b for a, b in pairwise([0, *ends]))
            if rising and 0 < base < 1 << 63 and 0 < greeting < 1 << 63 and (not ends or ends[-1] < 1 << 62):
                return base, ends, greeting, metadata
    raise TransportError(f"the card of {peer} has no address, ranges and metadata that could be true")
