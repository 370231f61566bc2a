"""Which bytes of the arena are free.

Owns the free ranges, the record slots and the life of every reserved extent, until it is freed or becomes an entry.
Must never evict, nor know what an extent holds. Callers take turns (the backend's lock).

Each slab starts with its record table; the rest is handed out in whole pages. The tables also part the slabs: no free
range, and so no extent, ever spans two.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate
from typing import Protocol

import msgspec

from ec_p2p.engine.arena import PAGE, Slab
from ec_p2p.engine.generation import landing_record_at, record_at, records_in, table_bytes

ASK_AGAIN_S = 10.0
"""After a slab was refused the free ranges have to do for so long: to be refused takes a while, and a full arena would
ask with every allocation."""

OnSlab = Callable[[int, int], None]
"""Called with (offset, nbytes) of a slab before any of its bytes is handed out; may raise SlabRefused."""


class ExtentError(ValueError):
    """An extent was used against its life: freed twice, carved outside itself, or belonging to another arena."""


class SlabRefused(Exception):
    """A slab cannot be used, and stays closed: raised by `on_slab`, which is asked again after ASK_AGAIN_S at the
    soonest."""


class Ground(Protocol):
    """What an arena says of its slabs."""

    slab_bytes: int

    @property
    def slabs(self) -> list[Slab]: ...


class Life(Enum):
    RESERVED = "reserved"
    ENTRY = "entry"
    FREED = "freed"


RESERVED, ENTRY, FREED = Life
"""By short names, which are found faster than those of an Enum."""


class Extent(msgspec.Struct, eq=False):
    """Contiguous bytes [offset, offset+nbytes) of the arena, whole pages, and the record that goes with them.

    Handed out by a backend, and given back to it or turned into an entry. `nbytes` and `offset` stay what they were
    when reserved; what has been carved out of the extent since is no longer part of it.
    """

    home: object
    """Stands for the Extents it comes from."""
    slab: Slab
    offset: int
    nbytes: int
    slot: int
    """Which record of the slab is the extent's."""
    life: Life = RESERVED
    carved: list[tuple[int, int]] | None = None
    """What is left (start, end) after the first carving; None before."""

    @property
    def record(self) -> int:
        """Byte offset of the extent's 64-byte record."""
        return record_at(self.slab, self.slot)

    @property
    def landing_record(self) -> int:
        """Byte offset of the 64 bytes into which the record of what lands in the extent is READ."""
        return landing_record_at(self.slab, self.slot)

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
    return -(-nbytes // PAGE) * PAGE or PAGE


class Extents:
    """The free ranges of one arena, merged with their neighbours and found by best fit."""

    def __init__(
        self, arena: Ground, on_slab: OnSlab | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` tells seconds."""
        self._on_slab = on_slab
        self._clock = clock
        self._ask_again_at: float | None = None
        """While the next slab is refused."""
        # A last slab too short for one page behind its table is left unused.
        self._slabs = [slab for slab in arena.slabs if slab.nbytes - table_bytes(slab) >= PAGE]
        self.rooms = [slab.nbytes - table_bytes(slab) for slab in self._slabs]
        """Bytes of each slab that extents can use."""
        self.slots = [records_in(slab) for slab in self._slabs]
        """Records of each slab."""
        self._home = object()
        self._slab_bytes = arena.slab_bytes
        # All slabs' slots are the same numbers, and so the same objects: each entry keeps one.
        self._numbers = list(range(max(self.slots, default=0)))
        self._free_slots: list[list[int]] = []
        self._by_size: list[tuple[int, int]] = []
        self._start_to_end: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self.free_starting_at = self._start_to_end.get
        """(offset) -> the end of the free range that starts there, or None."""
        self.free_ending_at = self._end_to_start.get
        """(offset) -> the start of the free range that ends there, or None."""
        self.free_bytes = sum(self.rooms)
        self.usable_bytes = self.free_bytes
        """Of all slabs that are open or may yet be opened: none may behind one that is refused."""

    @property
    def open_slabs(self) -> int:
        return len(self._free_slots)

    # ------------------------------------------------------------ what is free

    def slabs_with(self, nbytes: int) -> set[int]:
        """Open slabs that have a free range of at least `nbytes`."""
        first = bisect_left(self._by_size, (nbytes, 0))
        return {self.slab_of(start) for _, start in self._by_size[first:]} if first < len(self._by_size) else set()

    def slab_of(self, offset: int) -> int:
        """Index of the slab that holds this byte."""
        return offset // self._slab_bytes

    # ------------------------------------------------------------ lives of extents

    def reserve(self, nbytes: int) -> Extent | None:
        """A fresh extent for `nbytes`, or None when nothing free fits. Opens the next slab only when it must.

        Passes on SlabRefused; soon after, the slab is not asked for again, and only what is free counts.
        """
        size = whole_pages(nbytes)
        while (extents := self._take((size,))) is None:
            if self.open_slabs == len(self._slabs) or size > self.rooms[self.open_slabs]:
                return None
            if self._ask_again_at is not None and self._clock() < self._ask_again_at:
                return None
            self._open_next()
        return extents[0]

    def reserve_row(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Fresh extents of these bytes, one behind the other. None when no free range of an open slab has room for
        all."""
        return self._take([whole_pages(nbytes) for nbytes in sizes])

    def carve(self, extent: Extent, offset: int, nbytes: int) -> Extent | None:
        """Split [offset, offset+nbytes), counted from the extent's start, off a reserved extent into one of its own.

        The bytes before and behind stay reserved to `extent`. None when the slab has no record to spare. Raises
        ExtentError when the piece is not page-aligned or not wholly part of `extent` any more.
        """
        self._must_be_reserved(extent)
        start = extent.offset + offset
        end = start + whole_pages(nbytes)
        if offset < 0 or offset % PAGE or nbytes < 0:
            raise ExtentError(f"cannot carve {nbytes} bytes at {offset} of {extent}; accepted: multiples of {PAGE}")
        parts = extent.parts
        part = next((part for part in parts if part[0] <= start and end <= part[1]), None)
        if part is None:
            raise ExtentError(f"cannot carve {nbytes} bytes at {offset} of {extent}: not part of it, or carved before")
        slots = self._free_slots[self.slab_of(start)]
        if not slots:
            return None
        at = parts.index(part)
        rest = [(low, high) for low, high in ((part[0], start), (end, part[1])) if low < high]
        extent.carved = parts[:at] + rest + parts[at + 1 :]
        return Extent(self._home, extent.slab, start, end - start, slots.pop())

    def keep(self, extent: Extent, nbytes: int) -> None:
        """A reserved, uncarved extent becomes an entry of `nbytes`; pages that it does not need are free at once.

        The entry's pages and slot come back through `free_entry`. Raises ExtentError.
        """
        if extent.life is not RESERVED or extent.home is not self._home:
            self._must_be_reserved(extent)
        if extent.carved is not None:
            raise ExtentError(f"{extent} cannot become an entry: pieces were carved out of it")
        if not 0 <= nbytes <= extent.nbytes:
            raise ExtentError(f"{extent} cannot hold an entry of {nbytes} bytes")
        extent.life = ENTRY
        if nbytes <= extent.nbytes - PAGE and (needed := whole_pages(nbytes)) < extent.nbytes:
            self._give(extent.offset + needed, extent.offset + extent.nbytes)

    def free(self, extent: Extent) -> None:
        """Give back what remains of a reserved extent. Raises ExtentError if it is not reserved (any more)."""
        self._must_be_reserved(extent)
        extent.life = FREED
        for start, end in extent.parts:
            self._give(start, end)
        extent.carved = []
        self._free_slots[self.slab_of(extent.offset)].append(extent.slot)

    def succeed(self, slab: Slab, offset: int, nbytes: int, slot: int) -> Extent:
        """An entry's pages and slot, reserved: `free_entry` and a reservation of just what it freed, in one."""
        return Extent(self._home, slab, offset, nbytes, slot)

    def free_entry(self, offset: int, nbytes: int, slot: int) -> None:
        """Give back the pages and the slot of an entry, once: entries have no life of their own here."""
        self._give(offset, offset + nbytes)
        self._free_slots[self.slab_of(offset)].append(slot)

    # ------------------------------------------------------------ free ranges

    def _must_be_reserved(self, extent: Extent) -> None:
        if extent.home is not self._home:
            raise ExtentError(f"{extent} belongs to another arena")
        if extent.life is not RESERVED:
            raise ExtentError(f"{extent} is not reserved")

    def _open_next(self) -> None:
        index = self.open_slabs
        slab = self._slabs[index]
        if self._on_slab is not None:
            try:
                self._on_slab(slab.offset, slab.nbytes)
            except SlabRefused:
                self._ask_again_at = self._clock() + ASK_AGAIN_S
                self.usable_bytes = sum(self.rooms[:index])
                raise
        self._ask_again_at = None
        self.usable_bytes = sum(self.rooms)
        self._free_slots.append(self._numbers[records_in(slab) - 1 :: -1])
        self._insert(slab.offset + table_bytes(slab), slab.offset + slab.nbytes)

    def _take(self, sizes: Sequence[int]) -> list[Extent] | None:
        if not any(self._free_slots):
            return None  # with many small entries there are many free ranges, and not one that can be used
        total = sum(sizes)
        for index in range(bisect_left(self._by_size, (total, 0)), len(self._by_size)):
            width, start = self._by_size[index]
            number = self.slab_of(start)
            slots = self._free_slots[number]
            if len(slots) >= len(sizes):
                del self._by_size[index], self._start_to_end[start]
                if total < width:
                    self._insert(start + total, start + width)
                else:
                    del self._end_to_start[start + width]
                self.free_bytes -= total
                slab = self._slabs[number]
                left = len(slots) - len(sizes)
                taken = sorted(slots[left:])
                del slots[left:]
                return [
                    Extent(self._home, slab, start, size, slot)
                    for start, size, slot in zip(accumulate(sizes, initial=start), sizes, taken, strict=False)
                ]
        return None

    def _give(self, start: int, end: int) -> None:
        self.free_bytes += end - start
        before = self.free_ending_at(start)
        if before is not None:
            self._remove(before, start)
            start = before
        behind = self.free_starting_at(end)
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
