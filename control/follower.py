"""How a copy of a directory's state is kept equal to it, whatever gets lost on the way.

Owns the position in the directory's stream, the snapshot under way and the table they both change. Pure: no sockets,
no clock of its own. Must never leave the table changed by events of which one before was missed, or whose rest was not
applied because whoever was told of a change raised: a snapshot follows, and the error goes on to the caller.

The Clone pattern: take a snapshot that is valid at a sequence number, then every later change; a gap, another epoch or
silence means a snapshot again, and changes that come meanwhile are kept for after it.

A directory that came back empty, a node that says hello again, or an advert that a snapshot does not name do not make
what was known wrong: it is doubted, and goes only if it is not heard of again for a while. So lookups go on while
everything is being said anew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ec_p2p.control.messages import Changed, Event, Events, NodeUp, SnapshotChunk, SnapshotNode
from ec_p2p.control.table import Table

_KEPT_BYTES = 64 << 20
_ANSWER_S = 1.0
_AGAIN_S = 0.05
_LONGEST_WAIT_S = 10.0
_DOUBLINGS = 10
"""More are not needed to get there, and a directory may be away for days."""


@dataclass(slots=True)
class _Snapshot:
    """One being received. Its adverts go into the table as they come; what it did not name leaves at its end."""

    token: int
    index: int = 0
    epoch: bytes = b""
    seq: int = 0
    unnamed: dict[bytes, set[bytes]] = field(default_factory=dict)
    """By node, what the table had of it before and the snapshot has not named yet: nothing, where all is new."""


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


@dataclass(slots=True)
class _Doubt:
    """These adverts of one node, or with None the whole node, go once the directory was heard at `until` or later."""

    until: float
    identities: set[bytes] | None


class Follower:
    """Keeps `table` equal to one directory. `now` is seconds of any clock that never goes back; one thread's.

    When `next_request` has come, send a snapshot request with the token of `request`.
    """

    def __init__(self, table: Table, timeout_s: float) -> None:
        counted = ("snapshots", "requests", "events", "adverts", "withdrawals", "gaps", "silences")
        self.counters = dict.fromkeys(counted, 0)
        self._table = table
        self._timeout_s = timeout_s
        self._epoch = b""
        self._seq = 0
        self._synced = False
        self._snapshot: _Snapshot | None = None
        self._kept = _Kept()
        self._token = random.getrandbits(32)
        self._attempts = 0
        self._ask_at = float("-inf")
        self._heard = 0.0
        self._in_sync_at = float("-inf")
        self._settles_at = float("inf")
        self._doubts: dict[bytes, _Doubt] = {}

    def fresh(self, now: float) -> bool:
        """The table was equal to what the directory published, not longer than `timeout_s` ago."""
        return now - self._in_sync_at <= self._timeout_s

    def settled(self, now: float) -> bool:
        """It is fresh, nothing in it is doubted, and the directory has lived, or spoken again, for long enough to have
        heard of every node: what is not in it is nowhere."""
        return self.fresh(now) and not self._doubts and self._in_sync_at >= self._settles_at

    @property
    def position(self) -> tuple[bytes, int] | None:
        """Epoch and sequence number that the table stands at; None while a snapshot is wanted."""
        return (self._epoch, self._seq) if self._synced else None

    def doubted(self, incarnation: bytes) -> set[bytes]:
        """What the table says of a node but the directory, as it is now, has not said yet."""
        doubt = self._doubts.get(incarnation)
        if doubt is None:
            return set()
        return self._table.held_by(incarnation) if doubt.identities is None else doubt.identities

    def doubts(self, incarnation: bytes) -> bool:
        """Whether anything is doubted that the table says of a node."""
        return incarnation in self._doubts

    def doubts_node(self, incarnation: bytes) -> bool:
        """Whether the directory, as it is now, has not even said that there is such a node."""
        doubt = self._doubts.get(incarnation)
        return doubt is not None and doubt.identities is None

    def tick(self, now: float) -> None:
        """Notice silence, and drop what was doubted long enough."""
        if not self._synced:
            return
        if now - self._heard > self._timeout_s:
            self.counters["silences"] += 1
            self._lose_sync(now)
            return
        for incarnation in [doubted for doubted, doubt in self._doubts.items() if self._in_sync_at >= doubt.until]:
            doubt = self._doubts.pop(incarnation)
            if doubt.identities is None:
                self._table.drop_node(incarnation)
            else:
                self._table.change(incarnation, (), doubt.identities)

    def next_event(self) -> float:
        """When `tick` or `request` has something to do, if nothing comes in before."""
        return self._heard + self._timeout_s if self._synced else self._ask_at

    def wants_snapshot(self, now: float) -> bool:
        return not self._synced and now >= self._ask_at

    def request(self, now: float) -> int:
        """Token of a snapshot request that is sent now. An answer to an earlier one does not count any more."""
        self.counters["requests"] += 1
        self._token += 1
        self._snapshot = _Snapshot(self._token)
        self._attempts += 1
        self._ask_at = now + self._delay(_ANSWER_S)
        return self._token

    def postpone(self, until: float) -> None:
        """No request before then: there is nobody to send it to."""
        self._ask_at = until

    def take_chunk(self, chunk: SnapshotChunk, now: float) -> None:
        """A part of an answer, in the order sent."""
        snapshot = self._snapshot
        if snapshot is None or chunk.token != snapshot.token:
            return
        if chunk.index == 0:
            snapshot.epoch, snapshot.seq = chunk.epoch, chunk.seq
        expected = (snapshot.index, snapshot.epoch, snapshot.seq)
        if (chunk.index, chunk.epoch, chunk.seq) != expected or self._missed_after(snapshot):
            self.spoil(now)
            return
        snapshot.index += 1
        self._ask_at = now + _ANSWER_S
        try:
            self._take_nodes(snapshot, chunk.nodes)
            if chunk.last:
                self._finish(snapshot, now)
        except BaseException:
            self.spoil(now)
            raise

    def _take_nodes(self, snapshot: _Snapshot, nodes: list[SnapshotNode]) -> None:
        for part in nodes:
            incarnation = part.node.incarnation
            self._table.put_node(part.node)
            unnamed = snapshot.unnamed.get(incarnation)
            if unnamed is None:
                unnamed = snapshot.unnamed[incarnation] = self._table.held_by(incarnation)
            if unnamed:
                unnamed.difference_update([advert.identity for advert in part.adverts])
            self._table.describe(incarnation, part.instances)
            self._table.change(incarnation, part.adverts, ())

    def spoil(self, now: float) -> None:
        """The answer under way is of no use. Ask again: the first time at once, then less and less often."""
        if self._snapshot is None:
            return
        self._snapshot = None
        self._ask_at = now if self._attempts <= 1 else now + self._delay(_AGAIN_S)

    def take_events(self, seq: int, message: Events, nbytes: int, now: float) -> None:
        """What the directory published as number `seq`, or, with no events in it, after it had published `seq`."""
        self._hear(now)
        if self._synced and message.epoch == self._epoch:
            if seq == self._seq + 1 and message.events:
                self._apply(message.events, now)
            if seq <= self._seq:
                self._in_sync_at = now
                self._attempts = 0
                return
        if self._synced:
            self.counters["gaps"] += 1
            self._lose_sync(now)
        self._kept.add(seq, message, nbytes)
        if self._snapshot and self._snapshot.index and self._missed_after(self._snapshot):
            self.spoil(now)

    def _hear(self, now: float) -> None:
        if now - self._heard > self._timeout_s:
            # Silent for so long it heard nobody either, for all that is known: each node has its whole time again.
            self._settles_at = now + self._timeout_s
            for doubt in self._doubts.values():
                doubt.until = self._settles_at
        self._heard = now

    def _missed_after(self, snapshot: _Snapshot) -> bool:
        """Whether something was published after the snapshot that did not get here."""
        return self._kept.epoch == snapshot.epoch and self._kept.after > snapshot.seq

    def _lose_sync(self, now: float) -> None:
        self._synced = False
        self._ask_at = now if not self._attempts else now + self._delay(_AGAIN_S)

    def _delay(self, shortest_s: float) -> float:
        """Twice as long with every attempt since the last that succeeded."""
        return float(min(shortest_s * 2 ** min(self._attempts, _DOUBLINGS), _LONGEST_WAIT_S))

    def _finish(self, snapshot: _Snapshot, now: float) -> None:
        self.counters["snapshots"] += 1
        same_life = snapshot.epoch == self._epoch
        self._settles_at = min(self._settles_at if same_life else float("inf"), now + self._timeout_s)
        for node in self._table.nodes():
            incarnation = node.incarnation
            doubt = self._doubts.get(incarnation)
            unnamed = snapshot.unnamed.get(incarnation)
            # Each life gets the whole span: it may follow the one before it at once.
            until = min(doubt.until if doubt and same_life else float("inf"), now + self._timeout_s)
            if unnamed is not None:
                # Withdrawn, or not said again yet by a node that is saying everything again: a snapshot cannot tell.
                self._doubt(incarnation, unnamed and unnamed & self._table.held_by(incarnation), until)
            elif not same_life or (doubt and doubt.identities is None):
                self._doubt(incarnation, None, until)
            else:
                self._doubts.pop(incarnation, None)
                self._table.drop_node(incarnation)
        known = {node.incarnation for node in self._table.nodes()}
        self._doubts = {incarnation: doubt for incarnation, doubt in self._doubts.items() if incarnation in known}
        self._epoch, self._seq = snapshot.epoch, snapshot.seq
        self._snapshot = None
        self._synced = True
        self._hear(now)
        if self._kept.epoch == self._epoch:
            already_in = self._seq - self._kept.after
            for batch in self._kept.batches[already_in:]:
                self._apply(batch, now)
            self._in_sync_at = now
        self._kept.restart(b"", 0)

    def _apply(self, events: list[Event], now: float) -> None:
        self._seq += 1
        self.counters["events"] += len(events)
        try:
            self._apply_each(events, now)
        except BaseException:
            self._lose_sync(now)
            raise

    def _apply_each(self, events: list[Event], now: float) -> None:
        for event in events:
            if isinstance(event, Changed):
                self.counters["adverts"] += len(event.adverts)
                self.counters["withdrawals"] += len(event.withdrawn)
                doubt = self._doubts.get(event.incarnation)
                if doubt and doubt.identities:
                    doubt.identities.difference_update([advert.identity for advert in event.adverts])
                    doubt.identities.difference_update(event.withdrawn)
                    self._doubt(event.incarnation, doubt.identities, doubt.until)
                self._table.change(event.incarnation, event.adverts, event.withdrawn)
                if event.instances is not None:
                    self._table.describe(event.incarnation, event.instances)
            elif isinstance(event, NodeUp):
                self._table.put_node(event.node)
                self._table.describe(event.node.incarnation, [])
                held = self._table.held_by(event.node.incarnation)
                self._doubt(event.node.incarnation, held, now + self._timeout_s)
            else:
                self._doubts.pop(event.incarnation, None)
                self._table.drop_node(event.incarnation)

    def _doubt(self, incarnation: bytes, identities: set[bytes] | None, until: float) -> None:
        self._doubts.pop(incarnation, None)
        if identities is None or identities:
            self._doubts[incarnation] = _Doubt(until, identities)
