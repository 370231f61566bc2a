"""The local copy of one directory: a snapshot, then every change, and a snapshot again whenever one may be missing.

Owns a SUB socket for the changes and a DEALER socket for snapshots. Must never block, nor forget what it knows because
the directory is silent: the copy is soft, and what it says is validated when it is used.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    TOPIC,
    Advert,
    Changed,
    Event,
    Events,
    FromDirectory,
    NodeInfo,
    NodeUp,
    Refused,
    SnapshotChunk,
    SnapshotRequest,
    Welcome,
)
from ec_p2p.control.sockets import Context, Socket, open_socket, receive_now, send_now, split_endpoint
from ec_p2p.control.table import Table

log = logging.getLogger(__name__)

_BYTES_PER_TURN = 256 << 10
_KEPT_BYTES = 64 << 20
_BLOCKED_RETRY_S = 0.1
_ANSWER_S = 1.0
_AGAIN_S = 0.05
_LONGEST_WAIT_S = 10.0


@dataclass(slots=True)
class _Snapshot:
    """One being received. Its adverts go into the table as they come; what it did not name leaves at its end."""

    token: int
    index: int = 0
    epoch: bytes = b""
    seq: int = 0
    seen: dict[bytes, set[bytes]] = field(default_factory=dict)


class _Kept:
    """Events that came while the copy was not in sync: all those of `epoch` after seq `after`, without a gap."""

    def __init__(self) -> None:
        self.restart(b"", 0)

    def restart(self, epoch: bytes, after: int) -> None:
        self.epoch = epoch
        self.after = after
        self.batches: list[list[Event]] = []
        self.nbytes = 0

    def add(self, seq: int, message: Events, nbytes: int) -> None:
        before = seq - 1 if message.events else seq
        end = self.after + len(self.batches)
        if message.epoch != self.epoch or before > end or self.nbytes + nbytes > _KEPT_BYTES:
            self.restart(message.epoch, before)
            end = before
        if message.events and seq == end + 1:
            self.batches.append(message.events)
            self.nbytes += nbytes


class Replica:
    """Driven by the loop of the thread that made it: poll `sockets` for input and call `on_readable` with each that
    has some; call `tick` after every turn, and again no later than it says. Times are `time.monotonic()`.

    `on_change(identity)` is called for every advert that appeared, changed or went, `on_node(node, up)` for every node;
    from inside `on_readable` and `tick`, after the change. Raises ValueError for an endpoint that is not TCP.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        on_change: Callable[[bytes], None] = lambda identity: None,
        on_node: Callable[[NodeInfo, bool], None] = lambda node, up: None,
        node_timeout_s: float = 4.0,
    ) -> None:
        self._host, _ = split_endpoint(endpoint)
        self.endpoint = endpoint
        self.counters = dict.fromkeys(("snapshots", "requests", "events", "gaps", "silences", "bad_frames"), 0)
        self._table = Table(on_change, on_node)
        self._timeout_s = node_timeout_s
        self._epoch = b""
        self._seq = 0
        self._synced = False
        self._snapshot: _Snapshot | None = None
        self._kept = _Kept()
        self._token = random.getrandbits(32)
        self._attempts = 0
        self._next_request = 0.0
        self._heard = 0.0
        self._in_sync_at = float("-inf")
        self._unconfirmed: dict[bytes, float] = {}
        self._pub_endpoint = ""
        self._dealer = open_socket(context, zmq.DEALER, endpoint)
        self._sub = open_socket(context, zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._dealer.connect(endpoint)

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """The same ones for the replica's whole life."""
        return (self._dealer, self._sub)

    @property
    def fresh(self) -> bool:
        """The copy was equal to what the directory published, not longer than `node_timeout_s` ago."""
        return time.monotonic() - self._in_sync_at <= self._timeout_s

    def __len__(self) -> int:
        """Adverts known."""
        return len(self._table)

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        """Who holds the entry, this host's own node included."""
        return self._table.lookup(identity)

    def nodes(self) -> list[NodeInfo]:
        return self._table.nodes()

    def identities(self) -> list[bytes]:
        """Every entry that somebody holds."""
        return self._table.identities()

    def close(self) -> None:
        self._dealer.close()
        self._sub.close()

    def on_readable(self, socket: Socket) -> None:
        """Handle what came in, a bounded amount."""
        handle = self._on_answer if socket is self._dealer else self._on_publication
        nbytes = 0
        while nbytes < _BYTES_PER_TURN:
            frames = receive_now(socket)
            if frames is None:
                return
            nbytes += 64 + sum(map(len, frames))
            try:
                handle(frames, time.monotonic())
            except BadFrame as error:
                self.counters["bad_frames"] += 1
                log.debug("dropped a frame from %s: %r", self.endpoint, error.reason)

    def tick(self, now: float) -> float:
        """Ask for what is missing. Returns the seconds until the next call is wanted."""
        if self._synced and now - self._heard > self._timeout_s:
            self.counters["silences"] += 1
            log.warning("directory %s is silent; going on with what is known", self.endpoint)
            self._lose_sync(now)
        for incarnation in [known for known, until in self._unconfirmed.items() if now >= until]:
            del self._unconfirmed[incarnation]
            self._table.drop_node(incarnation)
        if not self._synced and now >= self._next_request:
            self._request(now)
        due = [self._heard + self._timeout_s if self._synced else self._next_request, *self._unconfirmed.values()]
        return max(0.0, min(due) - now)

    # -------------------------------------------------------- snapshots

    def _request(self, now: float) -> None:
        self._token += 1
        if not send_now(self._dealer, encode(SnapshotRequest(PROTOCOL_VERSION, self._token))):
            self._next_request = now + _BLOCKED_RETRY_S
            return
        self.counters["requests"] += 1
        self._snapshot = _Snapshot(self._token)
        self._attempts += 1
        self._next_request = now + min(_ANSWER_S * 2**self._attempts, _LONGEST_WAIT_S)

    def _ask_again(self, now: float) -> None:
        """The snapshot under way is of no use: the first time at once, then less and less often."""
        self._snapshot = None
        self._next_request = now if self._attempts <= 1 else now + min(_AGAIN_S * 2**self._attempts, _LONGEST_WAIT_S)

    def _on_answer(self, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 1:
                raise BadFrame(f"{len(frames)} frames in one message, accepted: 1")
            message = decode(frames[0], FromDirectory)
        except BadFrame:
            if self._snapshot:
                self._ask_again(now)
            raise
        if isinstance(message, Refused):
            log.error("directory %s refuses this replica: %r", self.endpoint, message.reason)
            self._next_request = now + _LONGEST_WAIT_S
        elif isinstance(message, Welcome):
            self._subscribe_at(f"{self._host}:{message.pub_port}")
        elif isinstance(message, SnapshotChunk) and self._snapshot and message.token == self._snapshot.token:
            self._take_chunk(self._snapshot, message, now)

    def _subscribe_at(self, pub_endpoint: str) -> None:
        if pub_endpoint == self._pub_endpoint:
            return
        if self._pub_endpoint:
            self._sub.disconnect(self._pub_endpoint)
        self._sub.connect(pub_endpoint)
        self._pub_endpoint = pub_endpoint

    def _take_chunk(self, snapshot: _Snapshot, chunk: SnapshotChunk, now: float) -> None:
        if chunk.index == 0:
            snapshot.epoch, snapshot.seq = chunk.epoch, chunk.seq
        same = (chunk.index, chunk.epoch, chunk.seq) == (snapshot.index, snapshot.epoch, snapshot.seq)
        if not same or self._missed_after(snapshot):
            self._ask_again(now)
            return
        snapshot.index += 1
        self._next_request = now + _ANSWER_S
        for part in chunk.nodes:
            incarnation = part.node.incarnation
            self._table.put_node(part.node)
            self._table.change(incarnation, part.adverts, ())
            seen = snapshot.seen.setdefault(incarnation, set())
            seen.update([advert.identity for advert in part.adverts])
        if chunk.last:
            self._finish(snapshot, now)

    def _missed_after(self, snapshot: _Snapshot) -> bool:
        """Whether something was published after the snapshot that did not get here."""
        return self._kept.epoch == snapshot.epoch and self._kept.after > snapshot.seq

    def _finish(self, snapshot: _Snapshot, now: float) -> None:
        self.counters["snapshots"] += 1
        for node in self._table.nodes():
            incarnation = node.incarnation
            if incarnation in snapshot.seen:
                gone = self._table.held_by(incarnation) - snapshot.seen[incarnation]
                self._table.change(incarnation, (), gone)
                self._unconfirmed.pop(incarnation, None)
            elif snapshot.epoch == self._epoch:
                self._table.drop_node(incarnation)
            else:
                # A new life of the directory has yet to hear from it; until it had the time to, it is not dead.
                self._unconfirmed.setdefault(incarnation, now + self._timeout_s)
        self._epoch, self._seq = snapshot.epoch, snapshot.seq
        self._snapshot = None
        self._synced = True
        self._heard = now
        if self._kept.epoch == self._epoch:
            already_in = self._seq - self._kept.after
            for batch in self._kept.batches[already_in:]:
                self._apply(batch)
            self._in_sync_at = now
        self._kept.restart(b"", 0)

    # -------------------------------------------------------- changes

    def _on_publication(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 3 or frames[0] != TOPIC or len(frames[1]) != 8:
            raise BadFrame("not (topic, 8 bytes of sequence number, payload)")
        message: Events = decode(frames[2], Events)
        seq = int.from_bytes(frames[1], "big")
        self._heard = now
        if self._synced and message.epoch == self._epoch:
            if seq <= self._seq:
                self._be_in_sync(now)
                return
            if seq == self._seq + 1 and message.events:
                self._apply(message.events)
                self._be_in_sync(now)
                return
        if self._synced:
            self.counters["gaps"] += 1
            self._lose_sync(now)
        self._kept.add(seq, message, len(frames[2]))
        if self._snapshot and self._snapshot.index and self._missed_after(self._snapshot):
            self._ask_again(now)

    def _be_in_sync(self, now: float) -> None:
        self._in_sync_at = now
        self._attempts = 0

    def _lose_sync(self, now: float) -> None:
        self._synced = False
        self._ask_again(now)

    def _apply(self, events: list[Event]) -> None:
        self._seq += 1
        self.counters["events"] += len(events)
        for event in events:
            if isinstance(event, Changed):
                self._table.change(event.incarnation, event.adverts, event.withdrawn)
            elif isinstance(event, NodeUp):
                incarnation = event.node.incarnation
                self._unconfirmed.pop(incarnation, None)
                self._table.change(incarnation, (), self._table.held_by(incarnation))
                self._table.put_node(event.node)
            else:
                self._unconfirmed.pop(event.incarnation, None)
                self._table.drop_node(event.incarnation)
