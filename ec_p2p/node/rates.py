"""How fast each holder has delivered lately, and which have failed: what to expect of the next READ.

Owns a few numbers for each holder. Must never decide who is read from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_WEIGHT = 0.25
"""Of the newest measurement: about the last eight count."""
_SMALL = 256 << 10
"""READs below tell of the latency, those above of the bandwidth."""
_DISTRUST_S = 10.0
_HOLDERS = 4096
"""A READ from a holder that is gone may end after it was forgotten: such ones must not gather for ever."""


class _Holder:
    __slots__ = ("distrusted_until", "latency_s", "seconds_per_byte")

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.seconds_per_byte: float | None = None
        self.distrusted_until = 0.0


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

    def observe(self, holder: bytes, nbytes: int, since: float) -> None:
        """A READ of `nbytes` that was posted at `since` is done now."""
        seconds = max(0.0, self._clock() - since)
        known = self._known(holder)
        known.distrusted_until = 0.0
        if nbytes < _SMALL:
            known.latency_s = _blend(known.latency_s, seconds)
        else:
            known.seconds_per_byte = _blend(known.seconds_per_byte, seconds / nbytes)

    def failed(self, holder: bytes) -> None:
        """It has not delivered. For a while, or until it does, others are better."""
        self._known(holder).distrusted_until = self._clock() + _DISTRUST_S

    def forget(self, holder: bytes) -> None:
        self._holders.pop(holder, None)

    def measured(self) -> list[tuple[bytes, Measured]]:
        """Of every holder. Any thread may ask."""
        return [
            (holder, Measured(known.latency_s, 1 / known.seconds_per_byte if known.seconds_per_byte else None))
            for holder, known in list(self._holders.items())
        ]

    def distrusted(self, holder: bytes) -> bool:
        known = self._holders.get(holder)
        return known is not None and self._clock() < known.distrusted_until

    def expected_s(self, holder: bytes, nbytes: int) -> float | None:
        """Seconds that a READ of `nbytes` may take; None while nothing is known."""
        known = self._holders.get(holder)
        if known is None or (known.seconds_per_byte is None and known.latency_s is None):
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
