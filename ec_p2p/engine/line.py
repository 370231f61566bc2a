"""Identities one behind the other, of which the first ones go.

Owns an order, and a value with each place in it; never what either means. Callers take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Generic, TypeVar

_FEW, _MANY = 16, 256
"""With fewer than the one at hand, a line looks up the other number of those in front."""

Value = TypeVar("Value")


class Line(Generic[Value]):
    """A line that is joined at either end, left from anywhere, and looked at from the front.

    Plain dicts keep the order: an OrderedDict takes twice the memory, and the garbage collector walks through all of
    it. But a dict finds its first key by walking over every slot that was emptied in front of it, so the first ones
    are looked up many at a time.
    """

    def __init__(self) -> None:
        self._back: dict[bytes, Value] = {}
        """Who joined at the end, the last one last."""
        self._front: dict[bytes, Value] = {}
        """Who joined in front, and so before those; the last one first of all."""
        self._first: dict[bytes, None] = {}
        """The first ones of all, in order; empty when unknown."""

    def join(self, identity: bytes, value: Value) -> None:
        """At the end. The identity is not in line."""
        self._back[identity] = value

    def join_in_front(self, identity: bytes, value: Value) -> None:
        self._front[identity] = value
        self._first.clear()

    def leave(self, identity: bytes) -> Value:
        """KeyError if it is not in line."""
        self._first.pop(identity, None)
        return (self._back if identity in self._back else self._front).pop(identity)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._back or identity in self._front

    def __getitem__(self, identity: bytes) -> Value:
        return (self._back if identity in self._back else self._front)[identity]

    def __len__(self) -> int:
        return len(self._back) + len(self._front)

    def first(self) -> bytes | None:
        """None: nobody is in line."""
        if not self._first:
            self._look_up()
        return next(iter(self._first), None)

    def __iter__(self) -> Iterator[bytes]:
        """From the front. No other call comes while the iterator is in use."""
        if len(self._first) < _FEW and len(self._first) < len(self):
            self._look_up()
        yield from self._first
        yield from islice(self._in_order(), len(self._first), None)

    def _look_up(self) -> None:
        self._first = dict.fromkeys(islice(self._in_order(), _MANY))

    def _in_order(self) -> Iterator[bytes]:
        return chain(reversed(self._front), self._back)
