"""How fast each holder has delivered lately, and which have failed: what to expect of the next READ.

Owns a few numbers for each holder. Must never decide who is read from.

READs that are in flight from one holder together share its wire. So what is measured is not a READ but a spell: from
the first READ that is in flight alone to the moment when none is any more, with all that has arrived by then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_KEPT = 5
"""Measurements. The one in the middle counts: a moment that was unlike all others decides nothing."""
_SMALL = 256 << 10
"""Spells with less payload tell of the latency, the others of the bandwidth."""
_LONGEST_SPELL_S = 0.5
"""One that goes on is measured this often."""
_OUTDATED_S = 30.0
"""What was measured so long ago is no guide any more: else a bad time could keep a holder from being asked for ever."""
_DISTRUST_S = 10.0
_HOLDERS = 4096
"""A READ from a holder that is gone may end after it was forgotten: such ones must not gather for ever."""
_GUESS = (100e-6, 1e-9)
"""Seconds, and seconds for each byte, before anybody was measured."""


class _Speed:
    """What one holder, or all of them together, have taken lately."""

    __slots__ = ("_latencies", "_measured_at", "_per_byte", "latency_s", "seconds_per_byte")

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=_KEPT)
        self._per_byte: deque[float] = deque(maxlen=_KEPT)
        self._measured_at = float("-inf")
        self.latency_s: float | None = None
        self.seconds_per_byte: float | None = None
        """Both as last measured, however long ago. None: never."""

    def measured(self, nbytes: int, seconds: float, now: float) -> None:
        if self.outdated(now):
            self._latencies.clear()
            self._per_byte.clear()
        self._measured_at = now
        if nbytes < _SMALL:
            self._latencies.append(seconds)
            self.latency_s = _middle(self._latencies)
        else:
            self._per_byte.append(seconds / nbytes)
            self.seconds_per_byte = _middle(self._per_byte)

    def outdated(self, now: float) -> bool:
        return now - self._measured_at > _OUTDATED_S

    def expected_s(self, nbytes: int) -> float:
        """By what is not outdated: one of the two may be."""
        latency_s = self.latency_s if self._latencies else 0.0
        seconds_per_byte = self.seconds_per_byte if self._per_byte else 0.0
        return (latency_s or 0.0) + nbytes * (seconds_per_byte or 0.0)


class _Holder:
    __slots__ = ("arrived", "distrusted_until", "in_flight", "silent_until", "since", "speed", "spoiled")

    def __init__(self) -> None:
        self.speed = _Speed()
        self.distrusted_until = 0.0
        self.silent_until = 0.0
        self.in_flight: set[Delivery] = set()
        self.since = float("-inf")
        """When the spell has begun, or the last one ended."""
        self.arrived = 0
        """Bytes of payload in this spell."""
        self.spoiled = False
        """Something of this spell was lost: what was brought of it nobody knows."""

    def begin(self, at: float) -> None:
        """A spell begins."""
        self.since, self.arrived, self.spoiled = max(at, self.since), 0, False


class Delivery:
    """A READ in flight from a holder. To be ended by `done` or `lost`; what comes after the first is nothing."""

    __slots__ = ("_known", "_rates")

    def __init__(self, rates: Rates, known: _Holder) -> None:
        self._rates = rates
        self._known = known

    def done(self, nbytes: int) -> None:
        """All `nbytes` of its payload have arrived."""
        self._rates._done(self, self._known, nbytes)

    def lost(self) -> None:
        """It has failed, or is not waited for any more."""
        if self in self._known.in_flight:
            self._known.in_flight.discard(self)
            self._known.spoiled = True


class Measured(NamedTuple):
    """What READs from one holder have taken lately. None: there was none of this kind yet."""

    latency_s: float | None
    """The whole time of a small READ."""
    bytes_per_s: float | None


class Rates:
    """By incarnation. Used by the node's loop, but for `measured`; `clock` is seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holders: dict[bytes, _Holder] = {}
        self._all = _Speed()

    def begun(self, holder: bytes, at: float) -> Delivery:
        """A READ was posted at `at`, or somewhat later."""
        known = self._known(holder)
        if not known.in_flight:
            known.begin(at)
        delivery = Delivery(self, known)
        known.in_flight.add(delivery)
        return delivery

    def failed(self, holder: bytes) -> None:
        """It has not delivered. For a while, or until it does, others are better."""
        self._known(holder).distrusted_until = self._clock() + _DISTRUST_S

    def silent(self, holder: bytes) -> None:
        """It has failed, and was waited for. Who tries it at once would wait as long."""
        known = self._known(holder)
        known.distrusted_until = known.silent_until = self._clock() + _DISTRUST_S

    def forget(self, holder: bytes) -> None:
        self._holders.pop(holder, None)

    def measured(self) -> list[tuple[bytes, Measured]]:
        """Of every holder, however long ago. Any thread may ask."""
        found = []
        for holder, known in list(self._holders.items()):
            per_byte = known.speed.seconds_per_byte
            found.append((holder, Measured(known.speed.latency_s, 1 / per_byte if per_byte else None)))
        return found

    def distrusted(self, holder: bytes) -> bool:
        known = self._holders.get(holder)
        return known is not None and self._clock() < known.distrusted_until

    def silent_lately(self, holder: bytes) -> bool:
        known = self._holders.get(holder)
        return known is not None and self._clock() < known.silent_until

    def expected_s(self, holder: bytes, nbytes: int) -> float | None:
        """Seconds that a READ of `nbytes` may take; None where nothing was measured lately."""
        known = self._holders.get(holder)
        if known is None or known.speed.outdated(self._clock()):
            return None
        return known.speed.expected_s(nbytes)

    def usual_s(self, nbytes: int) -> float:
        """Seconds that a READ of `nbytes` may take from a holder of which nothing is known: as from others lately."""
        if self._all.outdated(self._clock()):
            latency_s, seconds_per_byte = _GUESS
            return latency_s + nbytes * seconds_per_byte
        return self._all.expected_s(nbytes)

    def _done(self, delivery: Delivery, known: _Holder, nbytes: int) -> None:
        if delivery not in known.in_flight:
            return
        now = self._clock()
        known.in_flight.discard(delivery)
        known.distrusted_until = known.silent_until = 0.0
        known.arrived += nbytes
        # What is small and ends behind something large tells nothing: not of the latency, for it has waited.
        if known.in_flight and (now - known.since < _LONGEST_SPELL_S or known.arrived < _SMALL):
            return
        if not known.spoiled:
            for speed in (known.speed, self._all):
                speed.measured(known.arrived, max(0.0, now - known.since), now)
        known.begin(now)

    def _known(self, holder: bytes) -> _Holder:
        known = self._holders.get(holder)
        if known is None:
            if len(self._holders) >= _HOLDERS:
                del self._holders[next(iter(self._holders))]
            known = self._holders[holder] = _Holder()
        return known


def _middle(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
