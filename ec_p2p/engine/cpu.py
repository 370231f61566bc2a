"""The first tier: entries in the arena.

Owns the index from identity to entry, the pins, and the decision to evict. Must never copy payload bytes (callers write
into what they reserved) and never do I/O. One lock guards it all; the node calls from one thread, an engine in
process from many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ec_p2p.engine import victims
from ec_p2p.engine.arena import PAGE, Arena, Slab
from ec_p2p.engine.entry import Entry, Layout, layout_of
from ec_p2p.engine.extents import Extent, Extents, OnSlab, SlabRefused, whole_pages
from ec_p2p.engine.generation import IDENTITY_BYTES, GenerationTable, check
from ec_p2p.engine.policy import LRU, EvictionPolicy

__all__ = ["Entry", "Listener", "LocalCPUBackend", "OutOfMemory", "Pin", "TooLarge"]


class TooLarge(Exception):
    """More bytes than one extent of this arena can ever have."""


class OutOfMemory(Exception):
    """What is pinned or reserved leaves no room now; later there may be some."""


Listener = Callable[[Entry], None]
"""Called under the backend's lock, in the order of events: it must be quick, do no I/O, and change nothing here but
the pins of the entry that it is told of."""


class Pin(msgspec.Struct, eq=False):
    """While it is open the entry's bytes stay where they are. `close` may be called from any thread, and twice.

    The garbage collector visits it: whoever listens to the backend may hold pins, and is then its own referrer.
    """

    entry: Entry
    home: LocalCPUBackend | None
    """None once it is closed."""

    def close(self) -> None:
        home = self.home
        if home is not None:
            home._unpin(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalCPUBackend:
    """Entries by identity, in one arena that it fills slab by slab and then recycles."""

    def __init__(
        self,
        arena: Arena,
        *,
        policy: EvictionPolicy | None = None,
        on_slab: OnSlab | None = None,
        on_stored: Listener | None = None,
        on_evicted: Listener | None = None,
        on_unpinned: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_slab(offset, nbytes)` is called before a slab's first use; `on_stored` after an entry became visible;
        `on_evicted` after one stopped being visible, for whatever reason, and before its bytes are handed out again;
        `on_unpinned` after the last pin of an entry was closed, by whichever thread closed it. `clock` tells when a
        slab that was refused may be asked for again."""
        self.arena = arena
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._on_stored = on_stored
        self._on_evicted = on_evicted
        self._on_unpinned = on_unpinned
        self._extents = Extents(arena, on_slab, clock)
        self._table = GenerationTable(arena)
        self._index: dict[bytes, Entry] = {}
        self._by_offset: dict[int, Entry] = {}
        self._pins: dict[Entry, int] = {}
        self._lock = threading.RLock()
        self._used = 0
        self._pinned = 0
        self.capacity_bytes = sum(self._extents.rooms)
        """Bytes that extents can ever take, all slabs together."""
        self.largest_entry = max(self._extents.rooms, default=0)
        """Bytes of the largest entry that an empty arena takes."""
        if not self._extents.rooms:
            raise ValueError(f"an arena of {arena.nbytes} bytes has no room for one entry")

    # ------------------------------------------------------------ looking

    def get(self, identity: bytes) -> Entry | None:
        """The entry, which becomes the most recently used one."""
        if identity not in self._index:
            return None  # most are new when they are asked for, and need no lock
        with self._lock:
            entry = self._index.get(identity)
            if entry is not None:
                self._policy.touched(identity, entry.extent_bytes)
            return entry

    def peek(self, identity: bytes) -> Entry | None:
        """The entry, its place in the order of eviction unchanged."""
        return self._index.get(identity)

    def __len__(self) -> int:
        return len(self._index)

    # ------------------------------------------------------------ accounting, in whole pages

    @property
    def used_bytes(self) -> int:
        """Bytes of extents that hold entries, removed but still pinned ones included."""
        return self._used

    @property
    def pinned_bytes(self) -> int:
        """The part of `used_bytes` that is pinned."""
        return self._pinned

    @property
    def usable_bytes(self) -> int:
        """`capacity_bytes`, without slabs that cannot be had as long as one is refused."""
        return self._extents.usable_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of neither entries nor reserved extents, in slabs not opened yet too."""
        return self._extents.free_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of extents that are reserved and not yet published."""
        with self._lock:
            return self.capacity_bytes - self._extents.free_bytes - self._used

    def fits_together(self, sizes: Sequence[int]) -> bool:
        """Whether entries of these payload bytes could all be in the empty arena at once.

        Packs the largest first into the first slab with room; it may say no where a cleverer packing exists, never
        yes where none does.
        """
        room, slots = self._extents.rooms[0], self._extents.slots[0]
        if sum(sizes) + PAGE * len(sizes) <= room and len(sizes) <= slots:
            return True
        return all(self.fit_in_order(sorted(sizes, reverse=True)))

    def fit_in_order(self, sizes: Iterable[int]) -> list[bool]:
        """Of entries of these payload bytes, whether each could be in the empty arena at once with those before it that
        could. Packs each into the first slab with room."""
        rooms, slots = list(self._extents.rooms), list(self._extents.slots)
        fit: list[bool] = []
        for size in map(whole_pages, sizes):
            index = next((index for index, room in enumerate(rooms) if size <= room and slots[index]), None)
            if index is not None:
                rooms[index] -= size
                slots[index] -= 1
            fit.append(index is not None)
        return fit

    # ------------------------------------------------------------ storing

    def reserve(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes`, to be written and then published, carved or released.

        Evicts the least valuable unpinned entries, as few as needed, only where nothing free fits and only if the
        allocation then succeeds. A slab that `on_slab` refuses is done without, and asked for again when `ASK_AGAIN_S`
        have passed. Raises TooLarge or OutOfMemory with nothing evicted, ValueError for a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        if nbytes > self.largest_entry:
            raise TooLarge(f"{nbytes} bytes; the largest entry of this arena is {self.largest_entry}")
        size = whole_pages(nbytes)
        with self._lock:
            try:
                extent = self._extents.reserve(size) if size <= self._extents.free_bytes else None
            except SlabRefused:
                extent = None
            if extent is None:
                extent = self._succeed(size)
            if extent is None:
                self._make_room(size)
                extent = self._extents.reserve(size)
                assert extent is not None, "the plan made room"
            return extent

    def reserve_row(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Extents of at least these bytes, one behind the other: entries that land together are READ in one stretch.
        None, with nothing evicted and no slab opened, where there is no such room: `reserve` them one by one then.
        Raises ValueError for a negative size."""
        if min(sizes, default=0) < 0:
            raise ValueError(f"cannot reserve {min(sizes)} bytes")
        with self._lock:
            return self._extents.reserve_row(sizes)

    def carve(self, extent: Extent, offset: int, nbytes: int) -> Extent:
        """Split [offset, offset+nbytes), counted from the extent's start, off a reserved extent.

        What lies before and behind stays reserved to `extent`. Raises ExtentError if the piece is not page-aligned or
        not wholly part of it any more, OutOfMemory if the slab has no record to spare and nothing in it can be evicted.
        """
        with self._lock:
            piece = self._extents.carve(extent, offset, nbytes)
            if piece is None:
                self._evict(self._slot_victim(extent.slab))
                piece = self._extents.carve(extent, offset, nbytes)
                assert piece is not None, "the victim's record is free"
            return piece

    def publish(self, extent: Extent, identity: bytes, nbytes: int, rows: int, dim: int, dtype: str) -> Entry:
        """Turn a reserved extent, whose payload is in place, into a visible entry.

        If the identity is there already the old entry wins: the extent is freed and the old entry returned. Raises
        ValueError (ExtentError for the extent) with nothing changed: the extent is then still reserved.
        """
        layout = layout_of(rows, dim, dtype)
        if nbytes != layout.nbytes or type(identity) is not bytes or len(identity) != IDENTITY_BYTES:
            check(identity, nbytes, rows, dim, dtype)  # says what is wrong
        return self.publish_as(extent, identity, layout)

    def publish_as(self, extent: Extent, identity: bytes, layout: Layout) -> Entry:
        """`publish` for who knows the layout already, and has 32 bytes of identity."""
        with self._lock:
            return self._publish(extent, identity, layout)

    def publish_all(self, parts: Iterable[tuple[Extent, bytes, Layout]]) -> list[Entry]:
        """`publish_as` for each of several. Nobody can evict one before all are there."""
        with self._lock:
            return [self._publish(extent, identity, layout) for extent, identity, layout in parts]

    def _publish(self, extent: Extent, identity: bytes, layout: Layout) -> Entry:
        size, offset, slot = layout.extent_bytes, extent.offset, extent.slot
        self._extents.keep(extent, layout.nbytes)
        old = self._index.get(identity)
        if old is not None:
            self._extents.free_entry(offset, size, slot)
            self._policy.touched(identity, old.extent_bytes)
            return old
        generation = self._table.publish(extent.record, identity, layout)
        entry = Entry(identity, layout, extent.slab, offset, slot, generation)
        self._index[identity] = self._by_offset[offset] = entry
        self._policy.added(identity, size)
        self._used += size
        if self._on_stored is not None:
            self._on_stored(entry)
        return entry

    def publish_pinned(self, extent: Extent, identity: bytes, nbytes: int, rows: int, dim: int, dtype: str) -> Pin:
        """`publish`, and a pin on what is then there, before anybody can evict it."""
        with self._lock:
            return self._pin(self.publish(extent, identity, nbytes, rows, dim, dtype))

    def release(self, extent: Extent) -> None:
        """Give back what remains of a reserved extent. Raises ExtentError if it is an entry or was freed before."""
        with self._lock:
            self._extents.free(extent)

    # ------------------------------------------------------------ pins

    def pin(self, entry: Entry) -> Pin:
        """Keep a visible entry's bytes in place until the pin is closed. ValueError if it was evicted before."""
        return self.pin_all([entry])[0]

    def pin_all(self, entries: Sequence[Entry]) -> list[Pin]:
        """`pin` for each of several; none is pinned where it raises."""
        with self._lock:
            for entry in entries:
                if self._index.get(entry.identity) is not entry:
                    raise ValueError(f"cannot pin {entry}: it is not in the arena any more")
            return [self._pin(entry) for entry in entries]

    def borrow(self, identity: bytes) -> Pin | None:
        """`get` and `pin` in one step, for callers that share the backend with other threads."""
        if identity not in self._index:
            return None
        with self._lock:
            entry = self.get(identity)
            return None if entry is None else self._pin(entry)

    def _pin(self, entry: Entry) -> Pin:
        pins = self._pins.get(entry, 0)
        self._pins[entry] = pins + 1
        if not pins:
            self._pinned += entry.layout.extent_bytes
        return Pin(entry, self)

    def _unpin(self, pin: Pin) -> None:
        with self._lock:
            if pin.home is None:
                return
            pin.home = None
            entry = pin.entry
            pins = self._pins.pop(entry) - 1
            if pins:
                self._pins[entry] = pins
                return
            self._pinned -= entry.layout.extent_bytes
            if self._index.get(entry.identity) is not entry:
                self._free(entry)
            if self._on_unpinned is not None:
                self._on_unpinned(entry)

    # ------------------------------------------------------------ leaving

    def remove(self, identity: bytes) -> bool:
        """Make an entry invisible at once; its bytes are freed when the last pin closes. False if there is none."""
        with self._lock:
            entry = self._index.get(identity)
            if entry is None:
                return False
            self._evict(entry)
            return True

    def _evict(self, entry: Entry) -> None:
        self._hide(entry)
        if entry not in self._pins:
            self._free(entry)
        if self._on_evicted is not None:
            self._on_evicted(entry)

    def _hide(self, entry: Entry) -> None:
        # The record dies first: from here on a reader that is half-way through the extent discards what it has.
        self._table.invalidate(entry.record_offset)
        identity = entry.identity
        del self._index[identity], self._by_offset[entry.offset]
        self._policy.removed(identity, entry.layout.extent_bytes)

    def _free(self, entry: Entry) -> None:
        self._used -= entry.extent_bytes
        self._extents.free_entry(entry.offset, entry.extent_bytes, entry.slot)

    def _candidates(self) -> Iterator[Entry]:
        """Every entry, the first to evict in front, pinned ones included."""
        return map(self._index.__getitem__, self._policy.victims())

    def _succeed(self, size: int) -> Extent | None:
        """The place of the first victim, its record too, if it is of just this size; else None, with nothing evicted.

        No plan would be better, and in a full tier most are of few sizes: nothing is freed to be searched for again.
        """
        index, pins = self._index, self._pins
        for identity in self._policy.victims():
            victim = index[identity]
            if victim not in pins:
                break
        else:
            return None
        if victim.layout.extent_bytes != size:
            return None
        self._hide(victim)
        self._used -= size
        if self._on_evicted is not None:
            self._on_evicted(victim)
        return self._extents.succeed(victim.slab, victim.offset, size, victim.slot)

    def _make_room(self, size: int) -> None:
        chosen = None
        if size <= self._extents.free_bytes + self._used - self._pinned:
            chosen = victims.choose(self._extents, self._by_offset, self._pins, self._candidates(), size)
        if chosen is None:
            raise OutOfMemory(
                f"{size} bytes; of {self.capacity_bytes} are {self.reserved_bytes} reserved, {self.pinned_bytes} pinned"
            )
        for entry in chosen:
            self._evict(entry)

    def _slot_victim(self, slab: Slab) -> Entry:
        for entry in self._candidates():
            if entry.slab is slab and entry not in self._pins:
                return entry
        raise OutOfMemory(f"every record of the slab at {slab.offset} is pinned or reserved")
