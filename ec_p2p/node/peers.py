"""The other nodes, as far as reading from them goes.

Owns the ROUTER that hands out this node's card and takes stage requests, one DEALER per known peer, and the state of
each connection. It must never decide what to read or to stage. Peers are learned from the directory only, and
connected to as soon as they appear there: first contact costs tens of milliseconds and would otherwise be paid by a
request.

    (none) --node up--> ASKING, or, where it cannot be dialled or its keys do not fit ours, UNUSABLE
    ASKING --card--> READY --advert beyond what the card covers--> ASKING (and still readable below)
    ASKING --the first card is of another transport, or refused, or does not connect--> UNUSABLE
    UNUSABLE --refused, did not connect: asked again every second, card--> READY
    UNUSABLE --no socket was left here: dialled again every second, and asked--> as above
    any --node down--> (gone)

Nobody waits for what is UNUSABLE, so it has to be known as such: of a node that is not known it may be that the
directory is about to tell of it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from typing import Any

import zmq

from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Advert,
    Card,
    CardRequest,
    FromPeer,
    NodeInfo,
    Refused,
    StageAnswer,
    StageRequest,
    ToPeer,
)
from ec_p2p.control.security import Security, secure_client, secure_server
from ec_p2p.control.sockets import bound_port, open_socket, send_now
from ec_p2p.engine.generation import RECORD_BYTES
from ec_p2p.transport.interface import Transport, TransportError
from ec_p2p.wire.curve import why_not
from ec_p2p.wire.dialling import Line

logger = logging.getLogger(__name__)

_NOW, _NEVER = float("-inf"), float("inf")
_ASK_AGAIN_S = 1.0
"""After a request that was not answered, or by a card that tells of no more than the one before; or where there was no
socket for it."""
_NO_SOCKET_LEFT = (errno.EMFILE, errno.ENFILE)


class PeerState(Enum):
    ASKING = "asking"
    READY = "ready"
    UNUSABLE = "unusable"


class Peer:
    """One other node's incarnation."""

    __slots__ = ("ask_at", "blob", "complained", "info", "key", "line", "registered", "revision", "socket", "state")

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.key = info.incarnation.hex()
        self.socket: zmq.Socket[bytes] | None = None
        self.line: Line | None = None
        """Like the socket: None where it cannot be dialled, or could not until now."""
        self.state = PeerState.ASKING
        self.ask_at = _NOW
        """When it may be asked for its card, and dialled for that."""
        self.revision = 0
        self.registered = 0
        self.blob = b""
        """Its transport's card."""
        self.complained = False
        """Of not getting on with it, since that was last possible."""

    def covers(self, advert: Advert) -> bool:
        """Whether its card tells how to read this entry of its arena, and the record."""
        return max(advert.offset + advert.nbytes, advert.record + RECORD_BYTES) <= self.registered


class Peers:
    """All peers of one node, and the port on which they ask this node for its card. Used by the node's loop only.

    `on_ready(peer)` is called when a peer's card has been taken in, or cannot be, `on_asked(route, request)` when a
    peer wants entries staged, and `on_staged(incarnation, answer)` when a peer has answered such a request of this
    node.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        transport: Transport,
        incarnation: bytes,
        bind_host: str,
        port: int,
        card: Callable[[], Card],
        on_ready: Callable[[Peer], None],
        on_asked: Callable[[bytes, StageRequest], None],
        on_staged: Callable[[bytes, StageAnswer], None],
        on_bad_frame: Callable[[str, BadFrame], None],
        *,
        security: Security | None = None,
    ) -> None:
        self._context = context
        self._security = security
        self._transport = transport
        self._incarnation = incarnation
        self._card = card
        self._on_ready = on_ready
        self._on_asked = on_asked
        self._on_staged = on_staged
        self._on_bad_frame = on_bad_frame
        self._peers: dict[bytes, Peer] = {}
        self._by_socket: dict[zmq.Socket[bytes], Peer] = {}
        self._router = open_socket(context, zmq.ROUTER, f"tcp://{bind_host}")
        secure_server(self._router, security)
        try:
            self._router.bind(f"tcp://{bind_host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._router.close()
            told = f"peer_port={port} cannot be bound at {bind_host} ({error.strerror})"
            raise OSError(error.errno, f"{told}; accepted: a free port, or 0 for any") from None
        self.port = bound_port(self._router)

    def get(self, incarnation: bytes) -> Peer | None:
        return self._peers.get(incarnation)

    def names(self) -> list[str]:
        return sorted(peer.info.name for peer in self._peers.values())

    def ready_count(self) -> int:
        # A copy: the thread that serves /metrics asks too.
        return sum(peer.state is PeerState.READY for peer in list(self._peers.values()))

    def up(self, info: NodeInfo, now: float) -> None:
        """A node appeared in the directory."""
        if info.incarnation == self._incarnation:
            return
        known = self._peers.get(info.incarnation)
        if known is not None:
            if known.info == info:
                return
            self.down(info.incarnation)
        peer = self._peers[info.incarnation] = Peer(info)
        if self._dial(peer, now):
            self.ask(peer, now)

    def down(self, incarnation: bytes) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        if peer.socket is not None:
            del self._by_socket[peer.socket]
            peer.socket.close()
        self._transport.forget(peer.key)

    def ask(self, peer: Peer, now: float) -> None:
        """Ask for the card, unless that was done a moment ago."""
        if peer.state is PeerState.READY:
            peer.state = PeerState.ASKING  # so that `tick` asks where this is too early
        if now < peer.ask_at:
            return
        if peer.socket is None:
            self._dial(peer, now)
        if peer.socket is None or peer.line is None:
            return
        # False until the connection stands: `tick` tries again.
        sent = send_now(peer.socket, encode(CardRequest(PROTOCOL_VERSION, self._incarnation)))
        peer.line.look(now, up=sent)
        if sent:
            peer.ask_at = now + _ASK_AGAIN_S

    def stage(self, peer: Peer, identity: bytes) -> bool:
        """Ask a peer to bring an entry into its arena. False: it cannot be asked now."""
        request = StageRequest(PROTOCOL_VERSION, [identity])
        return peer.socket is not None and send_now(peer.socket, encode(request))

    def answer(self, route: bytes, message: Card | Refused | StageAnswer) -> None:
        """Answer whoever asked by `route`. Where it is lost, the peer asks again or goes elsewhere."""
        send_now(self._router, route, encode(message))

    def tick(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if peer.state is not PeerState.READY:
                self.ask(peer, now)

    def poll_targets(self) -> list[Any]:
        return [self._router, *self._by_socket]

    def on_ready(self, target: zmq.Socket[bytes]) -> None:
        if target is self._router:
            self._answer()
        elif target in self._by_socket:
            self._learn(self._by_socket[target], target)

    def close(self) -> None:
        for incarnation in list(self._peers):
            self.down(incarnation)
        self._router.close()

    # -------------------------------------------------------- inside

    def _dial(self, peer: Peer, now: float) -> bool:
        """Connect to it. False: it is not to be used, as it says for good; without a socket left here, until later."""
        info = peer.info
        peer.ask_at = _NEVER
        refusal = why_not(self._security, info.key)
        if refusal:
            self._cannot_use(peer, f"node {info.name!r} at {info.address} is not connected to: {refusal}")
            return False
        try:
            with ExitStack() as undo:
                socket = open_socket(self._context, zmq.DEALER, info.address)
                undo.callback(socket.close)
                secure_client(socket, self._security, info.key)
                peer.line = Line(socket, info.address)
                undo.pop_all()
        except zmq.ZMQError as error:
            if error.errno in _NO_SOCKET_LEFT:
                peer.ask_at = now + _ASK_AGAIN_S
                self._cannot_use(peer, f"node {info.name} is not connected to yet, there is no socket for it: {error}")
            else:
                what = f"node {info.name} advertises {info.address!r}, which cannot be dialled"
                self._cannot_use(peer, f"{what}: {error}")
            return False
        peer.ask_at = _NOW
        peer.socket = socket
        self._by_socket[socket] = peer
        return True

    def _answer(self) -> None:
        for _ in range(64):
            try:
                frames = self._router.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise BadFrame(f"{len(frames)} frames in one message, accepted: 2")
                message: ToPeer = decode(frames[1], ToPeer)
            except BadFrame as error:
                self._on_bad_frame("peer", error)
                continue
            if message.version != PROTOCOL_VERSION:
                reason = f"peer speaks version {message.version}, this node speaks {PROTOCOL_VERSION}"
                self.answer(frames[0], Refused(reason))
            elif isinstance(message, CardRequest):
                self.answer(frames[0], self._card())
            else:
                self._on_asked(frames[0], message)

    def _learn(self, peer: Peer, socket: zmq.Socket[bytes]) -> None:
        for _ in range(64):
            try:
                frame = socket.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer: FromPeer = decode(frame, FromPeer)
            except BadFrame as error:
                self._on_bad_frame("peer", error)
                continue
            if isinstance(answer, Card):
                self._take_in(peer, answer)
            elif isinstance(answer, StageAnswer):
                self._on_staged(peer.info.incarnation, answer)
            else:
                self._cannot_use(peer, f"node {peer.info.name} refused: {answer.reason}")

    def _take_in(self, peer: Peer, card: Card) -> None:
        if card.version != PROTOCOL_VERSION or card.incarnation != peer.info.incarnation:
            return  # somebody else answers at that address by now; the directory will say so
        if card.transport != self._transport.kind:
            peer.ask_at = _NEVER
            kinds = f"uses transport {card.transport}, this node uses {self._transport.kind}"
            self._cannot_use(peer, f"node {peer.info.name} {kinds}: nothing can be read from it")
            return
        if card.revision < peer.revision:
            return
        try:
            self._transport.connect(peer.key, card.blob)
        except TransportError as error:
            self._cannot_use(peer, f"cannot connect to node {peer.info.name}: {error}")
            return
        peer.complained = False
        if card.registered > peer.registered:
            peer.ask_at = _NOW  # its arena grows, and may have grown again
        peer.revision, peer.registered, peer.blob = card.revision, card.registered, card.blob
        peer.state = PeerState.READY
        self._on_ready(peer)

    def _cannot_use(self, peer: Peer, why: str) -> None:
        """Say so, once: the peer may be asked again every second. What could be read until now still can."""
        logger.log(logging.DEBUG if peer.complained else logging.WARNING, "%s", why)
        peer.complained = True
        if not peer.registered:
            peer.state = PeerState.UNUSABLE
            self._on_ready(peer)
