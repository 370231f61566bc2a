"""Which entry of a tier is given up first.

Owns an order over identities, nothing else: it never sees memory, pins or files. The tier skips what it may not give
up, and takes turns in calling (its lock).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ec_p2p.engine.gdsf import GDSF
from ec_p2p.engine.line import Line


class EvictionPolicy(Protocol):
    """An order over the entries of one tier, kept up to date by the tier's calls: of each entry they say the same
    `nbytes` every time, so that no policy need remember them."""

    def added(self, identity: bytes, nbytes: int) -> None:
        """A new entry."""
        ...

    def restored(self, identity: bytes, nbytes: int) -> None:
        """An entry of an earlier life, not used in this one: of less worth than all that is known already."""
        ...

    def touched(self, identity: bytes, nbytes: int) -> None:
        """The entry was used. KeyError if it is not known."""
        ...

    def removed(self, identity: bytes, nbytes: int) -> None:
        """The entry is gone. KeyError if it is not known."""
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


class LRU(Line[None]):
    """Least recently used first."""

    def added(self, identity: bytes, nbytes: int) -> None:
        self._back[identity] = None

    def restored(self, identity: bytes, nbytes: int) -> None:
        self.join_in_front(identity, None)

    def touched(self, identity: bytes, nbytes: int) -> None:
        self.leave(identity)
        self.join(identity, None)

    def removed(self, identity: bytes, nbytes: int) -> None:
        self.leave(identity)

    victims = Line.__iter__


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"LRU": LRU, "GDSF": GDSF}
