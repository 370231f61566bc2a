"""What a directory knows, and the rules by which it changes.

Owns the nodes that said hello and what each advertises. Pure: no sockets, no clock of its own, no threads. Every change
returns the events that make a replica equal; must never change without returning them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from ec_p2p.control.messages import (
    Advert,
    Announce,
    Changed,
    EntryState,
    Event,
    Goodbye,
    Heartbeat,
    Hello,
    InstanceInfo,
    NodeDown,
    NodeInfo,
    NodeUp,
    SnapshotNode,
)

_CHUNK_ADVERTS = 2048
_NODE_COST = 20
"""A node's name and address take at most as much room in a chunk as this many adverts."""
_INSTANCE_COST = 4
"""So does an instance."""
_COUNTED_AT_ONCE = 8192


@dataclass(slots=True)
class _Known:
    info: NodeInfo
    route: bytes
    heard: float
    seq: int = 0
    adverts: dict[bytes, Advert] = field(default_factory=dict)
    instances: list[InstanceInfo] = field(default_factory=list)


class DirectoryState:
    """Nodes by incarnation. A node is bound to the route (connection) its hello came by: what the same node sent by an
    older connection can arrive later than the hello, and must not be taken for what follows it.

    `now` is seconds of any clock that never goes back. Not thread-safe.
    """

    def __init__(self, node_timeout_s: float) -> None:
        self._node_timeout_s = node_timeout_s
        self._nodes: dict[bytes, _Known] = {}
        self._places: dict[tuple[str, str], bytes] = {}
        self._checked: float | None = None
        self.entries = 0
        self.adverts = 0
        self.withdrawals = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def knows(self, incarnation: bytes) -> bool:
        """Whether there is such a node. From any thread."""
        return incarnation in self._nodes

    def entries_by_state(self) -> dict[int, int]:
        """How many entries are in each EntryState. Unlike the rest it may be called from any thread."""
        counts = dict.fromkeys(map(int, EntryState), 0)
        for known in list(self._nodes.values()):
            adverts = list(known.adverts.values())
            # Slices, so that whoever waits for the interpreter gets it in between.
            for start in range(0, len(adverts), _COUNTED_AT_ONCE):
                found = Counter(map(attrgetter("state"), adverts[start : start + _COUNTED_AT_ONCE]))
                for state, count in found.items():
                    counts[state] += count
        return counts

    def apply(self, message: Hello | Announce | Heartbeat | Goodbye, route: bytes, now: float) -> list[Event] | None:
        """Events to publish, in order. None: the sender must say hello and announce everything again."""
        if isinstance(message, Hello):
            return self._hello(message.node, route, now)
        known = self._nodes.get(message.incarnation)
        if isinstance(message, Goodbye):
            return self._forget(known) if known else []
        if known is None or known.route != route:
            return None
        known.heard = now
        if isinstance(message, Heartbeat):
            return [] if message.seq == known.seq else None
        return self._announce(message, known)

    def may_say(self, message: Hello | Goodbye, key: bytes) -> bool:
        """Whether a connection that has proved to be `key`'s may say so. A node is of the key that its info has: no
        other may speak for its incarnation, nor take its place."""
        if isinstance(message, Goodbye):
            touched = [self._nodes.get(message.incarnation)]
        elif message.node.key != key:
            return False
        else:
            info = message.node
            place = self._places.get((info.name, info.address), b"")
            touched = [self._nodes.get(info.incarnation), self._nodes.get(place)]
        return all(known is None or known.info.key == key for known in touched)

    def expire(self, now: float) -> list[Event]:
        """Forget the nodes not heard of for `node_timeout_s`. To be called several times within that span.

        After a pause of the caller (a stopped process, a suspended machine) every node gets a new span: what they
        sent meanwhile has not been read yet.
        """
        paused = self._checked is not None and now - self._checked > self._node_timeout_s / 2
        self._checked = now
        if paused:
            for known in self._nodes.values():
                known.heard = now
        silent = [known for known in self._nodes.values() if now - known.heard > self._node_timeout_s]
        return [event for known in silent for event in self._forget(known)]

    def snapshot(self) -> list[SnapshotNode]:
        """Everything, as of now: later changes do not show in it."""
        return [
            SnapshotNode(known.info, list(known.adverts.values()), known.instances) for known in self._nodes.values()
        ]

    def _hello(self, info: NodeInfo, route: bytes, now: float) -> list[Event]:
        place = (info.name, info.address)
        predecessor = self._nodes.get(self._places.get(place, b""))
        events = self._forget(predecessor) if predecessor and predecessor.info != info else []
        again = self._nodes.get(info.incarnation)
        if again:
            # Without a 'down': replicas take the 'up' of an incarnation that they know as that too.
            self._forget(again)
        self._nodes[info.incarnation] = _Known(info, route, now)
        self._places[place] = info.incarnation
        events.append(NodeUp(info))
        return events

    def _announce(self, message: Announce, known: _Known) -> list[Event] | None:
        # Not even one that was heard before may pass: after a hello that was lost the numbers begin again at 1.
        if message.seq != known.seq + 1:
            return None
        known.seq = message.seq
        adverts = known.adverts
        before = len(adverts)
        for identity in message.withdrawn:
            adverts.pop(identity, None)
        adverts.update([(advert.identity, advert) for advert in message.adverts])
        self.entries += len(adverts) - before
        self.adverts += len(message.adverts)
        self.withdrawals += len(message.withdrawn)
        if message.instances is not None:
            known.instances = message.instances
        return [Changed(message.incarnation, message.adverts, message.withdrawn, message.instances)]

    def _forget(self, known: _Known) -> list[Event]:
        del self._nodes[known.info.incarnation]
        del self._places[known.info.name, known.info.address]
        self.entries -= len(known.adverts)
        return [NodeDown(known.info.incarnation)]


def chunks(nodes: Iterable[SnapshotNode], adverts_per_chunk: int = _CHUNK_ADVERTS) -> Iterator[list[SnapshotNode]]:
    """`nodes` in slices that each fit one frame; a node with many adverts is spread over several. Never none."""
    chunk: list[SnapshotNode] = []
    room = adverts_per_chunk
    for node in nodes:
        cost = _NODE_COST + _INSTANCE_COST * len(node.instances)
        start = 0
        while True:
            if room <= cost and chunk:
                yield chunk
                chunk, room = [], adverts_per_chunk
            adverts = node.adverts[start : start + max(1, room - cost)]
            chunk.append(SnapshotNode(node.node, adverts, node.instances))
            room -= cost + len(adverts)
            start += len(adverts)
            if start >= len(node.adverts):
                break
    yield chunk
