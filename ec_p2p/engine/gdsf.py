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

import math
from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

from ec_p2p.engine.line import Line
from ec_p2p.engine.uses import Uses

FIXED_BYTES = 1 << 20
"""How many bytes of output an encoder makes in the time that it needs for any item at all. An encoder that needs 6 ms
and another 0.15 ms per token: 0.2 MiB with 5 KiB to a token, 1.3 MiB with 32 KiB."""

_ENOUGH_REPEATS = 8
"""More make no difference, so that yesterday's favourite goes in the end."""
_TICK = 1e-7
"""What the clock moves by with every use, so that among equals the older one goes first."""
_STEPS = 16
"""Of the steps to which `repeats * cost / size` is rounded, so many are a doubling: by at most 2.2 percent."""


@lru_cache(maxsize=1 << 14)
def _steps(nbytes: int) -> tuple[int, ...]:
    """The step of an entry of this size, by its number of repeats. 0: none."""
    cost = 1 + FIXED_BYTES / max(nbytes, 1)
    return (0, *(1 + round(_STEPS * math.log2(repeats * cost)) for repeats in range(1, _ENOUGH_REPEATS + 1)))


def _lead(step: int) -> float:
    """What an entry of this step is worth beyond the clock."""
    return 2.0 ** ((step - 1) / _STEPS) if step else 0.0


class GDSF:
    """Least worth first; the module says what that is.

    Of the entries of one step those used later are worth more: they stand in a line, in the order of their worth, and
    all that is ever sorted is the heads of the lines, of which there are two hundred at most.
    """

    def __init__(self) -> None:
        self._uses = Uses()
        self._entries = 0
        self._restored = Line[float]()
        """Not used in this life, and so of less worth than all others."""
        self._lines: dict[int, Line[float]] = {}
        """The others with their worth, by step."""
        self._heads: list[tuple[float, int]] = []
        """A heap of (worth, step), one for each line: its first entry was worth that, or is worth more by now."""
        self._clock = 0.0
        self._reach = 0.0
        """Worth of the last entry that was looked at."""

    def added(self, identity: bytes, nbytes: int) -> None:
        self._count_one_more()
        step = self._use(identity, nbytes)
        self._join(identity, step, self._clock + _lead(step))

    def restored(self, identity: bytes, nbytes: int) -> None:
        self._count_one_more()
        self._restored.join_in_front(identity, -math.inf)

    def touched(self, identity: bytes, nbytes: int) -> None:
        line = self._line_of(identity, nbytes)
        step = self._use(identity, nbytes)
        worth = self._clock + _lead(step)
        if worth > line[identity]:  # less, when its uses have faded
            line.leave(identity)
            self._join(identity, step, worth)

    def removed(self, identity: bytes, nbytes: int) -> None:
        worth = self._line_of(identity, nbytes).leave(identity)
        self._entries -= 1
        # What goes for other reasons than its place in the order says nothing about the worth of the others.
        if self._clock < worth <= self._reach:
            self._clock = worth

    def victims(self) -> Iterator[bytes]:
        self._reach = -math.inf
        if self._restored:
            yield from self._restored
        first = self._first()
        if first is None:
            return
        # Most often one is enough, and the other lines need not be looked at.
        self._reach = self._heads[0][0]
        yield first
        for worth, identity in self._in_order():
            if identity != first:
                self._reach = worth
                yield identity

    def _count_one_more(self) -> None:
        self._entries += 1
        self._uses.make_room_for(self._entries)

    def _use(self, identity: bytes, nbytes: int) -> int:
        """Count one more use of an entry; returns the step that it reaches by it."""
        self._clock += _TICK
        repeats = self._uses.count(identity) - 1
        return _steps(nbytes)[repeats if repeats < _ENOUGH_REPEATS else _ENOUGH_REPEATS]

    def _join(self, identity: bytes, step: int, worth: float) -> None:
        line = self._lines.get(step)
        if line is None:
            line = self._lines[step] = Line()
            heappush(self._heads, (worth, step))
        line.join(identity, worth)

    def _line_of(self, identity: bytes, nbytes: int) -> Line[float]:
        """Where it stands: at a step that an entry of this size can reach. A search, for who remembers the step of
        each entry needs more memory."""
        for step in _steps(nbytes):
            line = self._lines.get(step)
            if line is not None and identity in line:
                return line
        if identity in self._restored:
            return self._restored
        raise KeyError(identity)

    def _first(self) -> bytes | None:
        """Whose worth is the least; that of its line is then right, and the first of all heads."""
        while self._heads:
            worth, step = self._heads[0]
            line = self._lines[step]
            first = line.first()
            if first is None:
                heappop(self._heads)
                del self._lines[step]
            elif line[first] > worth:
                heapreplace(self._heads, (line[first], step))
            else:
                return first
        return None

    def _in_order(self) -> Iterator[tuple[float, bytes]]:
        """All lines merged."""
        heads = self._heads.copy()
        # Of the lines that were looked at: whose worth is among the heads, and who comes behind.
        firsts: dict[int, bytes] = {}
        rests: dict[int, Iterator[bytes]] = {}
        while heads:
            worth, step = heads[0]
            if step in firsts:
                yield worth, firsts[step]
            else:
                rests[step] = iter(self._lines[step])
            first = next(rests[step], None)
            if first is None:
                heappop(heads)
            else:
                firsts[step] = first
                heapreplace(heads, (self._lines[step][first], step))
