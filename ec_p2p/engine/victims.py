"""Which entries to evict so that one allocation succeeds: the fewest of the oldest that make room in one place.

Owns a plan, never its execution: it reads free ranges and extents, and changes neither.
"""

from __future__ import annotations

from collections.abc import Iterable

from ec_p2p.engine.extents import Extent, Extents


def choose(extents: Extents, candidates: Iterable[Extent], size: int) -> list[Extent] | None:
    """Extents to free so that `size` bytes (whole pages) fit; None if freeing all candidates would not do.

    `candidates` come in the order of eviction. They are imagined free one by one until, together with what is free
    already, they make a run of `size`; of these only the ones inside that run are chosen, so that old but useless
    neighbours elsewhere stay.
    """
    # Free ranges that fit but were not handed out lie in slabs without a spare record: any victim there will do.
    starved = {extents.slab_of(start) for start, _ in extents.fitting(size)}
    run_end: dict[int, int] = {}
    run_start: dict[int, int] = {}
    imagined: dict[int, Extent] = {}
    for extent in candidates:
        if extent.slab in starved:
            return [extent]
        start, end = extent.offset, extent.offset + extent.nbytes
        imagined[start] = extent
        before = run_start.pop(start, None)
        if before is None:
            before = extents.free_ending_at(start)
        behind = run_end.pop(end, None)
        if behind is None:
            behind = extents.free_starting_at(end)
        start = start if before is None else before
        end = end if behind is None else behind
        run_end[start], run_start[end] = end, start
        if end - start >= size:
            return _needed(extents, imagined, start, end, size)
    return None


def _needed(extents: Extents, imagined: dict[int, Extent], start: int, end: int, size: int) -> list[Extent]:
    # The run as pieces in address order; free ones carry no extent and have no price.
    pieces: list[tuple[int, int, Extent | None]] = []
    at = start
    while at < end:
        extent = imagined.get(at)
        behind = at + extent.nbytes if extent is not None else extents.free_starting_at(at)
        assert behind is not None, "a run is made of candidates and free ranges only"
        pieces.append((behind - at, 0 if extent is None else extent.nbytes, extent))
        at = behind
    # Of all windows over the pieces that give `size`, the first with the fewest bytes to evict.
    best, least = pieces, end - start + 1
    first = width = price = 0
    for behind, (nbytes, cost, _) in enumerate(pieces, 1):
        width += nbytes
        price += cost
        while width - pieces[first][0] >= size:
            width -= pieces[first][0]
            price -= pieces[first][1]
            first += 1
        if width >= size and price < least:
            best, least = pieces[first:behind], price
    return [extent for _, _, extent in best if extent is not None]
