"""What the node's one thread waits for, and who does what then.

Owns the poll, the map from a descriptor or socket to the part that listens to it, and the order of a turn. It must
never know what the parts do, nor end because one of them fails.

    sleep until something can be heard or is due --> hear --> turn --> tick, where it is due

A part that raises has the error counted, and logged once per kind. Then it, or what it was to hear, is left alone until
about the next tick: an error that comes every time must not become a loop that never sleeps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import zmq

from ec_p2p.node.pacing import TICK_S, Pacing

logger = logging.getLogger(__name__)

_POLL_AGAIN_S = 0.05
"""How soon the poll is tried again after it has failed itself."""


def _nothing(_: Any) -> None:
    pass


class Part(NamedTuple):
    """Something that listens, or has work to do by the clock. None of its functions may block."""

    name: str
    targets: Callable[[], Iterable[Any]] = tuple
    """The descriptors and ZMQ sockets that it listens to now."""
    hear: Callable[[Any], object] = _nothing
    """Called with one of them when there is something to read."""
    turn: Callable[[float], object] = _nothing
    """What cannot wait for a tick, with the time: once at every turn, after all was heard."""
    tick: Callable[[float], object] = _nothing
    """Regular work, with the time: every TICK_S, and when a deadline of any part has passed."""
    deadlines: Callable[[], Iterable[float]] = tuple
    """When there will be something to do although nothing is heard. One in the past is at once."""
    unheard_since: Callable[[], float] | None = None
    """When that was begun which is in flight and of whose end nothing tells: see Pacing.wait."""


class Loop:
    """`on_error()` is called for every exception that a part lets out."""

    def __init__(self, parts: Sequence[Part], on_error: Callable[[], None]) -> None:
        self._parts = parts
        # While a READ is in flight, turns follow each other within microseconds: nobody is asked who has nothing to do.
        self._ticks = [(part, part.tick) for part in parts if part.tick is not _nothing]
        self._turns = [(part, part.turn) for part in parts if part.turn is not _nothing]
        self._bounding = [part for part in parts if part.deadlines is not tuple]
        self._unheard = [part for part in parts if part.unheard_since is not None]
        self._on_error = on_error
        self._pacing = Pacing()
        self._poller = zmq.Poller()
        self._targets: dict[Any, Part] = {}
        self._watch_again = True
        self._resting: dict[str, float] = {}
        """Parts whose work has failed, until when they are left alone."""
        self._deaf: dict[Any, float] = {}
        """Targets whose hearing has failed, likewise."""
        self._logged: set[tuple[str, type[Exception], CodeType, int]] = set()

    def watch_again(self) -> None:
        """Some part listens to something else by now."""
        self._watch_again = True

    def turn(self) -> None:
        """Sleep until something can be heard or is due, and have the parts do it."""
        ready = self._wait()
        now = time.monotonic()
        for target in ready:
            self._hear(target, now)
        self._work(self._turns, now)
        if self._pacing.tick_due(now):
            self._work(self._ticks, now)
            # Parts open and close sockets in their ticks; a set comparison is cheap.
            self._watch_again = True

    # -------------------------------------------------------- sleeping

    def _wait(self) -> list[Any]:
        try:
            if self._watch_again:
                self._watch(time.monotonic())
            ready = self._pacing.wait(self._poller, self._unheard_since(), self._next_deadline)
        except Exception as error:  # a part may have named something that cannot be polled
            self._failed("poll", error)
            self._targets = {}
            self._watch_again = True
            time.sleep(_POLL_AGAIN_S)
            return []
        return [target for target, _ in ready]

    def _watch(self, now: float) -> None:
        self._watch_again = False
        self._deaf = {target: until for target, until in self._deaf.items() if now < until}
        targets = {target: part for part in self._parts for target in part.targets() if target not in self._deaf}
        if targets.keys() == self._targets.keys():
            self._targets = targets
            return
        # A new poller: an old one may still hold sockets that are closed by now.
        self._targets = targets
        self._poller = zmq.Poller()
        for target in targets:
            self._poller.register(target, zmq.POLLIN)

    def _unheard_since(self) -> float:
        now = time.monotonic()
        newest = 0.0
        for part in self._unheard:
            assert part.unheard_since is not None
            if not (self._resting and self._rests(part, now)):
                newest = max(newest, part.unheard_since())
        return newest

    def _next_deadline(self, now: float) -> float:
        deadline = float("inf")
        for part in self._bounding:
            if self._resting and self._rests(part, now):
                continue
            try:
                for candidate in part.deadlines():
                    deadline = min(deadline, candidate)
            except Exception as error:
                self._rest(part, error, now)
        return deadline

    # -------------------------------------------------------- the parts' work

    def _hear(self, target: Any, now: float) -> None:
        part = self._targets.get(target)
        if part is None:
            return
        try:
            part.hear(target)
        except Exception as error:
            self._failed(part.name, error)
            self._deaf[target] = now + TICK_S
            self._watch_again = True

    def _work(self, works: list[tuple[Part, Callable[[float], object]]], now: float) -> None:
        for part, work in works:
            if self._resting and self._rests(part, now):
                continue
            try:
                work(now)
            except Exception as error:
                self._rest(part, error, now)

    def _rests(self, part: Part, now: float) -> bool:
        return now < self._resting.get(part.name, 0.0)

    def _rest(self, part: Part, error: Exception, now: float) -> None:
        self._failed(part.name, error)
        self._resting[part.name] = now + TICK_S

    def _failed(self, where: str, error: Exception) -> None:
        self._on_error()
        place = error.__traceback__
        assert place is not None
        while place.tb_next is not None:
            place = place.tb_next
        kind = (where, type(error), place.tb_frame.f_code, place.tb_lineno)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.error(
                "%s: an error of this node, not of its clients; going on (more of this kind are only counted)",
                where,
                exc_info=error,
            )
