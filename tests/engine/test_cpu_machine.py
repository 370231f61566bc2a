"""Random lives of extents and entries, with a plain model beside the backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from ec_p2p.engine import victims
from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.cpu import Entry, LocalCPUBackend, OutOfMemory, Pin, TooLarge
from ec_p2p.engine.extents import Extent, ExtentError
from ec_p2p.engine.generation import RECORD_BYTES, Record, unpack
from ec_p2p.engine.policy import make_policy
from tests.engine.tiers import entries_of

SLAB = 64 << 10
ARENA = 2 * SLAB + 4 * PAGE
ROOMS = [(1, 16), (17, 32), (33, 36)]
"""First and last page (exclusive) of each slab that extents may use."""
RECORDS = [4, 4, 1]
IDENTITIES = st.integers(0, 15).map(lambda number: bytes([number]) * 32)


@dataclass(eq=False)
class Held:
    """A reserved extent as the model sees it: pages that still belong to it."""

    extent: Extent
    first: int
    pages: set[int]


@dataclass(eq=False)
class Stored:
    """An entry as the model sees it, visible or only pinned."""

    entry: Entry
    pages: set[int]
    fill: int
    pins: list[Pin] = field(default_factory=list)
    visible: bool = True


def pages_of(offset: int, nbytes: int) -> set[int]:
    return set(range(offset // PAGE, (offset + nbytes) // PAGE))


class CpuMachine(RuleBasedStateMachine):
    reservations = Bundle("reservations")
    pins = Bundle("pins")
    policy = "LRU"
    patience = victims._PATIENCE

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(victims, "_PATIENCE", self.patience)
        self.patch.start()
        self.arena = Arena.create(ARENA, SLAB)
        self.opened: list[int] = []
        self.evicted: list[Entry] = []
        self.announced: list[Entry] = []
        self.cpu = LocalCPUBackend(
            self.arena,
            policy=make_policy(self.policy),
            on_slab=lambda offset, nbytes: self.opened.append(offset),
            on_stored=self.announced.append,
            on_evicted=self.evicted.append,
        )
        self.held: list[Held] = []
        self.stored: list[Stored] = []
        """Least recently used first."""
        self.generation = 0
        self.fills = 0

    def teardown(self) -> None:
        self.patch.stop()
        for stored in self.stored:
            for pin in stored.pins:
                pin.close()
        for held in self.held:
            self.cpu.release(held.extent)
        for entry in entries_of(self.cpu):
            self.cpu.remove(entry.identity)
        assert self.cpu.free_bytes == self.cpu.capacity_bytes == sum((end - first) * PAGE for first, end in ROOMS)
        # Everything has merged again: each slab takes its largest extent.
        for first, end in ROOMS:
            self.cpu.reserve((end - first) * PAGE)
        self.arena.close()

    # ------------------------------------------------------------ the model's own arithmetic

    def free_pages(self, without_evictable: bool) -> set[int]:
        pages = {page for first, end in ROOMS for page in range(first, end)}
        for held in self.held:
            pages -= held.pages
        for stored in self.stored:
            if stored.pins or not without_evictable:
                pages -= stored.pages
        return pages

    def records_used(self, slab: int, without_evictable: bool) -> int:
        users = [held.extent.slab for held in self.held]
        users += [stored.entry.slab for stored in self.stored if stored.pins or not without_evictable]
        return sum(user.offset == slab * SLAB for user in users)

    def has_room(
        self, pages: int, without_evictable: bool, records: int = 1, slabs: Sequence[int] = range(len(ROOMS))
    ) -> bool:
        free = self.free_pages(without_evictable)
        for slab in slabs:
            first, end = ROOMS[slab]
            if self.records_used(slab, without_evictable) + records > RECORDS[slab]:
                continue
            for start in range(first, end - pages + 1):
                if free.issuperset(range(start, start + pages)):
                    return True
        return False

    def forget_evicted(self) -> None:
        for entry in self.evicted:
            stored = next(stored for stored in self.stored if stored.entry is entry)
            assert stored.visible
            stored.visible = False
            if not stored.pins:
                self.stored.remove(stored)
        self.evicted.clear()

    def find(self, identity: bytes) -> Stored | None:
        return next((s for s in self.stored if s.visible and s.entry.identity == identity), None)

    def touch(self, stored: Stored) -> None:
        self.stored.remove(stored)
        self.stored.append(stored)

    # ------------------------------------------------------------ extents

    @rule(target=reservations, nbytes=st.integers(0, 17 * PAGE))
    def reserve(self, nbytes: int) -> object:
        pages = max(1, -(-nbytes // PAGE))
        fits_now = self.has_room(pages, without_evictable=False)
        fits_at_all = self.has_room(pages, without_evictable=True)
        try:
            extent = self.cpu.reserve(nbytes)
        except TooLarge:
            assert pages > 15
            assert not self.evicted
            return multiple()
        except OutOfMemory:
            assert not fits_at_all
            assert not self.evicted
            return multiple()
        assert fits_at_all
        assert bool(self.evicted) != fits_now
        # Each victim was needed: with it back in place, the allocation would not have fitted where it went.
        taken = pages_of(extent.offset, extent.nbytes)
        evicted = [stored for stored in self.stored if stored.entry in self.evicted]
        assert not any(stored.pins for stored in evicted)
        if len(evicted) > 1:  # a single one may have been needed for its record only
            assert all(stored.pages & taken for stored in evicted)
        self.forget_evicted()
        assert taken <= self.free_pages(without_evictable=False)
        assert len(taken) == pages
        held = Held(extent, extent.offset // PAGE, taken)
        self.held.append(held)
        return held

    @rule(target=reservations, sizes=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=5))
    def reserve_row(self, sizes: list[int]) -> object:
        opened = range(len(self.opened))
        pages = [max(1, -(-nbytes // PAGE)) for nbytes in sizes]
        fits = self.has_room(sum(pages), without_evictable=False, records=len(sizes), slabs=opened)
        free = self.free_pages(without_evictable=False)
        row = self.cpu.reserve_row(sizes)
        assert not self.evicted
        assert len(self.opened) == len(opened)
        assert (row is not None) == fits
        held = []
        for extent, size in zip(row or (), pages, strict=row is not None):
            held.append(Held(extent, extent.offset // PAGE, pages_of(extent.offset, size * PAGE)))
            assert extent.nbytes == size * PAGE
            assert held[-1].pages <= free
        for one, next_one in itertools.pairwise(held):
            assert one.extent.offset + one.extent.nbytes == next_one.extent.offset
            assert one.extent.record < next_one.extent.record
        self.held += held
        return multiple(*held)

    @rule(target=reservations, held=reservations, offset=st.integers(-1, 15), pages=st.integers(0, 8))
    def carve(self, held: Held, offset: int, pages: int) -> object:
        if held not in self.held:
            return multiple()
        wanted = set(range(held.first + offset, held.first + offset + max(1, pages)))
        slab = held.extent.slab
        evictable = [s for s in self.stored if s.visible and not s.pins and s.entry.slab == slab]
        number = slab.offset // SLAB
        full = self.records_used(number, without_evictable=False) == RECORDS[number]
        try:
            piece = self.cpu.carve(held.extent, offset * PAGE, pages * PAGE)
        except ExtentError:
            assert offset < 0 or not wanted <= held.pages
            assert not self.evicted
            return multiple()
        except OutOfMemory:
            assert full
            assert not evictable
            return multiple()
        assert wanted <= held.pages
        if self.policy == "LRU":
            assert self.evicted == ([evictable[0].entry] if full else [])
        else:
            assert len(self.evicted) == full
            assert all(entry in [stored.entry for stored in evictable] for entry in self.evicted)
        self.forget_evicted()
        held.pages -= wanted
        assert pages_of(piece.offset, piece.nbytes) == wanted
        carved = Held(piece, piece.offset // PAGE, wanted)
        self.held.append(carved)
        return carved

    @rule(held=consumes(reservations))
    def release(self, held: Held) -> None:
        if held in self.held:
            self.held.remove(held)
            self.cpu.release(held.extent)
        try:
            self.cpu.release(held.extent)
        except ExtentError:
            return
        raise AssertionError("an extent was released twice")

    # ------------------------------------------------------------ entries

    @rule(identity=IDENTITIES, pages=st.integers(1, 8))
    def store(self, identity: bytes, pages: int) -> None:
        held = self.reserve(pages * PAGE)
        if isinstance(held, Held):
            self.publish(held, identity, 0)

    @rule(held=consumes(reservations), identity=IDENTITIES, short=st.integers(0, 2 * PAGE))
    def publish(self, held: Held, identity: bytes, short: int) -> None:
        if held not in self.held:
            return
        extent = held.extent
        nbytes = max(0, extent.nbytes - short)
        kept = pages_of(extent.offset, max(PAGE, -(-nbytes // PAGE) * PAGE))
        if held.pages != pages_of(extent.offset, extent.nbytes):
            try:
                self.cpu.publish(extent, identity, nbytes, 1, nbytes, "uint8")
            except ExtentError:
                return  # pieces were carved out: it stays reserved
            raise AssertionError("a carved window became an entry")
        self.fills = self.fills % 255 + 1
        self.arena.buffer[extent.offset : extent.offset + extent.nbytes] = bytes([self.fills]) * extent.nbytes
        old = self.find(identity)
        entry = self.cpu.publish(extent, identity, nbytes, 1, nbytes, "uint8")
        self.held.remove(held)
        if old is not None:
            assert entry is old.entry
            assert not self.announced
            self.touch(old)
            return
        assert self.announced.pop() is entry
        assert entry.generation > self.generation
        self.generation = entry.generation
        self.stored.append(Stored(entry, kept, self.fills))

    @rule(identity=IDENTITIES)
    def get(self, identity: bytes) -> None:
        stored = self.find(identity)
        assert self.cpu.peek(identity) is (stored and stored.entry)
        assert self.cpu.get(identity) is (stored and stored.entry)
        if stored is not None:
            self.touch(stored)

    @rule(identity=IDENTITIES)
    def remove(self, identity: bytes) -> None:
        stored = self.find(identity)
        assert self.cpu.remove(identity) == (stored is not None)
        assert self.evicted == ([] if stored is None else [stored.entry])
        self.forget_evicted()

    @precondition(lambda self: any(stored.visible for stored in self.stored))
    @rule(target=pins, choice=st.integers(0, 100))
    def pin(self, choice: int) -> tuple[Stored, Pin]:
        visible = [stored for stored in self.stored if stored.visible]
        stored = visible[choice % len(visible)]
        pin = self.cpu.pin(stored.entry)
        stored.pins.append(pin)
        return stored, pin

    @rule(pair=consumes(pins))
    def unpin(self, pair: tuple[Stored, Pin]) -> None:
        stored, pin = pair
        pin.close()
        pin.close()
        stored.pins.remove(pin)
        if not stored.pins and not stored.visible:
            self.stored.remove(stored)

    # ------------------------------------------------------------ always

    @invariant()
    def bytes_are_conserved(self) -> None:
        assert self.cpu.used_bytes == PAGE * sum(len(stored.pages) for stored in self.stored)
        assert self.cpu.pinned_bytes == PAGE * sum(len(stored.pages) for stored in self.stored if stored.pins)
        assert self.cpu.reserved_bytes == PAGE * sum(len(held.pages) for held in self.held)
        assert self.cpu.free_bytes == PAGE * len(self.free_pages(without_evictable=False))

    @invariant()
    def nothing_overlaps(self) -> None:
        owners = [held.pages for held in self.held] + [stored.pages for stored in self.stored]
        assert sum(map(len, owners)) == len(set().union(*owners))

    @invariant()
    def entries_hold_their_bytes(self) -> None:
        for stored in self.stored:
            at, nbytes = stored.entry.offset, len(stored.pages) * PAGE
            assert self.arena.buffer[at : at + nbytes] == bytes([stored.fill]) * nbytes

    @invariant()
    def records_tell_what_is_visible(self) -> None:
        records: dict[int, Record] = {}
        for stored in self.stored:
            entry = stored.entry
            if stored.visible:
                records[entry.record_offset] = Record(
                    entry.generation, entry.identity, entry.nbytes, entry.rows, entry.dim, entry.dtype
                )
        for slab, count in enumerate(RECORDS):
            for at in range(slab * SLAB, slab * SLAB + count * RECORD_BYTES, RECORD_BYTES):
                record = unpack(self.arena.buffer[at : at + RECORD_BYTES])
                assert record == records[at] if at in records else record.generation == 0

    @invariant()
    def the_index_is_the_models(self) -> None:
        visible = {id(stored.entry) for stored in self.stored if stored.visible}
        assert {id(entry) for entry in entries_of(self.cpu)} == visible
        assert self.opened == [index * SLAB for index in range(len(self.opened))]


class GdsfMachine(CpuMachine):
    policy = "GDSF"


class ImpatientMachine(CpuMachine):
    """Plans take in neighbours out of turn, as in a tier too large for a long search."""

    patience = 1


TestCpuMachine = CpuMachine.TestCase
TestGdsfMachine = GdsfMachine.TestCase
TestImpatientMachine = ImpatientMachine.TestCase
TestCpuMachine.settings = TestGdsfMachine.settings = TestImpatientMachine.settings = settings(
    max_examples=80, stateful_step_count=80
)
