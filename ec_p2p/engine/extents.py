"""Which bytes of the arena are free.

Owns the free ranges, the record slots and the life of every extent (reserved, entry, freed). Must never evict, nor
know what an extent holds. Callers take turns (the backend's lock).

Each slab starts with its record table; the rest is handed out in whole pages. The tables also part the slabs: no free
range, and so no extent, ever spans two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from enum import Enum

from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.generation import RECORD_BYTES, records_in, table_bytes

OnSlab = Callable[[int, int], None]
"""Called with (offset, nbytes) of a slab before any of its bytes is handed out; may raise SlabRefused."""


class ExtentError(ValueError):
    """An extent was used against its life: freed twice, carved outside itself, or belonging to another arena."""


class SlabRefused(Exception):
    """A slab cannot be used, and stays closed: raised by `on_slab`."""


class Life(Enum):
    RESERVED = "reserved"
    ENTRY = "entry"
    FREED = "freed"


class Extent:
    """Contiguous bytes [offset, offset+nbytes) of the arena, whole pages, and the record that goes with them.

    Handed out by a backend and given back to it. `nbytes` and `offset` stay what they were when reserved; what has been
    carved out of the extent since is no longer part of it.
    """

    __slots__ = ("carved", "home", "life", "nbytes", "offset", "record", "slab")

    def __init__(self, home: Extents, slab: int, offset: int, nbytes: int, record: int) -> None:
        self.home = home
        self.slab = slab
        self.offset = offset
        self.nbytes = nbytes
        self.record = record
        """Byte offset of the extent's 64-byte record."""
        self.life = Life.RESERVED
        self.carved: list[tuple[int, int]] | None = None
        """What is left (start, end) after the first carving; None before, and so for every entry: there are many."""

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Ranges (start, end) that still belong to the extent, in address order."""
        return [(self.offset, self.offset + self.nbytes)] if self.carved is None else self.carved

    @property
    def remaining(self) -> int:
        """Bytes that still belong to the extent."""
        return sum(end - start for start, end in self.parts)

    def __repr__(self) -> str:
        return f"<Extent {self.offset}+{self.nbytes} {self.life.value}>"


def whole_pages(nbytes: int) -> int:
    """Bytes that an extent for `nbytes` takes: whole pages, at least one, so that zero rows have an address too."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


class Extents:
    """The free ranges of one arena, merged with their neighbours and found by best fit."""

    def __init__(self, arena: Arena, on_slab: OnSlab | None = None) -> None:
        self._on_slab = on_slab
        # A last slab too short for one page behind its table is left unused.
        self._slabs = [slab for slab in arena.slabs if slab.nbytes - table_bytes(slab) >= PAGE]
        self.rooms = [slab.nbytes - table_bytes(slab) for slab in self._slabs]
        """Bytes of each slab that extents can use."""
        self.slots = [records_in(slab) for slab in self._slabs]
        """Records of each slab."""
        self.slab_bytes = arena.slab_bytes
        self._free_slots: list[list[int]] = []
        self._by_size: list[tuple[int, int]] = []
        self._start_to_end: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self.free_bytes = sum(self.rooms)

    @property
    def open_slabs(self) -> int:
        return len(self._free_slots)

    # ------------------------------------------------------------ what is free

    def free_ending_at(self, offset: int) -> int | None:
        """Start of the free range that ends at `offset`."""
        return self._end_to_start.get(offset)

    def free_starting_at(self, offset: int) -> int | None:
        """End of the free range that starts at `offset`."""
        return self._start_to_end.get(offset)

    def fitting(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Free ranges (start, end) of open slabs with at least `nbytes`, smallest first."""
        for index in range(bisect_left(self._by_size, (nbytes, 0)), len(self._by_size)):
            size, start = self._by_size[index]
            yield start, start + size

    def slab_of(self, offset: int) -> int:
        """Index of the slab that holds this byte."""
        return offset // self.slab_bytes

    def has_slot(self, slab: int) -> bool:
        """Whether an open slab has a record to spare."""
        return bool(self._free_slots[slab])

    # ------------------------------------------------------------ lives of extents

    def reserve(self, nbytes: int) -> Extent | None:
        """A fresh extent for `nbytes`, or None when nothing free fits. Opens the next slab only when it must.

        Passes on SlabRefused.
        """
        size = whole_pages(nbytes)
        extent = self._take(size)
        while extent is None and self.open_slabs < len(self._slabs) and size <= self.rooms[self.open_slabs]:
            self._open_next()
            extent = self._take(size)
        return extent

    def carve(self, extent: Extent, offset: int, nbytes: int) -> Extent | None:
        """Split [offset, offset+nbytes), counted from the extent's start, off a reserved extent into one of its own.

        The bytes before and behind stay reserved to `extent`. None when the slab has no record to spare. Raises
        ExtentError when the piece is not page-aligned or not wholly part of `extent` any more.
        """
        self._must_be(extent, Life.RESERVED)
        start = extent.offset + offset
        end = start + whole_pages(nbytes)
        if offset < 0 or offset % PAGE or nbytes < 0:
            raise ExtentError(f"cannot carve {nbytes} bytes at {offset} of {extent}; accepted: multiples of {PAGE}")
        parts = extent.parts
        part = next((part for part in parts if part[0] <= start and end <= part[1]), None)
        if part is None:
            raise ExtentError(f"cannot carve {nbytes} bytes at {offset} of {extent}: not part of it, or carved before")
        if not self.has_slot(extent.slab):
            return None
        at = parts.index(part)
        rest = [(low, high) for low, high in ((part[0], start), (end, part[1])) if low < high]
        extent.carved = parts[:at] + rest + parts[at + 1 :]
        return Extent(self, extent.slab, start, end - start, self._free_slots[extent.slab].pop())

    def keep(self, extent: Extent, nbytes: int) -> None:
        """A reserved, uncarved extent becomes an entry of `nbytes`. Raises ExtentError."""
        self._must_be(extent, Life.RESERVED)
        if extent.carved is not None:
            raise ExtentError(f"{extent} cannot become an entry: pieces were carved out of it")
        if not 0 <= nbytes <= extent.nbytes:
            raise ExtentError(f"{extent} cannot hold an entry of {nbytes} bytes")
        extent.life = Life.ENTRY

    def free(self, extent: Extent, life: Life) -> None:
        """Give back what remains of an extent that is in `life`. Raises ExtentError if it is not."""
        self._must_be(extent, life)
        extent.life = Life.FREED
        for start, end in extent.parts:
            self._give(start, end)
        extent.carved = []
        self._free_slots[extent.slab].append(extent.record)

    # ------------------------------------------------------------ free ranges

    def _must_be(self, extent: Extent, life: Life) -> None:
        if extent.home is not self:
            raise ExtentError(f"{extent} belongs to another arena")
        if extent.life is not life:
            raise ExtentError(f"{extent} is not {life.value}")

    def _open_next(self) -> None:
        index = self.open_slabs
        slab = self._slabs[index]
        if self._on_slab is not None:
            self._on_slab(slab.offset, slab.nbytes)
        records = range(slab.offset, slab.offset + RECORD_BYTES * records_in(slab), RECORD_BYTES)
        self._free_slots.append(list(reversed(records)))
        self._insert(slab.offset + table_bytes(slab), slab.offset + slab.nbytes)

    def _take(self, size: int) -> Extent | None:
        for index in range(bisect_left(self._by_size, (size, 0)), len(self._by_size)):
            width, start = self._by_size[index]
            slots = self._free_slots[self.slab_of(start)]
            if slots:
                self._remove(start, start + width)
                if size < width:
                    self._insert(start + size, start + width)
                self.free_bytes -= size
                return Extent(self, self.slab_of(start), start, size, slots.pop())
        return None

    def _give(self, start: int, end: int) -> None:
        self.free_bytes += end - start
        before = self._end_to_start.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        behind = self._start_to_end.get(end)
        if behind is not None:
            self._remove(end, behind)
            end = behind
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        self._start_to_end[start] = end
        self._end_to_start[end] = start
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._start_to_end[start]
        del self._end_to_start[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
