"""Which entry of a tier is given up first.

Owns an order over identities, nothing else: it never sees memory, pins or files. The tier skips what it may not give
up, and takes turns in calling (its lock).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over the entries of one tier, kept up to date by the tier's calls."""

    def added(self, identity: bytes, nbytes: int) -> None:
        """A new entry of `nbytes`."""
        ...

    def restored(self, identity: bytes, nbytes: int) -> None:
        """An entry of an earlier life, not used in this one: of less worth than all that is known already."""
        ...

    def touched(self, identity: bytes) -> None:
        """The entry was used."""
        ...

    def removed(self, identity: bytes) -> None:
        """The entry is gone."""
        ...

    def victims(self) -> Iterator[bytes]:
        """All entries, the one to give up first in front. No other call comes while the iterator is in use."""
        ...


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        # A plain dict is insertion-ordered, but finding its first key again and again walks over deleted slots.
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def added(self, identity: bytes, nbytes: int) -> None:
        self._order[identity] = None

    def restored(self, identity: bytes, nbytes: int) -> None:
        self._order[identity] = None
        self._order.move_to_end(identity, last=False)

    def touched(self, identity: bytes) -> None:
        self._order.move_to_end(identity)

    def removed(self, identity: bytes) -> None:
        del self._order[identity]

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)
