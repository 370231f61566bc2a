"""How long the node's loop sleeps.

Owns the one blocking call of the loop. Idle, it sleeps until the next tick. While something is in flight in the
transport, which has no descriptor to wait on, it comes back after a twentieth of the time already spent waiting: late
by at most 5 %, and a long transfer costs few turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import zmq

TICK_S = 0.25
_SHARE = 0.05
_LONGEST_NAP_S = 0.002
_SHORTEST_NAP_S = 5e-6


def nap_s(waited_s: float) -> float:
    """How long to sleep before looking again at what has been in flight for `waited_s`; 0.0: not at all."""
    nap = min(waited_s * _SHARE, _LONGEST_NAP_S)
    return nap if nap > _SHORTEST_NAP_S else 0.0


class Pacing:
    def __init__(self) -> None:
        self._next_tick = 0.0
        self._deadline = 0.0

    def wait(
        self, poller: zmq.Poller, transfers_since: float, next_deadline: Callable[[float], float]
    ) -> list[tuple[Any, int]]:
        """Poll the sockets, waiting as long as nothing needs attention.

        `transfers_since`: when the newest READ was posted that is in flight and of whose end no socket will tell; 0.0:
        there is none; infinity: one of them is copied by the polls themselves. A slow READ does not slow down a fresh
        one.
        """
        now = time.monotonic()
        self._deadline = min(self._next_tick, next_deadline(now))
        if transfers_since:
            nap = nap_s(now - transfers_since)
            if nap:
                # zmq.Poller counts in whole milliseconds; that is longer than most READs take.
                time.sleep(nap)
            return poller.poll(0)
        return poller.poll(max(0, math.ceil((self._deadline - now) * 1000)))

    def tick_due(self, now: float) -> bool:
        """True at every regular tick, and when a deadline has passed."""
        if now < min(self._next_tick, self._deadline):
            return False
        self._next_tick = now + TICK_S
        self._deadline = self._next_tick
        return True
