"""Leases: a client's right to read an entry, as objects.

Owns the pins behind them. A lease starts with the scheduler that wanted the entry; once it is dispatched only its
readers end it. Whatever happens to a client, `end_all` of its session closes every pin it held.

    HELD --dispatched--> DISPATCHED --every reader released, or too old--> (gone)
    HELD --released, request forgotten, session closed--> (gone)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

DISPATCH_LIFETIME_S = 60.0
"""A dispatched load that no reader has confirmed for this long will not happen: its workers are on another host or
gone."""


class Pin(Protocol):
    def close(self) -> None: ...


class Lease:
    """One entry pinned for one want. Not thread-safe."""

    __slots__ = ("_pin", "dispatched_at", "instance", "lease", "readers_left", "session", "want")

    def __init__(self, lease: int, session: int, instance: str, want: int, readers: int, pin: Pin) -> None:
        self.lease = lease
        self.session = session
        self.instance = instance
        self.want = want
        self.readers_left = set(range(readers))
        self.dispatched_at: float | None = None
        self._pin = pin

    def end(self) -> None:
        self._pin.close()


class Leases:
    """All leases of a node. `on_end` is told whenever one ends, because memory may be free again."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._leases: dict[int, Lease] = {}
        self._next = itertools.count(1)
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, session: int, instance: str, want: int, readers: int, pin: Pin) -> Lease:
        """`session` is the scheduler's; the readers are the workers of the same `instance`."""
        lease = Lease(next(self._next), session, instance, want, readers, pin)
        self._leases[lease.lease] = lease
        return lease

    def get(self, lease: int) -> Lease | None:
        return self._leases.get(lease)

    def dispatched(self, lease: int, session: int, now: float) -> None:
        found = self._leases.get(lease)
        if found is not None and found.session == session and found.dispatched_at is None:
            found.dispatched_at = now
            if not found.readers_left:
                self._end([found])

    def read_by(self, lease: int, instance: str, reader: int) -> None:
        """A reader has copied. Its word also counts before the scheduler's Dispatched arrives: sockets do not order."""
        found = self._leases.get(lease)
        if found is not None and found.instance == instance:
            found.readers_left.discard(reader)
            if not found.readers_left:
                self._end([found])

    def drop(self, lease: int, session: int) -> None:
        """The scheduler no longer needs an undispatched lease."""
        found = self._leases.get(lease)
        if found is not None and found.session == session and found.dispatched_at is None:
            self._end([found])

    def forget_want(self, session: int, want: int) -> None:
        self._end(
            [
                lease
                for lease in self._leases.values()
                if lease.session == session and lease.want == want and lease.dispatched_at is None
            ]
        )

    def end_all(self, session: int) -> None:
        self._end([lease for lease in self._leases.values() if lease.session == session])

    def expire(self, now: float) -> int:
        """End dispatched leases nobody confirmed; returns how many."""
        old = [
            lease
            for lease in self._leases.values()
            if lease.dispatched_at is not None and now - lease.dispatched_at > DISPATCH_LIFETIME_S
        ]
        self._end(old)
        return len(old)

    def _end(self, leases: Iterable[Lease]) -> None:
        ended = list(leases)
        for lease in ended:
            self._leases.pop(lease.lease, None)
            lease.end()
        if ended:
            self._on_end()
