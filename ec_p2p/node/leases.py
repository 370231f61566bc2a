"""Leases: a client's right to read an entry, as objects.

Owns the pins behind them. A lease starts with the scheduler that wanted the entry; once it is dispatched only its
readers, or the end of their processes, end it. There is no time limit: a worker may be slow, and its bytes must not
change under it. Whatever happens to a scheduler, `end_all` of its session closes every pin it held.

    HELD --dispatched--> DISPATCHED --every reader has released or is gone--> (gone)
    HELD --released, or request forgotten--> (gone)
    any --the scheduler's session closed--> (gone)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Protocol

import msgspec


class Pin(Protocol):
    def close(self) -> None: ...


class Lease(msgspec.Struct, eq=False, gc=False):
    """One entry pinned for one want. Not thread-safe."""

    lease: int
    session: int
    instance: str
    want: int
    readers_left: int
    """One bit for each: there may be thousands, of each of thousands of leases."""
    pin: Pin
    dispatched: bool = False

    def reader_is_done(self, reader: int) -> None:
        """Nothing changes for one that is none of them."""
        if 0 <= reader < self.readers_left.bit_length():
            self.readers_left &= ~(1 << reader)


class Leases:
    """All leases of a node. Who waits for memory hears of their ends from the CPU tier, whose pins they are."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._next = count(1)

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, session: int, instance: str, want: int, readers: int, pins: Sequence[Pin]) -> list[int]:
        """A lease of each pin. `session` is the scheduler's; the readers are the workers of the same `instance`."""
        numbers = list(islice(self._next, len(pins)))
        all_readers = (1 << readers) - 1
        for number, pin in zip(numbers, pins, strict=True):
            self._leases[number] = Lease(number, session, instance, want, all_readers, pin)
        return numbers

    def dispatched(self, lease: int, session: int) -> None:
        found = self._leases.get(lease)
        if found is not None and found.session == session:
            found.dispatched = True
            self._end_if_read(found)

    def read_by(self, lease: int, instance: str, reader: int) -> None:
        """A reader has copied. Its word also counts before the scheduler's Dispatched arrives: sockets do not order."""
        found = self._leases.get(lease)
        if found is not None and found.instance == instance:
            found.reader_is_done(reader)
            self._end_if_read(found)

    def drop(self, lease: int, session: int) -> None:
        """The scheduler no longer needs an undispatched lease."""
        found = self._leases.get(lease)
        if found is not None and found.session == session and not found.dispatched:
            self._end([found])

    def forget_want(self, session: int, want: int) -> None:
        self._end(
            [
                lease
                for lease in self._leases.values()
                if lease.session == session and lease.want == want and not lease.dispatched
            ]
        )

    def end_all(self, session: int) -> None:
        self._end([lease for lease in self._leases.values() if lease.session == session])

    def reader_gone(self, instance: str, reader: int) -> None:
        """A worker has ended: it will copy nothing more."""
        for lease in [lease for lease in self._leases.values() if lease.instance == instance]:
            lease.reader_is_done(reader)
            if lease.dispatched:
                self._end_if_read(lease)

    def _end_if_read(self, lease: Lease) -> None:
        if not lease.readers_left:
            self._end([lease])

    def _end(self, leases: Iterable[Lease]) -> None:
        for lease in list(leases):
            self._leases.pop(lease.lease, None)
            lease.pin.close()
