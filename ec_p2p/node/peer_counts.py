"""Counts by peer, of peers that are gone: nodes come and go under new names, and what is counted of them would fill
/metrics and memory for ever.

Owns the times since when they are gone. An hour is meant to be enough for whoever collects them to see the last of a
count.

    THERE --the directories do not name it--> GONE --KEPT_S later--> forgotten
    GONE --it is named again--> THERE
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ec_p2p.engine.tally import Tally

KEPT_S = 3600.0
_LOOK_EVERY_S = 60.0


class PeerCounts:
    """Used by the node's loop only. `present()` are the names of the peers that are there."""

    def __init__(self, counters: Tally, present: Callable[[], Iterable[str]]) -> None:
        self._counters = counters
        self._present = present
        self._gone_since: dict[str, float] = {}
        self._due = 0.0

    def tick(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + _LOOK_EVERY_S
        counted = {text for _, labels in self._counters.values() for label, text in labels if label == "peer"}
        gone = counted.difference(self._present())
        self._gone_since = {name: self._gone_since.get(name, now) for name in gone}
        for name in [name for name, since in self._gone_since.items() if now - since >= KEPT_S]:
            del self._gone_since[name]
            self._counters.forget("peer", name)
