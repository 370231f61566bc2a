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


class Pacing:
    def __init__(self) -> None:
        self._next_tick = 0.0
        self._deadline = 0.0
        self._transfers_since = 0.0

    def wait(
        self, poller: zmq.Poller, transfers: bool, next_deadline: Callable[[float], float]
    ) -> list[tuple[Any, int]]:
        """Poll the sockets, waiting as long as nothing needs attention.

        `transfers`: READs are in flight whose end somebody waits for and no socket will tell.
        """
        now = time.monotonic()
        if transfers:
            self._transfers_since = self._transfers_since or now
            nap = min((now - self._transfers_since) * _SHARE, _LONGEST_NAP_S)
            if nap > _SHORTEST_NAP_S:
                # zmq.Poller counts in whole milliseconds; that is longer than most READs take.
                time.sleep(nap)
            return poller.poll(0)
        self._transfers_since = 0.0
        self._deadline = min(self._next_tick, next_deadline(now))
        return poller.poll(max(0, math.ceil((self._deadline - now) * 1000)))

    def tick_due(self, now: float) -> bool:
        """True at every regular tick, and when a deadline has passed."""
        if now < min(self._next_tick, self._deadline):
            return False
        self._next_tick = now + TICK_S
        self._deadline = self._next_tick
        return True
