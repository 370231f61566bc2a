"""What the node's one thread waits for.

Owns the poll and the map from a descriptor or socket to the part that listens to it. It must never know what the parts
do, nor end because one of them fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import zmq

from ec_p2p.node.pacing import Pacing

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """Something that listens."""

    targets: Callable[[], Iterable[Any]]
    """The descriptors and ZMQ sockets that it listens to now."""
    hear: Callable[[Any], object]
    """Called with one of them when there is something to read."""


class Loop:
    """`on_error()` is called for every exception that a part lets out."""

    def __init__(self, parts: Sequence[Part], on_error: Callable[[], None]) -> None:
        self._parts = parts
        self._on_error = on_error
        self._pacing = Pacing()
        self._poller = zmq.Poller()
        self._targets: dict[Any, Part] = {}
        self._watch_again = True

    def watch_again(self) -> None:
        """Some part listens to something else by now."""
        self._watch_again = True

    def wait(self, unheard_since: float, next_deadline: Callable[[float], float]) -> list[Any]:
        """Sleep until something can be heard or is due (see Pacing.wait); returns what can be heard."""
        if self._watch_again:
            self._watch()
        return [target for target, _ in self._pacing.wait(self._poller, unheard_since, next_deadline)]

    def hear(self, target: Any) -> None:
        """Have the right part handle what became readable. Whatever somebody sends, the node goes on."""
        part = self._targets.get(target)
        if part is None:
            return
        try:
            part.hear(target)
        except Exception:
            self._on_error()
            logger.exception("an error of this node, not of its clients; going on")

    def tick_due(self, now: float) -> bool:
        """Whether the parts' regular work is due."""
        return self._pacing.tick_due(now)

    def _watch(self) -> None:
        self._watch_again = False
        targets = {target: part for part in self._parts for target in part.targets()}
        if targets.keys() == self._targets.keys():
            self._targets = targets
            return
        # A new poller: an old one may still hold sockets that are closed by now.
        self._targets = targets
        self._poller = zmq.Poller()
        for target in targets:
            self._poller.register(target, zmq.POLLIN)
