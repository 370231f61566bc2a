"""The local copy of one directory, over sockets.

Owns a SUB socket for the changes and a DEALER socket for snapshots. Must never block, nor forget what it knows because
the directory is silent: the copy is soft, and what it says is validated when it is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.follower import Follower
from ec_p2p.control.interface import Pollable
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    TOPIC,
    Advert,
    Events,
    FromDirectory,
    InstanceInfo,
    NodeInfo,
    Refused,
    SnapshotChunk,
    SnapshotRequest,
    Welcome,
)
from ec_p2p.control.security import Security, secure_client
from ec_p2p.control.sockets import Context, Socket, open_socket, receive_now, send_now, split_endpoint
from ec_p2p.control.table import Table
from ec_p2p.wire.dialling import Line

log = logging.getLogger(__name__)

_BYTES_PER_TURN = 256 << 10
_CHUNKS_WAITING = 16
_BLOCKED_RETRY_S = 0.1
_REFUSED_RETRY_S = 10.0


class Replica:
    """Driven by the loop of the thread that made it: poll `sockets` for input and call `on_readable` with each that
    has some; call `tick` after every turn, and again no later than it says. Times are `time.monotonic()`.

    `on_change(identity)` is called for every advert that appeared, changed or went, `on_node(node, up)` for every node
    that appeared, moved or went; from inside `on_readable` and `tick`, after the change. Raises ValueError for an
    endpoint that is not TCP.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        on_change: Callable[[bytes], None] = lambda identity: None,
        on_node: Callable[[NodeInfo, bool], None] = lambda node, up: None,
        node_timeout_s: float = 4.0,
        security: Security | None = None,
    ) -> None:
        self._host, _ = split_endpoint(endpoint)
        self.endpoint = endpoint
        self._table = Table(on_change, on_node)
        self._follower = Follower(self._table, node_timeout_s)
        self._bad_frames = 0
        self._pub_endpoint = ""
        self._refused = ""
        self._was_fresh = False
        self._node_timeout_s = node_timeout_s
        self._dealer = open_socket(context, zmq.DEALER, endpoint, receive_hwm=_CHUNKS_WAITING)
        self._sub = open_socket(context, zmq.SUB, endpoint)
        # What came before a connection ended is read all the same: the last words of a directory that leaves, too.
        self._sub.setsockopt(zmq.IMMEDIATE, 0)
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        for socket in self.sockets:
            secure_client(socket, security, security.directory if security else b"")
        self._line = Line(self._dealer, endpoint)
        self._subscription: Line | None = None
        self._publisher_heard = 0.0

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """The same ones for the replica's whole life."""
        return (self._dealer, self._sub)

    @property
    def fresh(self) -> bool:
        """The copy was equal to what the directory published, not longer than `node_timeout_s` ago."""
        return self._follower.fresh(time.monotonic())

    @property
    def position(self) -> tuple[bytes, int] | None:
        """Epoch and sequence number of the directory that the copy stands at; None while a snapshot is wanted."""
        return self._follower.position

    @property
    def counters(self) -> dict[str, int]:
        return {**self._follower.counters, "bad_frames": self._bad_frames}

    def __len__(self) -> int:
        """Adverts known."""
        return len(self._table)

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        """Who holds the entry, this host's own node included."""
        return self._table.lookup(identity)

    def nodes(self) -> list[NodeInfo]:
        return self._table.nodes()

    def instances(self, incarnation: bytes) -> list[InstanceInfo]:
        """The vLLM engines at a node."""
        return self._table.instances(incarnation)

    def held_by(self, incarnation: bytes) -> list[Advert]:
        """What a node advertises."""
        return self._table.adverts(incarnation)

    @property
    def settled(self) -> bool:
        return self._follower.settled(time.monotonic())

    def doubts(self, incarnation: bytes) -> bool:
        """Whether not all that is known of a node was said again since the directory, or the node, began anew."""
        return self._follower.doubts(incarnation)

    def identities(self) -> list[bytes]:
        """Every entry that somebody holds."""
        return self._table.identities()

    def close(self) -> None:
        self._dealer.close()
        self._sub.close()

    def on_readable(self, socket: Pollable) -> None:
        """Handle what came in, a bounded amount."""
        receiver, handle = (
            (self._dealer, self._on_answer) if socket is self._dealer else (self._sub, self._on_publication)
        )
        nbytes = 0
        while nbytes < _BYTES_PER_TURN:
            frames = receive_now(receiver)
            if frames is None:
                return
            nbytes += 64 + sum(map(len, frames))
            try:
                handle(frames, time.monotonic())
            except BadFrame as error:
                self._bad_frames += 1
                log.debug("dropped a frame from %s: %r", self.endpoint, error.reason)

    def tick(self, now: float) -> float:
        """Ask for what is missing. Returns the seconds until the next call is wanted."""
        follower = self._follower
        follower.tick(now)
        if follower.wants_snapshot(now):
            writable = bool(self._dealer.poll(0, zmq.POLLOUT))
            self._line.look(now, writable)
            if writable:
                send_now(self._dealer, encode(SnapshotRequest(PROTOCOL_VERSION, follower.request(now))))
            else:
                follower.postpone(now + _BLOCKED_RETRY_S)
        if self._subscription:
            self._subscription.look(now, up=now - self._publisher_heard <= self._node_timeout_s)
        fresh = follower.fresh(now)
        if fresh != self._was_fresh:
            log.info("directory %s %s", self.endpoint, "is being followed" if fresh else "is lost; its view is kept")
            self._was_fresh = fresh
        return max(0.0, follower.next_event() - now)

    def _on_answer(self, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 1:
                raise BadFrame(f"{len(frames)} frames in one message, accepted: 1")
            message: FromDirectory = decode(frames[0], FromDirectory)
        except BadFrame:
            self._follower.spoil(now)
            raise
        if isinstance(message, SnapshotChunk):
            self._follower.take_chunk(message, now)
        elif isinstance(message, Welcome) and message.version == PROTOCOL_VERSION:
            self._refused = ""
            self._subscribe_at(f"{self._host}:{message.pub_port}")
        elif isinstance(message, Welcome | Refused):
            reason = message.reason if isinstance(message, Refused) else f"it speaks version {message.version}"
            if reason != self._refused:
                log.error("directory %s refuses this replica: %r", self.endpoint, reason)
            self._refused = reason
            self._follower.postpone(now + _REFUSED_RETRY_S)

    def _on_publication(self, frames: list[bytes], now: float) -> None:
        self._publisher_heard = now
        if len(frames) != 3 or frames[0] != TOPIC or len(frames[1]) != 8:
            raise BadFrame("not (topic, 8 bytes of sequence number, payload)")
        message: Events = decode(frames[2], Events)
        if message.version != PROTOCOL_VERSION:
            raise BadFrame(f"a publication in version {message.version}, accepted: {PROTOCOL_VERSION}")
        self._follower.take_events(int.from_bytes(frames[1], "big"), message, len(frames[2]), now)

    def _subscribe_at(self, pub_endpoint: str) -> None:
        if pub_endpoint == self._pub_endpoint:
            return
        if self._pub_endpoint:
            with suppress(zmq.ZMQError):  # ENOENT: ZMQ has given it up itself
                self._sub.disconnect(self._pub_endpoint)
        self._subscription = Line(self._sub, pub_endpoint)
        self._pub_endpoint = pub_endpoint
