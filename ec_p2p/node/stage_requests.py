"""Entries that other nodes want staged here, because they can read this node's arena but not its disk.

Owns who waits for which entry. It must never read: it asks `Staging`, and answers each request once per entry, with the
entry's new advert, by whatever way it came into the arena, or with None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from ec_p2p.control.messages import StageAnswer
from ec_p2p.engine.cpu import Entry, LocalCPUBackend
from ec_p2p.engine.tally import Tally
from ec_p2p.node.adverts import resident
from ec_p2p.node.staging import Staging

_MOST_WAITING = 4096
"""Entries times peers that wait at once: what is asked beyond that is answered with None."""


class StageRequests:
    """Used by the node's loop only. `answer(route, message)` sends to the peer that asked by `route`."""

    def __init__(
        self,
        backend: LocalCPUBackend,
        staging: Staging,
        counters: Tally,
        patience_s: float,
        answer: Callable[[bytes, StageAnswer], None],
    ) -> None:
        self._backend = backend
        self._staging = staging
        self._counters = counters
        self._patience_s = patience_s
        self._answer = answer
        self._routes: dict[bytes, set[bytes]] = defaultdict(set)
        self._waiting = 0

    def wanted(self, identity: bytes) -> bool:
        """Whether a peer waits for it."""
        return identity in self._routes

    def ask(self, route: bytes, identities: Iterable[bytes], now: float) -> None:
        """A peer wants these entries in the arena."""
        for identity in identities:
            entry = self._backend.get(identity)
            if entry is not None:
                self._say(route, identity, entry)
            elif self._waiting >= _MOST_WAITING:
                self._counters.add("stage_requests", outcome="busy")
                self._answer(route, StageAnswer(identity, None))
            else:
                self._wait(route, identity, now)

    def staged(self, entry: Entry) -> None:
        """An entry is in the arena now, wherever it came from."""
        for route in self._take(entry.identity):
            self._say(route, entry.identity, entry)

    def failed(self, identity: bytes) -> None:
        for route in self._take(identity):
            self._say(route, identity, None)

    def _wait(self, route: bytes, identity: bytes, now: float) -> None:
        routes = self._routes[identity]
        self._waiting += route not in routes
        routes.add(route)
        if not self._staging.bring(identity, now, now + self._patience_s):
            self.failed(identity)

    def _take(self, identity: bytes) -> set[bytes]:
        routes = self._routes.pop(identity, set())
        self._waiting -= len(routes)
        return routes

    def _say(self, route: bytes, identity: bytes, entry: Entry | None) -> None:
        self._counters.add("stage_requests", outcome="failed" if entry is None else "staged")
        self._answer(route, StageAnswer(identity, None if entry is None else resident(entry)))
