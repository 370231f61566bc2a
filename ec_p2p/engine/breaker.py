"""Leaving a sick disk alone for a while.

Owns the decision whether an operation may be tried now, never the operation. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 60.0


class Breaker:
    """Closed: everything may be tried. A failure opens it for `first_s`; then one trial, whose failure opens it for
    twice as long, up to `longest_s`, and whose success closes it.

    Whoever was admitted reports `succeeded` or `failed`. A trial that reports nothing is given up after `longest_s`.
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
        self._on_trial = False

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
        return self.is_open and self._clock() < self._until

    def admit(self) -> bool:
        """Whether the caller may try now."""
        if not self.is_open:
            return True
        with self._lock:
            if self.refuses():
                return False
            if self.is_open:
                self._on_trial = True
                self._until = self._clock() + self._longest_s
            return True

    def succeeded(self) -> bool:
        """True if this closed it. What was admitted before the failure does not."""
        if not self.is_open:
            return False
        with self._lock:
            if not self._on_trial:
                return False
            self._on_trial = False
            self._delay_s = 0.0
            return True

    def failed(self) -> bool:
        """True if this opened it, or opened it for longer. What was admitted before the failure does not."""
        with self._lock:
            if self.is_open and not self._on_trial:
                return False
            self._on_trial = False
            self._delay_s = min(self._longest_s, 2 * self._delay_s or self._first_s)
            self._until = self._clock() + self._delay_s
            return True
