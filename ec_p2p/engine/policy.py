"""Which entry of a tier is given up first.

Owns an order over identities, nothing else: it never sees memory, pins or files. The tier skips what it may not give
up, and takes turns in calling (its lock).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Protocol

from ec_p2p.engine.gdsf import GDSF

_FEW, _MANY = 16, 1024
"""With fewer than the one at hand, LRU looks up the other number of its oldest entries."""


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


def make_policy(word: str) -> EvictionPolicy:
    """The policy that `cache_policy` names. ValueError for any other word."""
    try:
        return POLICIES[word]()
    except KeyError:
        raise ValueError(f"cache_policy={word!r}; accepted: {', '.join(POLICIES)}") from None


class LRU:
    """Least recently used first.

    Plain dicts keep the order: an OrderedDict takes twice the memory, and the garbage collector walks through all of
    it. But a dict finds its first key by walking over every slot that was emptied in front of it, so the oldest keys
    are looked up many at a time.
    """

    def __init__(self) -> None:
        self._used: dict[bytes, None] = {}
        """Oldest first."""
        self._restored: dict[bytes, None] = {}
        """Older than those, and oldest last."""
        self._oldest: dict[bytes, None] = {}
        """The first victims of all, in order; empty when unknown."""

    def added(self, identity: bytes, nbytes: int) -> None:
        self._used[identity] = None

    def restored(self, identity: bytes, nbytes: int) -> None:
        self._restored[identity] = None
        self._oldest.clear()

    def touched(self, identity: bytes) -> None:
        self.removed(identity)
        self._used[identity] = None

    def removed(self, identity: bytes) -> None:
        self._oldest.pop(identity, None)
        del (self._used if identity in self._used else self._restored)[identity]

    def victims(self) -> Iterator[bytes]:
        if len(self._oldest) < _FEW:
            self._oldest = dict.fromkeys(islice(self._from_the_oldest(), _MANY))
        yield from self._oldest
        for identity in self._from_the_oldest():
            if identity not in self._oldest:
                yield identity

    def _from_the_oldest(self) -> Iterator[bytes]:
        return chain(reversed(self._restored), self._used)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"LRU": LRU, "GDSF": GDSF}
