"""READs over ZMQ frames, where there is no NIXL. Not one-sided: the holder's loop sends the bytes.

Owns the ROUTER that serves this arena, and the peers. It must never raise, stop, or hold memory without bound because
of what a peer sent.

    reader to holder: [[version, holder's name, ticket, offset, nbytes]]
    holder to reader: [[ticket], bytes]  or  [[ticket, reason of the refusal]]

The holder's name is in every request because another incarnation may have taken over its port. Bytes are copied out
of the arena when the answer is sent, so whoever checks afterwards that an entry did not change checks the right thing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from ctypes import c_char

import msgpack
import zmq

from ec_p2p.transport.checks import check_next_range, check_span, pack_card, unpack_card
from ec_p2p.transport.interface import Span, TransportError
from ec_p2p.transport.zmq_reading import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    WINDOW,
    Context,
    Peer,
    ZmqReading,
    cut,
    receive,
    set_options,
)
from ec_p2p.wire.curve import KEY_BYTES, Security, secure_server, why_not

logger = logging.getLogger(__name__)

_ENDPOINT = re.compile(r"tcp://[0-9A-Za-z.:_%\[\]-]{1,255}:\d{1,5}")
_MAX_REQUEST = 1 << 12
_TURN = 8
"""Requests served before the caller's loop gets its turn."""


class ZmqTransport:
    """See `Transport`.

    name: one that no other transport of the fleet has or had; peers know us by it. base, nbytes: the arena's mapping in
    this process, registered or not. bind_host, advertise_host: where the ROUTER listens, and what peers dial.
    Raises TransportError."""

    kind = "zmq"

    def __init__(
        self,
        name: str,
        base: int,
        nbytes: int,
        *,
        context: Context,
        bind_host: str,
        advertise_host: str,
        security: Security | None = None,
    ) -> None:
        self.name = name
        self.bad_frames = 0
        """Messages that made no sense; they were dropped."""
        self._context = context
        self._security = security
        self._nbytes = nbytes
        self._registered = 0
        self._arena = memoryview((c_char * nbytes).from_address(base)).cast("B")
        self._peers: dict[str, Peer] = {}
        self._poller = zmq.Poller()
        self._sockets: tuple[zmq.Socket[bytes], ...] = ()
        self._closed = False
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        # libzmq may count a queue as full when only half of it is in use.
        set_options(self._router, 4 * WINDOW, _MAX_REQUEST)
        secure_server(self._router, security)
        try:
            self._router.bind(f"tcp://{_bracketed(bind_host)}:*")
        except zmq.ZMQError as error:
            self._router.close(linger=0)
            raise TransportError(f"cannot listen on {bind_host!r}: {error}") from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._endpoint = f"tcp://{_bracketed(advertise_host)}:{port}"
        self._poller.register(self._router, zmq.POLLIN)
        self._list_sockets()

    def register(self, offset: int, nbytes: int) -> None:
        self._check_open()
        check_next_range(offset, nbytes, self._registered, self._nbytes)
        self._registered = offset + nbytes

    def card(self) -> bytes:
        key = [self._security.public] if self._security else []
        return pack_card(self.kind, PROTOCOL_VERSION, self.name, self._endpoint, self._registered, *key)

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        endpoint, registered, key = _parse(peer, card)
        if peer == self.name:
            raise TransportError(f"{peer} is this transport itself")
        refusal = why_not(self._security, key)
        if refusal:
            raise TransportError(f"cannot read from {peer}: {refusal}")
        known = self._peers.get(peer)
        if known is not None and (known.endpoint, known.key) != (endpoint, key):
            self.forget(peer)
            known = None
        if known is None:
            try:
                known = Peer(self._context, peer, endpoint, self._security, key, self._arena, self._on_bad_frame)
            except zmq.ZMQError as error:
                raise TransportError(f"cannot dial {peer} at {endpoint}: {error}") from error
            self._peers[peer] = known
            self._poller.register(known.socket, zmq.POLLIN)
            self._poller.register(known.monitor, zmq.POLLIN)
            self._list_sockets()
        known.registered = registered

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._poller.unregister(known.socket)
            self._poller.unregister(known.monitor)
            known.close("it was forgotten")
            self._list_sockets()

    def read(self, peer: str, spans: Sequence[Span]) -> ZmqReading:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"unknown peer {peer}")
        if not spans:
            raise TransportError(f"a READ from {peer} without a span")
        for remote, local, nbytes in spans:
            check_span(f"peer {peer}", remote, nbytes, known.registered)
            check_span("our arena", local, nbytes, self._registered)
        if known.lost:
            known.progress()
        if known.lost:
            raise TransportError(f"READ from {peer}: {known.lost}")
        reading = ZmqReading(known, cut(spans))
        known.post(reading)
        return reading

    def progress(self) -> None:
        if self._closed:
            return
        ready = dict(self._poller.poll(0))
        now = time.monotonic()
        if self._router in ready:
            self._serve()
        for peer in self._peers.values():
            if peer.socket in ready or peer.monitor in ready:
                peer.progress()
            peer.look(now)

    def sockets(self) -> Sequence[object]:
        return self._sockets

    def close(self) -> None:
        if self._closed:
            return
        for peer in list(self._peers):
            self.forget(peer)
        self._router.close(linger=0)
        self._sockets = ()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def _on_bad_frame(self) -> None:
        self.bad_frames += 1

    def _list_sockets(self) -> None:
        dialled = (socket for peer in self._peers.values() for socket in (peer.socket, peer.monitor))
        self._sockets = (self._router, *dialled)

    def _serve(self) -> None:
        for _ in range(_TURN):
            frames = receive(self._router, 2)
            if frames is None:
                return
            reader = frames[0].bytes
            request = _request(frames[1]) if len(frames) == 2 else None
            if request is None:
                self._on_bad_frame()
                continue
            name, ticket, offset, nbytes = request
            # A reader that does not take its answers loses them, and nobody else anything: the ROUTER drops them.
            if name != self.name:
                self._refuse(reader, ticket, f"this is {self.name}")
            elif nbytes > CHUNK_BYTES:
                self._refuse(reader, ticket, f"{nbytes} bytes at once; accepted: up to {CHUNK_BYTES}")
            else:
                try:
                    check_span("holder", offset, nbytes, self._registered)
                except TransportError as error:
                    self._refuse(reader, ticket, str(error))
                else:
                    self._send([reader, msgpack.packb([ticket]), self._arena[offset : offset + nbytes]])

    def _refuse(self, reader: bytes, ticket: int, reason: str) -> None:
        self._send([reader, msgpack.packb([ticket, reason])])

    def _send(self, frames: list[bytes | memoryview]) -> None:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an answer was not sent: %s", error)


def _request(frame: zmq.Frame) -> tuple[str, int, int, int] | None:
    """Name of the holder that is meant, ticket, offset, bytes; None if it is anything else."""
    try:
        fields = msgpack.unpackb(frame.buffer, max_array_len=8, max_map_len=0, max_ext_len=0)
    except Exception:  # whatever the decoder makes of hostile bytes
        return None
    match fields:
        case [int(version), str(name), int(ticket), int(offset), int(nbytes)] if version == PROTOCOL_VERSION:
            return name, ticket, offset, nbytes
    return None


def _parse(peer: str, card: bytes) -> tuple[str, int, bytes]:
    """Endpoint, registered bytes, and the public key that answers there: empty where none is needed."""
    match unpack_card(card, ZmqTransport.kind, PROTOCOL_VERSION, peer):
        case [str(endpoint), int(registered), *rest] if _ENDPOINT.fullmatch(endpoint) and 0 <= registered < 1 << 62:
            match rest:
                case []:
                    return endpoint, registered, b""
                case [bytes(key)] if len(key) == KEY_BYTES:
                    return endpoint, registered, key
    raise TransportError(f"the card of {peer} has no endpoint, size and key that could be true")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
