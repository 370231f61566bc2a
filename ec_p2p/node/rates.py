"""How fast each holder has delivered lately, and which have failed: what to expect of the next READ.

Owns a few numbers for each holder. Must never decide who is read from.

READs that are in flight from one holder together share its wire. So what is measured is not a READ but a spell: from
the first READ that is in flight alone to the moment when none is any more, with all that has arrived by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_WEIGHT = 0.25
"""Of the newest measurement: about the last eight count."""
_SMALL = 256 << 10
"""Spells with less payload tell of the latency, the others of the bandwidth."""
_LONGEST_SPELL_S = 0.5
"""One that goes on is measured this often."""
_OUTDATED_S = 30.0
"""What was measured so long ago is no guide any more: else one bad moment could keep a holder from ever being asked."""
_DISTRUST_S = 10.0
_HOLDERS = 4096
"""A READ from a holder that is gone may end after it was forgotten: such ones must not gather for ever."""


class _Holder:
    __slots__ = (
        "arrived",
        "distrusted_until",
        "in_flight",
        "latency_s",
        "measured_at",
        "seconds_per_byte",
        "silent_until",
        "since",
    )

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.seconds_per_byte: float | None = None
        self.measured_at = float("-inf")
        self.distrusted_until = 0.0
        self.silent_until = 0.0
        self.in_flight: set[Delivery] = set()
        self.since = 0.0
        """When the spell has begun."""
        self.arrived = 0
        """Bytes of payload in this spell."""

    def measure(self, now: float) -> None:
        """The spell ends, or its next part begins."""
        seconds, nbytes = max(0.0, now - self.since), self.arrived
        self.since, self.arrived = now, 0
        if now - self.measured_at > _OUTDATED_S:
            self.latency_s = self.seconds_per_byte = None
        self.measured_at = now
        if nbytes < _SMALL:
            self.latency_s = _blend(self.latency_s, seconds)
        else:
            self.seconds_per_byte = _blend(self.seconds_per_byte, seconds / nbytes)


class Delivery:
    """A READ in flight from a holder. To be ended, once, by `done` or `lost`."""

    __slots__ = ("_clock", "_known")

    def __init__(self, known: _Holder, clock: Callable[[], float]) -> None:
        self._known = known
        self._clock = clock

    def done(self, nbytes: int) -> None:
        """All `nbytes` of its payload have arrived."""
        known, now = self._known, self._clock()
        known.in_flight.discard(self)
        known.distrusted_until = known.silent_until = 0.0
        known.arrived += nbytes
        if not known.in_flight or now - known.since >= _LONGEST_SPELL_S:
            known.measure(now)

    def lost(self) -> None:
        """It has brought nothing that could be measured: what others have brought meanwhile is not, either."""
        known = self._known
        known.in_flight.discard(self)
        known.since, known.arrived = self._clock(), 0


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

    def begun(self, holder: bytes, at: float) -> Delivery:
        """A READ was posted at `at`."""
        known = self._known(holder)
        if not known.in_flight:
            known.since, known.arrived = at, 0
        delivery = Delivery(known, self._clock)
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
        return [
            (holder, Measured(known.latency_s, 1 / known.seconds_per_byte if known.seconds_per_byte else None))
            for holder, known in list(self._holders.items())
        ]

    def distrusted(self, holder: bytes) -> bool:
        known = self._holders.get(holder)
        return known is not None and self._clock() < known.distrusted_until

    def silent_lately(self, holder: bytes) -> bool:
        known = self._holders.get(holder)
        return known is not None and self._clock() < known.silent_until

    def expected_s(self, holder: bytes, nbytes: int) -> float | None:
        """Seconds that a READ of `nbytes` may take; None while nothing is known."""
        known = self._holders.get(holder)
        if known is None or self._clock() - known.measured_at > _OUTDATED_S:
            return None
        return (known.latency_s or 0.0) + nbytes * (known.seconds_per_byte or 0.0)

    def _known(self, holder: bytes) -> _Holder:
        known = self._holders.get(holder)
        if known is None:
            if len(self._holders) >= _HOLDERS:
                del self._holders[next(iter(self._holders))]
            known = self._holders[holder] = _Holder()
        return known


def _blend(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
