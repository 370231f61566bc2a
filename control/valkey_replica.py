"""The local copy of a directory that is a Valkey or Redis server.

Owns the copy (`table`, `follower`, as over ZMQ) and the thread that reads the server's log of changes, and snapshots
where the follower wants one. The loop must never wait for the thread, nor forget what it knows because the server is
gone, hangs, or has come back empty.

| the thread finds | and then |
|---|---|
| the epoch that it has read the log of up to now | reads on |
| another epoch, or a gap in the log | tells the follower, and waits for it to ask for a snapshot |
| a question for a snapshot | the end of the log, then every node's adverts, then the log from that end on |
| nothing new | tells the follower that the copy stands where the log ends |

A snapshot takes many calls, between which things change. What it missed comes out of the log afterwards, in order, and
so does again some of what it has seen: the last word on each entry is the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ec_p2p.control.follower import Follower
from ec_p2p.control.interface import Pollable
from ec_p2p.control.messages import Advert, Event, Events, InstanceInfo, NodeInfo, SnapshotChunk, SnapshotNode
from ec_p2p.control.table import Table
from ec_p2p.control.valkey_handover import ToLoop
from ec_p2p.control.valkey_server import Connection, Position, parse
from ec_p2p.control.valkey_worker import Worker

log = logging.getLogger(__name__)

_BYTES_PER_TURN = 256 << 10
_ROOM = 4 << 20
_ADVERT_BYTES = 128
_LONGEST_WAIT_S = 0.5


class _Change(NamedTuple):
    """What the log says: an event as number `seq`, or without one, that it ends there."""

    at: Position
    event: Event | None
    nbytes: int


class ValkeyReplica:
    """As `interface.Replicates` and `directories.replicate` say. Raises BadEndpoint for an endpoint that is none, or
    without the library for it."""

    def __init__(
        self,
        endpoint: str,
        shown: str,
        *,
        on_change: Callable[[bytes], None] = lambda identity: None,
        on_node: Callable[[NodeInfo, bool], None] = lambda node, up: None,
        node_timeout_s: float = 4.0,
    ) -> None:
        server = parse(endpoint)
        self.endpoint = shown
        self._table = Table(on_change, on_node)
        self._follower = Follower(self._table, node_timeout_s)
        self._found: ToLoop[_Change | SnapshotChunk] = ToLoop(_ROOM)
        self._reader = _Reader(self._found, node_timeout_s)
        self._worker = Worker(server, shown, "following", node_timeout_s, self._reader.serve, self._found.wake)
        self._worker.start()

    @property
    def sockets(self) -> tuple[int, ...]:
        """The same one for the replica's whole life."""
        return (self._found.fd,)

    @property
    def fresh(self) -> bool:
        return self._follower.fresh(time.monotonic())

    @property
    def position(self) -> tuple[bytes, int] | None:
        return self._follower.position

    @property
    def counters(self) -> dict[str, int]:
        return {**self._follower.counters, "bad_frames": self._reader.bad_frames}

    def __len__(self) -> int:
        return len(self._table)

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        return self._table.lookup(identity)

    def nodes(self) -> list[NodeInfo]:
        return self._table.nodes()

    def instances(self, incarnation: bytes) -> list[InstanceInfo]:
        return self._table.instances(incarnation)

    def held_by(self, incarnation: bytes) -> list[Advert]:
        return self._table.adverts(incarnation)

    @property
    def settled(self) -> bool:
        return self._follower.settled(time.monotonic())

    def doubts(self, incarnation: bytes) -> bool:
        return self._follower.doubts(incarnation)

    def identities(self) -> list[bytes]:
        return self._table.identities()

    def on_readable(self, socket: Pollable) -> None:
        for found in self._found.take(_BYTES_PER_TURN):
            now = time.monotonic()
            if isinstance(found, SnapshotChunk):
                self._follower.take_chunk(found, now)
            else:
                events = [] if found.event is None else [found.event]
                self._follower.take_events(found.at.seq, Events(found.at.epoch, events), found.nbytes, now)

    def tick(self, now: float) -> float:
        follower = self._follower
        follower.tick(now)
        if follower.wants_snapshot(now):
            # Where the server is gone the question waits for it.
            self._reader.ask(follower.request(now))
        return max(0.0, follower.next_event() - now)

    def close(self) -> None:
        self._found.close()
        self._reader.close()
        self._worker.close()


class _Reader:
    """What the thread does with a connection, and where it stands. `ask` and `close` are the loop's."""

    def __init__(self, found: ToLoop[_Change | SnapshotChunk], node_timeout_s: float) -> None:
        self.bad_frames = 0
        self._found = found
        # Often enough that no lease is over for long, and that one missed look is no silence.
        self._look_s = node_timeout_s / 4
        self._wait_s = min(_LONGEST_WAIT_S, node_timeout_s / 8)
        self._look_at = 0.0
        self._end = Position(b"", 0, 0)
        self._read: Position | None = None
        """Up to where the log was read. None: a snapshot has to come first."""
        self._token: int | None = None
        self._asked = threading.Condition()
        self._closed = False

    def ask(self, token: int) -> None:
        """A snapshot, please: instead of one that was asked for before."""
        with self._asked:
            self._token = token
            self._asked.notify()

    def close(self) -> None:
        with self._asked:
            self._closed = True
            self._asked.notify()

    def serve(self, connection: Connection, answers: Callable[[], None]) -> None:
        self._look_at = 0.0
        while not self._closed:
            if time.monotonic() >= self._look_at:
                self._look(connection)
            answers()
            if self._token is not None:
                self._send_snapshot(connection)
            elif self._read is not None:
                self._read_on(connection, self._read)
            else:
                with self._asked:
                    self._asked.wait_for(lambda: self._closed or self._token is not None, self._wait_s)

    def _look(self, connection: Connection) -> None:
        self._end = connection.look()
        self._look_at = time.monotonic() + self._look_s
        if self._read is None or self._read.epoch != self._end.epoch:
            self._read = None
            self._tell_end()
        elif self._read.seq >= self._end.seq:
            self._tell_end()

    def _tell_end(self) -> None:
        self._found.post(_Change(self._end, None, 0))

    def _read_on(self, connection: Connection, after: Position) -> None:
        entries = connection.changes(after, self._wait_s)
        if not entries and after.seq < self._end.seq:
            # The end was further on, and there is nothing: the log was cut off before we came, or taken away.
            self._read = None
            self._tell_end()
        for entry in entries:
            if entry.event is None:
                self.bad_frames += 1
            elif entry.at.epoch != after.epoch or entry.at.seq != after.seq + 1:
                self._read = None
            self._found.post(_Change(entry.at, entry.event, entry.nbytes), entry.nbytes + 64)
            after = entry.at
        if self._read is not None and entries:
            self._read = after

    def _send_snapshot(self, connection: Connection) -> None:
        """Given up where another one is asked for meanwhile."""
        with self._asked:
            token, self._token = self._token, None
        assert token is not None
        index = 0
        at = connection.look()

        def send(last: bool, *nodes: SnapshotNode) -> None:
            nonlocal index
            size = sum(_ADVERT_BYTES * (1 + len(node.adverts)) for node in nodes)
            self._found.post(SnapshotChunk(token, index, at.epoch, at.seq, last, list(nodes)), size)
            index += 1

        for incarnation in connection.nodes():
            described = connection.describe(incarnation)
            cursor = 0
            while described is not None:
                page = connection.page(incarnation, cursor)
                self.bad_frames += page.bad
                send(False, SnapshotNode(described[0], page.adverts, described[1]))
                cursor = page.cursor
                if not cursor:
                    break
                if self._token is not None or self._closed:
                    return
        send(True)
        self._read = self._end = at
