"""What the first tier stores: where an entry's bytes lie, and how they are to be understood.

Owns the smallest form of both, for there may be a million entries: what many share is one object, and what follows
from the rest is a property. Must never change once made: an entry that moved would be another entry.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from ec_p2p.engine.arena import Slab
from ec_p2p.engine.extents import whole_pages
from ec_p2p.engine.generation import record_at, tensor_bytes


class Layout(msgspec.Struct, frozen=True, gc=False):
    """A contiguous, row-major tensor of `rows` x `dim` elements: `nbytes` of payload in `extent_bytes` of the arena."""

    rows: int
    dim: int
    dtype: str
    nbytes: int
    extent_bytes: int


@lru_cache(maxsize=1 << 14)
def layout_of(rows: int, dim: int, dtype: str) -> Layout:
    """The one Layout of this shape, as long as there are no more than 16384 shapes. ValueError for one that no
    record can say, and for an unknown dtype."""
    nbytes = tensor_bytes(rows, dim, dtype)
    return Layout(rows, dim, dtype, nbytes, whole_pages(nbytes))


class Entry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One stored tensor, its payload at `offset` of the arena. Equal only to itself.

    Holds no reference that could lead back to it, so the garbage collector need not visit it.
    """

    identity: bytes
    layout: Layout
    slab: Slab
    offset: int
    slot: int
    """Which record of the slab is the entry's."""
    generation: int

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.layout.nbytes

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def dim(self) -> int:
        return self.layout.dim

    @property
    def dtype(self) -> str:
        """The torch name without its prefix."""
        return self.layout.dtype

    @property
    def record_offset(self) -> int:
        """Where the entry's record lies in the arena."""
        return record_at(self.slab, self.slot)

    @property
    def extent_bytes(self) -> int:
        """Bytes of the arena that the payload takes: whole pages."""
        return self.layout.extent_bytes
