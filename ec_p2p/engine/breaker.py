"""Leaving a sick disk alone for a while.

Owns the decision whether an operation may be tried now, never the operation. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 60.0


def longer(delay_s: float, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> float:
    """How long to wait after a failure, after which one had waited for `delay_s` before; 0 if this is the first."""
    return min(longest_s, 2 * delay_s or first_s)


class Breaker:
    """Closed: everything may be tried. A failure opens it for `first_s`; then one trial, whose failure opens it for
    twice as long, up to `longest_s`, and whose success closes it.

    Whoever was admitted reports, on the same thread, `succeeded`, `failed`, or that it is `undecided`. A trial that
    reports nothing is given up after `longest_s`.
    """

    def __init__(
        self, first_s: float = FIRST_S, longest_s: float = LONGEST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._delay_s = 0.0
        self._until = 0.0
        self._trial: int | None = None
        """The thread that is on trial."""

    @property
    def is_open(self) -> bool:
        """Whether the last that was heard is a failure."""
        return self._delay_s > 0

    @property
    def delay_s(self) -> float:
        """How long it was opened for; 0 when closed."""
        return self._delay_s

    def refuses(self) -> bool:
        """Whether `admit` would say no; asking makes nobody the trial."""
        return self._delay_s > 0 and self._clock() < self._until

    def admit(self) -> bool:
        """Whether the caller may try now."""
        if not self._delay_s:
            return True
        with self._lock:
            if self.refuses():
                return False
            if self.is_open:
                self._trial = threading.get_ident()
                self._until = self._clock() + self._longest_s
            return True

    def succeeded(self) -> bool:
        """True if this closed it. What was admitted before the failure does not."""
        if not self._delay_s:
            return False
        with self._lock:
            if not self._end_trial():
                return False
            self._delay_s = 0.0
            return True

    def failed(self) -> bool:
        """True if this opened it, or opened it for longer. What was admitted before the failure does not."""
        with self._lock:
            if self.is_open and not self._end_trial():
                return False
            self._delay_s = longer(self._delay_s, self._first_s, self._longest_s)
            self._until = self._clock() + self._delay_s
            return True

    def undecided(self) -> None:
        """Nothing was tried after all, or nothing was learnt: if this was the trial, the next may try at once."""
        if not self.is_open:
            return
        with self._lock:
            if self._end_trial():
                self._until = self._clock()

    def _end_trial(self) -> bool:
        """Whether the caller is on trial, which it is no more."""
        mine = self._trial == threading.get_ident()
        if mine:
            self._trial = None
        return mine
