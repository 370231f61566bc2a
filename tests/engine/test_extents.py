from __future__ import annotations

from collections.abc import Iterator

import pytest

from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.extents import Extent, ExtentError, Extents

SLAB = 64 << 10
"""One page of table with 4 records, then 15 pages of extents."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(3 * SLAB + 5 * PAGE, SLAB) as arena:
        yield arena


@pytest.fixture
def extents(arena: Arena) -> Extents:
    return Extents(arena)


def reserve(extents: Extents, pages: int) -> Extent:
    extent = extents.reserve(pages * PAGE)
    assert extent is not None
    return extent


def free_ranges(extents: Extents) -> list[tuple[int, int]]:
    """(start, end) of every free range of the open slabs, in address order, as seen from both of its ends."""
    starts = [(start, extents.free_starting_at(start)) for start in range(0, extents.open_slabs * SLAB, PAGE)]
    ranges = [(start, end) for start, end in starts if end is not None]
    assert all(extents.free_ending_at(end) == start for start, end in ranges)
    return ranges


def test_rooms_and_slots_leave_out_the_tables(extents: Extents) -> None:
    assert extents.rooms == [15 * PAGE] * 3 + [4 * PAGE]
    assert extents.slots == [4, 4, 4, 1]
    assert extents.free_bytes == 49 * PAGE


def test_a_last_slab_of_one_page_is_left_unused() -> None:
    with Arena.create(SLAB + PAGE, SLAB) as arena:
        assert Extents(arena).rooms == [15 * PAGE]


@pytest.mark.parametrize(("nbytes", "taken"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_extents_are_whole_pages_and_never_empty(extents: Extents, nbytes: int, taken: int) -> None:
    extent = extents.reserve(nbytes)
    assert extent is not None
    assert (extent.nbytes, extent.offset % PAGE) == (taken, 0)
    assert extents.free_bytes == 49 * PAGE - taken


def test_slabs_open_in_order_and_only_when_no_open_one_fits(arena: Arena) -> None:
    opened: list[tuple[int, int]] = []
    extents = Extents(arena, lambda offset, nbytes: opened.append((offset, nbytes)))
    assert opened == []
    reserve(extents, 10)
    assert opened == [(0, SLAB)]
    reserve(extents, 5)
    assert opened == [(0, SLAB)]
    reserve(extents, 15)
    reserve(extents, 1)
    assert opened == [(0, SLAB), (SLAB, SLAB), (2 * SLAB, SLAB)]
    assert extents.reserve(15 * PAGE) is None
    assert len(opened) == 3
    reserve(extents, 14)
    reserve(extents, 4)
    assert opened[3:] == [(3 * SLAB, 5 * PAGE)]
    assert extents.free_bytes == 0


def test_a_slab_that_its_callback_refuses_stays_closed(arena: Arena) -> None:
    refuse = [True]

    def on_slab(offset: int, nbytes: int) -> None:
        if refuse:
            raise RuntimeError("no registration")

    extents = Extents(arena, on_slab)
    with pytest.raises(RuntimeError, match="no registration"):
        extents.reserve(PAGE)
    assert extents.open_slabs == 0
    refuse.clear()
    assert reserve(extents, 1).offset == PAGE


def test_the_smallest_range_that_fits_is_taken(extents: Extents) -> None:
    first, second, third = (reserve(extents, pages) for pages in (5, 3, 2))
    reserve(extents, 5)
    extents.free(first)
    extents.free(third)
    assert reserve(extents, 2).offset == third.offset
    assert reserve(extents, 2).offset == first.offset
    extents.free(second)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_freed_neighbours_merge(extents: Extents, order: tuple[int, ...]) -> None:
    parts = [reserve(extents, 5) for _ in range(3)]
    for index in order:
        extents.free(parts[index])
    assert free_ranges(extents) == [(PAGE, SLAB)]


def test_a_range_without_a_record_to_spare_is_passed_over(extents: Extents) -> None:
    held = [reserve(extents, 1) for _ in range(4)]
    assert reserve(extents, 1).slab.offset == SLAB
    extents.free(held[2])
    assert reserve(extents, 1).offset == held[2].offset


def test_a_row_lies_side_by_side_with_its_records_in_order(extents: Extents) -> None:
    for extent in [reserve(extents, 1) for _ in range(3)]:
        extents.free(extent)
    row = extents.reserve_row([PAGE, 3 * PAGE - 1, 1])
    assert row is not None
    assert [(extent.offset // PAGE, extent.nbytes // PAGE) for extent in row] == [(1, 1), (2, 3), (5, 1)]
    assert [extent.record for extent in row] == [0, 64, 128]
    for extent in row:
        extents.free(extent)
    assert free_ranges(extents) == [(PAGE, SLAB)]


@pytest.mark.parametrize("sizes", [[8 * PAGE, 8 * PAGE], [PAGE] * 5], ids=["no room", "no records"])
def test_a_row_that_no_open_slab_takes_opens_none(extents: Extents, sizes: list[int]) -> None:
    assert extents.reserve_row([PAGE]) is None
    extents.free(reserve(extents, 1))
    assert extents.reserve_row(sizes) is None
    assert extents.open_slabs == 1
    assert free_ranges(extents) == [(PAGE, SLAB)]


def test_slabs_with_room_are_told(extents: Extents) -> None:
    assert extents.slabs_with(PAGE) == set()
    reserve(extents, 10)
    reserve(extents, 12)
    assert [extents.slabs_with(pages * PAGE) for pages in (1, 3, 4, 5, 6)] == [{0, 1}, {0, 1}, {0}, {0}, set()]


def test_records_are_distinct_and_in_their_slabs_table(extents: Extents) -> None:
    taken = [reserve(extents, 1) for _ in range(13)]
    assert len({extent.record for extent in taken}) == 13
    for extent in taken:
        assert 0 <= extent.record - extent.slab.offset < 4 * 64
    assert extents.reserve(PAGE) is None


def test_carving_leaves_gap_and_tail_with_the_window(extents: Extents) -> None:
    window = reserve(extents, 10)
    piece = extents.carve(window, 2 * PAGE, PAGE + 1)
    assert piece is not None
    assert (piece.offset, piece.nbytes, piece.slab) == (window.offset + 2 * PAGE, 2 * PAGE, window.slab)
    assert piece.record != window.record
    assert window.remaining == 8 * PAGE
    assert (window.offset, window.nbytes) == (PAGE, 10 * PAGE)
    tail = extents.carve(window, 4 * PAGE, 6 * PAGE)
    assert tail is not None
    extents.free(window)
    assert free_ranges(extents) == [(PAGE, 3 * PAGE), (11 * PAGE, SLAB)]
    extents.free(piece)
    extents.free(tail)
    assert free_ranges(extents) == [(PAGE, SLAB)]


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(1, PAGE), (-PAGE, PAGE), (0, -1), (0, 11 * PAGE), (9 * PAGE, PAGE + 1), (10 * PAGE, 0), (1 << 60, PAGE)],
)
def test_carving_outside_the_window_is_refused(extents: Extents, offset: int, nbytes: int) -> None:
    window = reserve(extents, 10)
    with pytest.raises(ExtentError, match="cannot carve"):
        extents.carve(window, offset, nbytes)
    assert window.remaining == 10 * PAGE


def test_carving_the_same_bytes_twice_is_refused(extents: Extents) -> None:
    window = reserve(extents, 10)
    assert extents.carve(window, 2 * PAGE, 3 * PAGE)
    for offset, pages in [(2, 1), (4, 1), (0, 3), (0, 10), (4, 2)]:
        with pytest.raises(ExtentError, match="cannot carve"):
            extents.carve(window, offset * PAGE, pages * PAGE)
    assert window.remaining == 7 * PAGE


def test_carving_without_a_record_to_spare_gives_none(extents: Extents) -> None:
    window = reserve(extents, 10)
    for page in range(3):
        assert extents.carve(window, page * PAGE, PAGE)
    assert extents.carve(window, 5 * PAGE, PAGE) is None
    assert window.remaining == 7 * PAGE


def test_a_carved_window_never_becomes_an_entry(extents: Extents) -> None:
    window = reserve(extents, 10)
    extents.carve(window, 0, PAGE)
    with pytest.raises(ExtentError, match="pieces were carved"):
        extents.keep(window, PAGE)


def test_an_entry_must_fit_its_extent(extents: Extents) -> None:
    extent = reserve(extents, 1)
    with pytest.raises(ExtentError, match="cannot hold"):
        extents.keep(extent, PAGE + 1)
    extents.keep(extent, PAGE)


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (PAGE, 1), (PAGE + 1, 2), (4 * PAGE, 4)])
def test_pages_that_an_entry_does_not_need_are_free_at_once(extents: Extents, nbytes: int, pages: int) -> None:
    extent = reserve(extents, 4)
    extents.keep(extent, nbytes)
    assert free_ranges(extents) == [(extent.offset + pages * PAGE, SLAB)]
    extents.free_entry(extent.offset, pages * PAGE, extent.slot)
    assert free_ranges(extents) == [(PAGE, SLAB)]
    assert extents.free_bytes == 49 * PAGE


def test_an_entrys_record_comes_back_with_it(extents: Extents) -> None:
    held = [reserve(extents, 1) for _ in range(4)]
    extents.keep(held[1], 1)
    extents.free_entry(held[1].offset, PAGE, held[1].slot)
    assert reserve(extents, 1).record == held[1].record


def test_lives_are_checked(extents: Extents) -> None:
    entry, freed = reserve(extents, 1), reserve(extents, 1)
    extents.keep(entry, 1)
    extents.free(freed)
    for extent in (entry, freed):
        with pytest.raises(ExtentError, match="is not reserved"):
            extents.free(extent)
        with pytest.raises(ExtentError, match="is not reserved"):
            extents.carve(extent, 0, 1)
        with pytest.raises(ExtentError, match="is not reserved"):
            extents.keep(extent, 1)
    assert extents.free_bytes == 48 * PAGE


def test_an_extent_of_another_arena_is_refused(arena: Arena, extents: Extents) -> None:
    foreign = Extents(arena).reserve(PAGE)
    assert foreign is not None
    with pytest.raises(ExtentError, match="another arena"):
        extents.free(foreign)
