"""Whether a loop still turns, as another thread sees it.

Owns the time of its last turn.
"""

from __future__ import annotations

import time


class Pulse:
    """`beat` is called by the loop at every turn: several times within `limit_s`, idle or not; `health` by anybody."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._at = time.monotonic()

    def beat(self) -> None:
        self._at = time.monotonic()

    def health(self) -> tuple[bool, str]:
        """Whether the loop has turned within the last `limit_s`, and the same in words."""
        still_s = time.monotonic() - self._at
        return (True, "ok") if still_s <= self._limit_s else (False, f"the loop has not turned for {still_s:.1f} s")
