from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest

from ec_p2p.engine import victims
from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.cpu import Entry, LocalCPUBackend, OutOfMemory, TooLarge
from ec_p2p.engine.entry import layout_of
from ec_p2p.engine.extents import ASK_AGAIN_S, Extent, ExtentError, SlabRefused
from ec_p2p.engine.generation import RECORD_BYTES, unpack
from tests.engine.tiers import entries_of

SLAB = 64 << 10
"""One page of table with 4 records, then 15 pages of extents."""

ROOM = 15


def identity(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Backend:
    """A backend over `slabs` small slabs, with a log of what its listeners heard."""

    def __init__(self, slabs: int = 1) -> None:
        self.arena = Arena.create(slabs * SLAB, SLAB)
        self.log: list[tuple[str, int]] = []
        self.cpu = LocalCPUBackend(
            self.arena,
            on_slab=lambda offset, nbytes: self.log.append(("slab", offset // SLAB)),
            on_stored=lambda entry: self.log.append(("stored", int.from_bytes(entry.identity, "little"))),
            on_evicted=lambda entry: self.log.append(("evicted", int.from_bytes(entry.identity, "little"))),
        )

    def store(self, number: int, pages: int) -> Entry:
        return self.publish(self.cpu.reserve(pages * PAGE), number)

    def publish(self, extent: Extent, number: int) -> Entry:
        return self.cpu.publish(extent, identity(number), extent.nbytes, 1, extent.nbytes, "uint8")

    def numbers(self) -> set[int]:
        return {int.from_bytes(entry.identity, "little") for entry in entries_of(self.cpu)}

    def evicted(self) -> list[int]:
        return [number for event, number in self.log if event == "evicted"]


@pytest.fixture
def one() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.arena.close()


@pytest.fixture
def two() -> Iterator[Backend]:
    backend = Backend(2)
    yield backend
    backend.arena.close()


# ---------------------------------------------------------------- index


def test_a_published_entry_is_found_and_its_record_says_so(one: Backend) -> None:
    extent = one.cpu.reserve(100)
    entry = one.cpu.publish(extent, identity(7), 100, 5, 10, "float16")
    assert one.cpu.get(identity(7)) is one.cpu.peek(identity(7)) is entry
    assert (entry.offset, entry.nbytes, entry.record_offset) == (extent.offset, 100, extent.record)
    record = unpack(one.arena.buffer[entry.record_offset : entry.record_offset + RECORD_BYTES])
    assert record == (entry.generation, identity(7), 100, 5, 10, "float16")
    assert one.cpu.get(identity(8)) is one.cpu.peek(identity(8)) is None
    assert len(one.cpu) == 1


def test_the_first_entry_of_an_identity_wins(one: Backend) -> None:
    first = one.store(7, 2)
    second = one.cpu.reserve(3 * PAGE)
    assert one.publish(second, 7) is first
    assert one.cpu.used_bytes == 2 * PAGE
    assert one.cpu.reserved_bytes == 0
    assert one.log == [("slab", 0), ("stored", 7)]
    with pytest.raises(ExtentError):
        one.cpu.release(second)


def test_several_become_visible_together_and_the_first_of_an_identity_wins(one: Backend) -> None:
    old = one.store(7, 2)
    layout = layout_of(1, 2 * PAGE, "uint8")
    row = one.cpu.reserve_row([2 * PAGE] * 3)
    assert row is not None
    first, same, again = one.cpu.publish_all(
        [(extent, identity(n), layout) for extent, n in zip(row, (8, 7, 8), strict=True)]
    )
    assert (same, again) == (old, first)
    assert first.offset == row[0].offset
    assert [one.cpu.peek(identity(n)) for n in (7, 8)] == [old, first]
    assert one.cpu.used_bytes == 4 * PAGE
    assert one.cpu.reserved_bytes == 0
    assert one.log == [("slab", 0), ("stored", 7), ("stored", 8)]


def test_several_are_pinned_together_or_not_at_all(one: Backend) -> None:
    first, second = one.store(7, 2), one.store(8, 3)
    pins = one.cpu.pin_all([first, second, first])
    assert [pin.entry for pin in pins] == [first, second, first]
    assert one.cpu.pinned_bytes == 5 * PAGE
    for pin in pins:
        pin.close()
    one.cpu.remove(identity(8))
    with pytest.raises(ValueError, match="cannot pin"):
        one.cpu.pin_all([first, second])
    assert one.cpu.pinned_bytes == 0


def test_a_row_of_nothing_takes_nothing_and_none_of_less_than_nothing_is_had(one: Backend) -> None:
    one.store(7, 2)
    assert one.cpu.reserve_row([]) == []
    with pytest.raises(ValueError, match="cannot reserve -8192 bytes"):
        one.cpu.reserve_row([3 * PAGE, -2 * PAGE])
    assert one.cpu.free_bytes == (ROOM - 2) * PAGE
    row = one.cpu.reserve_row([PAGE] * 3)  # all the records that there are
    assert row is not None
    assert one.cpu.reserve_row([PAGE]) is None


def test_who_listens_and_holds_a_pin_is_collected_with_both() -> None:
    class Listener:
        def __init__(self) -> None:
            self.cpu = LocalCPUBackend(Arena.create(8 * PAGE, 8 * PAGE), on_unpinned=self.unpinned)
            extent = self.cpu.reserve(PAGE)
            self.pin = self.cpu.publish_pinned(extent, identity(1), PAGE, 1, PAGE, "uint8")

        def unpinned(self, entry: Entry) -> None: ...

    listener = Listener()
    listener.cpu.arena.close()
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None


def test_what_does_not_fit_a_record_stays_reserved(one: Backend) -> None:
    extent = one.cpu.reserve(PAGE)
    for bad in [
        (b"x", 4, 1, 4, "uint8"),
        (bytearray(32), 4, 1, 4, "uint8"),
        (identity(1), 4, 1, 3, "uint8"),
        (identity(1), 4, -1, -4, "uint8"),
        (identity(1), 0, 0, 1 << 32, "uint8"),
        (identity(1), 4, 1, 4, "uint3"),
    ]:
        with pytest.raises(ValueError):
            one.cpu.publish(extent, *bad)  # type: ignore[arg-type]
    with pytest.raises(ExtentError, match="cannot hold"):
        one.cpu.publish(extent, identity(1), PAGE + 1, 1, PAGE + 1, "uint8")
    assert one.cpu.reserved_bytes == PAGE
    one.cpu.release(extent)
    assert one.cpu.free_bytes == one.cpu.capacity_bytes
    assert one.numbers() == set()


def test_remove_hides_at_once(one: Backend) -> None:
    entry = one.store(7, 2)
    assert one.cpu.remove(identity(7))
    assert not one.cpu.remove(identity(7))
    assert one.cpu.peek(identity(7)) is None
    assert one.cpu.free_bytes == one.cpu.capacity_bytes
    assert unpack(one.arena.buffer[entry.record_offset : entry.record_offset + RECORD_BYTES]).generation == 0
    assert one.log[1:] == [("stored", 7), ("evicted", 7)]


def test_generations_are_never_reused(one: Backend) -> None:
    seen = set()
    for _ in range(50):
        entry = one.store(7, 1)
        assert entry.generation not in seen
        seen.add(entry.generation)
        one.cpu.remove(identity(7))


def test_an_arena_without_room_for_one_entry_is_refused() -> None:
    with Arena.create(PAGE, PAGE) as arena, pytest.raises(ValueError, match="no room"):
        LocalCPUBackend(arena)


# ---------------------------------------------------------------- eviction


def test_nothing_is_evicted_while_something_free_fits(two: Backend) -> None:
    two.store(1, 5)
    two.store(2, 12)
    two.store(3, 10)
    assert two.evicted() == []
    assert two.log[0] == ("slab", 0)
    assert ("slab", 1) in two.log


def test_the_least_recently_used_goes_first_and_alone(one: Backend) -> None:
    for number in (1, 2, 3):
        one.store(number, 5)
    one.cpu.get(identity(1))
    one.store(4, 4)
    assert one.evicted() == [2]


def test_a_victim_of_the_size_asked_for_is_succeeded_in_its_place(one: Backend) -> None:
    """Also where free pages lie before it, which stay free, and where an older one is pinned."""
    first, second, third, fourth = [one.store(number, pages) for number, pages in [(1, 2), (2, 4), (3, 4), (4, 5)]]
    one.cpu.remove(first.identity)
    pin = one.cpu.pin(third)
    for place in (second, fourth):
        extent = one.cpu.reserve(place.nbytes)
        assert (extent.offset, extent.nbytes, extent.record) == (place.offset, place.nbytes, place.record_offset)
        assert unpack(one.arena.buffer[extent.record : extent.record + RECORD_BYTES]).generation == 0
        assert one.cpu.free_bytes == 2 * PAGE
    assert one.evicted() == [1, 2, 4]
    assert one.cpu.used_bytes == third.nbytes
    pin.close()


def test_peek_does_not_touch(one: Backend) -> None:
    for number in (1, 2, 3):
        one.store(number, 5)
    one.cpu.peek(identity(1))
    one.store(4, 5)
    assert one.evicted() == [1]


def test_storing_again_touches(one: Backend) -> None:
    for number in (1, 2):
        one.store(number, 5)
    one.store(1, 5)
    one.store(3, 10)
    assert one.evicted() == [2]


def test_old_entries_that_would_not_help_stay(two: Backend) -> None:
    # The oldest lies alone between pinned neighbours; the next two are neighbours of each other.
    pins = []
    for number, pages in [(1, 5), (2, 5), (3, 5)]:
        entry = two.store(number, pages)
        if number != 2:
            pins.append(two.cpu.pin(entry))
    two.store(4, 7)
    two.store(5, 8)
    two.cpu.get(identity(2))  # so that 2 is evicted only if it is needed
    two.store(6, 15)
    assert two.evicted() == [4, 5]
    assert two.numbers() == {1, 2, 3, 6}
    for pin in pins:
        pin.close()


def test_only_as_much_of_a_run_as_needed_is_evicted(one: Backend) -> None:
    for number, pages in [(1, 3), (2, 4), (3, 4), (4, 4)]:
        one.store(number, pages)
    for number in (1, 3, 2, 4):
        one.cpu.get(identity(number))
    # 1, 3 and 2 make a run of 11; 8 fit into 2 and 3 alone.
    one.store(5, 8)
    assert one.evicted() == [2, 3]


@pytest.mark.parametrize(("patience", "gone"), [(2, [3, 4]), (1024, [2])])
def test_a_long_search_ends_with_the_smallest_younger_neighbours(
    two: Backend, monkeypatch: pytest.MonkeyPatch, patience: int, gone: list[int]
) -> None:
    monkeypatch.setattr(victims, "_PATIENCE", patience)
    # By address: 1 to 4 in one slab, 5 to 7 in the other.
    for number, pages in [(1, 2), (2, 6), (3, 4), (4, 3), (5, 4), (6, 7), (7, 4)]:
        two.store(number, pages)
    for number in (1, 3, 5, 7, 2, 4, 6):
        two.cpu.get(identity(number))
    # With 1 goes 2, which has 6 pages, with 3 goes 4, which has 3; alone, 2 would do, but comes too late.
    two.store(8, 6)
    assert two.evicted() == gone


def test_a_search_that_pins_cut_short_goes_on(two: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims, "_PATIENCE", 1)
    # By address: 1 to 3 in one slab, 4 to 6 in the other.
    sizes = {1: 3, 2: 9, 3: 3, 4: 4, 5: 3, 6: 8}
    entries = {number: two.store(number, pages) for number, pages in sizes.items()}
    for number in (1, 4, 6, 5, 3):
        two.cpu.get(identity(number))
    with two.cpu.pin(entries[2]):
        # The neighbour of 1 is pinned. 4 takes a younger one along before 6, which would do alone, has its turn.
        two.store(7, 6)
    assert two.evicted() == [4, 5]


def test_too_large_evicts_nothing(one: Backend) -> None:
    for number in (1, 2, 3):
        one.store(number, 5)
    assert one.cpu.largest_entry == ROOM * PAGE
    with pytest.raises(TooLarge, match=str(ROOM * PAGE)):
        one.cpu.reserve(ROOM * PAGE + 1)
    assert one.numbers() == {1, 2, 3}


@pytest.mark.parametrize("holder", ["pin", "reservation"])
def test_out_of_memory_evicts_nothing(one: Backend, holder: str) -> None:
    one.store(1, 5)
    if holder == "pin":
        one.cpu.pin(one.store(2, 5))
    else:
        one.cpu.reserve(5 * PAGE)
    one.store(3, 5)
    with pytest.raises(OutOfMemory, match="24576 bytes"):
        one.cpu.reserve(6 * PAGE)
    assert {1, 3} <= one.numbers()
    assert one.evicted() == []


def test_a_negative_size_is_an_error(one: Backend) -> None:
    with pytest.raises(ValueError, match="-1"):
        one.cpu.reserve(-1)


def test_without_a_record_to_spare_something_is_evicted(one: Backend) -> None:
    for number in range(4):
        one.store(number, 1)
    one.store(4, 1)
    assert one.evicted() == [0]


def test_with_all_records_pinned_there_is_no_memory(one: Backend) -> None:
    for number in range(4):
        one.cpu.pin(one.store(number, 1))
    with pytest.raises(OutOfMemory):
        one.cpu.reserve(PAGE)


def test_ages_of_random_sizes_end_in_one_free_range(two: Backend) -> None:
    rng = random.Random(0)
    for number in range(5000):
        two.store(number, rng.choice([1, 1, 2, 3, 5, 8, 13]))
    for entry in entries_of(two.cpu):
        two.cpu.remove(entry.identity)
    assert two.cpu.free_bytes == two.cpu.capacity_bytes
    for _ in range(2):
        two.cpu.reserve(ROOM * PAGE)


# ---------------------------------------------------------------- pins


def test_a_pinned_entry_is_no_victim_until_its_last_pin_closes(one: Backend) -> None:
    entry = one.store(1, 8)
    first, second = one.cpu.pin(entry), one.cpu.pin(entry)
    assert one.cpu.pinned_bytes == 8 * PAGE
    one.store(2, 7)
    first.close()
    first.close()
    one.store(3, 7)
    assert one.evicted() == [2]
    with second as pin:
        assert pin.entry is entry
    assert one.cpu.pinned_bytes == 0
    one.store(4, 15)
    assert one.evicted() == [2, 1, 3]


def test_a_removed_entry_keeps_its_bytes_while_pinned(one: Backend) -> None:
    entry = one.store(1, 8)
    pin = one.cpu.pin(entry)
    one.cpu.remove(identity(1))
    assert (one.cpu.used_bytes, one.cpu.pinned_bytes) == (8 * PAGE, 8 * PAGE)
    with pytest.raises(OutOfMemory):
        one.cpu.reserve(8 * PAGE)
    with pytest.raises(ValueError, match="not in the arena any more"):
        one.cpu.pin(entry)
    again = one.store(1, 7)
    assert one.cpu.get(identity(1)) is again
    pin.close()
    assert (one.cpu.used_bytes, one.cpu.pinned_bytes) == (7 * PAGE, 0)
    assert one.cpu.get(identity(1)) is again
    one.cpu.reserve(8 * PAGE)


def test_borrow_is_get_and_pin(one: Backend) -> None:
    assert one.cpu.borrow(identity(1)) is None
    one.store(1, 5)
    one.store(2, 5)
    pin = one.cpu.borrow(identity(1))
    assert pin is not None
    assert one.cpu.pinned_bytes == 5 * PAGE
    pin.close()
    one.store(3, 10)
    assert one.evicted() == [2]


# ---------------------------------------------------------------- windows


def test_entries_are_carved_out_of_a_window(one: Backend) -> None:
    window = one.cpu.reserve(10 * PAGE)
    first = one.publish(one.cpu.carve(window, 0, 2 * PAGE), 1)
    second = one.publish(one.cpu.carve(window, 4 * PAGE, PAGE), 2)
    assert (first.offset, second.offset) == (window.offset, window.offset + 4 * PAGE)
    assert (one.cpu.used_bytes, one.cpu.reserved_bytes) == (3 * PAGE, 7 * PAGE)
    one.cpu.release(window)
    assert (one.cpu.used_bytes, one.cpu.reserved_bytes) == (3 * PAGE, 0)
    with pytest.raises(ExtentError, match="is not reserved"):
        one.cpu.carve(window, 0, PAGE)
    with pytest.raises(ExtentError, match="is not reserved"):
        one.cpu.release(window)


def test_a_window_carved_empty_is_still_to_be_released(one: Backend) -> None:
    window = one.cpu.reserve(2 * PAGE)
    one.cpu.release(one.cpu.carve(window, 0, 2 * PAGE))
    assert window.remaining == 0
    one.cpu.release(window)
    assert one.cpu.free_bytes == one.cpu.capacity_bytes


def test_carving_evicts_for_a_record_only(one: Backend) -> None:
    window = one.cpu.reserve(10 * PAGE)
    for number in range(4):
        one.publish(one.cpu.carve(window, number * PAGE, PAGE), number)
    assert one.evicted() == [0]
    one.cpu.pin(one.store(9, 1))
    one.cpu.remove(identity(2))
    one.cpu.remove(identity(3))
    pieces = [one.cpu.carve(window, number * PAGE, PAGE) for number in (5, 6)]
    with pytest.raises(OutOfMemory, match="record"):
        one.cpu.carve(window, 7 * PAGE, PAGE)
    one.cpu.release(pieces[0])
    one.cpu.carve(window, 7 * PAGE, PAGE)


# ---------------------------------------------------------------- what fits at all


@pytest.mark.parametrize(
    ("pages", "fits"),
    [
        ([], True),
        ([15], True),
        ([16], False),
        ([15, 15], True),
        ([15, 15, 1], False),
        ([8, 8], True),
        ([8, 8, 8], False),
        ([7, 8, 7, 8], True),
        ([1] * 8, True),
        ([1] * 9, False),
    ],
)
def test_fits_together(two: Backend, pages: list[int], fits: bool) -> None:
    two.cpu.pin(two.store(1, 15))  # what is there now does not matter
    assert two.cpu.fits_together([number * PAGE for number in pages]) is fits


def test_what_fits_is_said_in_order(two: Backend) -> None:
    pages = [8, 8, 8, 7, 0, 7, 1]
    fit = two.cpu.fit_in_order(number * PAGE for number in pages)
    assert fit == [True, True, False, True, True, False, True]


def test_zero_bytes_take_a_page(one: Backend) -> None:
    entry = one.cpu.publish(one.cpu.reserve(0), identity(1), 0, 0, 4096, "bfloat16")
    assert entry.nbytes == 0
    assert one.cpu.used_bytes == PAGE
    assert one.cpu.fits_together([0] * 4)
    assert not one.cpu.fits_together([0] * 5)


def test_a_slab_that_was_refused_is_not_asked_for_with_every_eviction() -> None:
    asked: list[int] = []
    refuse = [True]

    def on_slab(offset: int, nbytes: int) -> None:
        asked.append(offset // SLAB)
        if offset and refuse:
            raise SlabRefused("locked memory")

    now = [0.0]
    with Arena.create(3 * SLAB, SLAB) as arena:
        cpu = LocalCPUBackend(arena, on_slab=on_slab, clock=lambda: now[0])

        def store(*numbers: int) -> None:
            """Of two sizes by turns, so that none takes the place of the one before."""
            for number in numbers:
                nbytes = (ROOM - number % 2) * PAGE
                cpu.publish(cpu.reserve(nbytes), identity(number), nbytes, 1, nbytes, "uint8")

        store(0)
        assert cpu.usable_bytes == cpu.capacity_bytes == 3 * ROOM * PAGE
        store(*range(1, 11))
        assert asked == [0, 1]
        assert cpu.usable_bytes == ROOM * PAGE, "what is behind it cannot be had, either"
        now[0] = ASK_AGAIN_S - 0.1
        store(11)
        assert asked == [0, 1]
        now[0] = ASK_AGAIN_S
        store(12, 13)
        assert asked == [0, 1, 1]
        refuse.clear()
        now[0] = 2 * ASK_AGAIN_S
        store(14, 15)
        assert asked == [0, 1, 1, 1, 2], "with one granted, the next is asked for when it is needed"
        assert len(cpu) == 3
        assert cpu.usable_bytes == cpu.capacity_bytes
