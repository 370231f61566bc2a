"""An eviction policy that weighs use against size: Greedy-Dual-Size-Frequency.

Owns an order over identities, as every policy does (see policy.py). An entry's worth, set when it is used, is

    clock + repeats * cost / size

The clock is the worth of the dearest entry that had to go so far: what is not used any more is overtaken by what is.
The cost is the encoder's time. It has a fixed part and a part that grows with an item's rows, and so with its bytes:
taking the time per byte as the unit, cost / size is 1 + FIXED_BYTES / size. `repeats` leaves out the first use, beyond
which most media never get: entries used once go first, oldest first. It counts uses before the entry was given up and
stored again, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

import msgspec

from ec_p2p.engine.uses import Uses

FIXED_BYTES = 1 << 20
"""How many bytes of output an encoder makes in the time that it needs for any item at all. An encoder that needs 6 ms
and another 0.15 ms per token: 0.2 MiB with 5 KiB to a token, 1.3 MiB with 32 KiB."""

_ENOUGH_REPEATS = 8
"""More make no difference, so that yesterday's favourite goes in the end."""
_TICK = 1e-7
"""What the clock moves by with every use, so that among equals the older one goes first."""
_MANY = 1024
"""Nodes that may be kept in front of the heap, and that may be dead in it."""


class _Node(msgspec.Struct, order=True, gc=False):
    """An entry's place in the order. `due` is its worth; `key`, by which it is sorted, may lag behind."""

    key: float
    identity: bytes
    due: float
    nbytes: int
    """-1 when the entry is gone."""


class GDSF:
    """Least worth first; the module says what that is.

    A use only raises an entry's worth, so a node's key may be too low, never too high. Using an entry therefore sorts
    nothing: a node with an old key is sorted in again when its turn comes.
    """

    def __init__(self) -> None:
        self._uses = Uses()
        self._nodes: dict[bytes, _Node] = {}
        self._heap: list[_Node] = []
        self._front: list[_Node] = []
        """Nodes that were taken off the heap to be looked at, in order."""
        self._clock = 0.0
        self._reach = 0.0
        """Worth of the last entry that was looked at."""
        self._oldest = 0.0

    def added(self, identity: bytes, nbytes: int) -> None:
        self._insert(identity, nbytes, self._worth(identity, nbytes))

    def restored(self, identity: bytes, nbytes: int) -> None:
        self._oldest -= 1.0
        self._insert(identity, nbytes, self._oldest)

    def touched(self, identity: bytes) -> None:
        node = self._nodes[identity]
        node.due = max(node.due, self._worth(identity, node.nbytes))

    def removed(self, identity: bytes) -> None:
        node = self._nodes.pop(identity)
        node.nbytes = -1
        # What goes for other reasons than its place in the order says nothing about the worth of the others.
        if self._clock < node.due <= self._reach:
            self._clock = node.due
        if len(self._heap) > 2 * len(self._nodes) + _MANY:
            self._heap = [node for node in self._heap if node.nbytes >= 0]
            heapify(self._heap)

    def victims(self) -> Iterator[bytes]:
        self._tidy_front()
        at = 0
        while True:
            node = self._top()
            if at < len(self._front) and (node is None or self._front[at] < node):
                node = self._front[at]
            elif node is not None:
                self._front.insert(at, heappop(self._heap))
            else:
                return
            at += 1
            self._reach = node.due
            yield node.identity

    def _worth(self, identity: bytes, nbytes: int) -> float:
        self._clock += _TICK
        repeats = min(self._uses.count(identity) - 1, _ENOUGH_REPEATS)
        return self._clock + repeats * (1 + FIXED_BYTES / nbytes)

    def _insert(self, identity: bytes, nbytes: int, due: float) -> None:
        node = self._nodes[identity] = _Node(due, identity, due, nbytes)
        heappush(self._heap, node)
        self._uses.make_room_for(len(self._nodes))

    def _top(self) -> _Node | None:
        """The least node of the heap, which stays there."""
        while self._heap:
            node = self._heap[0]
            if node.nbytes < 0:
                heappop(self._heap)
            elif node.key < node.due:
                node.key = node.due
                heapreplace(self._heap, node)
            else:
                return node
        return None

    def _tidy_front(self) -> None:
        """Have only nodes in front whose place is still right, and not too many."""
        nodes, self._front = self._front, []
        for node in nodes:
            if node.nbytes < 0:
                continue
            if node.key == node.due and len(nodes) <= _MANY:
                self._front.append(node)
            else:
                node.key = node.due
                heappush(self._heap, node)
