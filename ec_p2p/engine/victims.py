"""Which entries to evict so that one allocation succeeds: few, old, and next to each other.

Owns a plan, never its execution: it reads free ranges and entries, and changes neither.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from ec_p2p.engine.entry import Entry
from ec_p2p.engine.extents import Extents

_PATIENCE = 1024
"""After so many candidates a plan may contain others: in a large tier of mixed sizes thousands would have to be looked
at, for every allocation."""


def choose(
    extents: Extents, entries: Mapping[int, Entry], pinned: Container[Entry], candidates: Iterable[Entry], size: int
) -> list[Entry] | None:
    """Entries to evict so that `size` bytes (whole pages) fit; None if evicting all candidates would not do.

    `entries` are all there are, by offset; `candidates` are the same in the order of eviction. Unless they are
    `pinned`, they are imagined free one by one until, together with what is free already, they make a run of `size`;
    of these only the ones inside that run are chosen, so that old but useless neighbours elsewhere stay.
    """
    # Free ranges that fit but were not handed out lie in slabs without a spare record: any victim there will do.
    starved = extents.slabs_with(size)
    run_end: dict[int, int] = {}
    run_start: dict[int, int] = {}
    imagined: set[Entry] = set()
    patience = _PATIENCE
    for entry in candidates:
        if entry in pinned:
            continue
        start, end = entry.offset, entry.offset + entry.extent_bytes
        if starved and extents.slab_of(start) in starved:
            return [entry]
        imagined.add(entry)
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
            return [entry] if len(imagined) == 1 else _needed(extents, entries, start, end, size)
        if len(imagined) == patience:
            patience *= 2
            widened = _widen(extents, entries, pinned, imagined, run_end, size)
            if widened is not None:
                return _needed(extents, entries, *widened, size)
    return None


def _widen(
    extents: Extents,
    entries: Mapping[int, Entry],
    pinned: Container[Entry],
    imagined: Container[Entry],
    starts: Iterable[int],
    size: int,
) -> tuple[int, int] | None:
    """Of the runs at `starts`, each continued over neighbours that are no candidates yet, the one (start, end) of
    `size` with the fewest bytes of such neighbours."""
    best, least = None, size + 1
    for start in starts:
        end, price = start, 0
        while end - start < size and price < least:
            behind = extents.free_starting_at(end)
            if behind is None:
                entry = entries.get(end)
                if entry is None or entry in pinned:
                    break
                behind = end + entry.extent_bytes
                price += 0 if entry in imagined else entry.extent_bytes
            end = behind
        if end - start >= size and price < least:
            best, least = (start, end), price
    return best


def _needed(extents: Extents, entries: Mapping[int, Entry], start: int, end: int, size: int) -> list[Entry]:
    # The run as pieces in address order; free ones hold no entry and have no price.
    pieces: list[tuple[int, int, Entry | None]] = []
    at = start
    while at < end:
        entry = entries.get(at)
        behind = at + entry.extent_bytes if entry is not None else extents.free_starting_at(at)
        assert behind is not None, "a run is made of entries and free ranges only"
        pieces.append((behind - at, 0 if entry is None else behind - at, entry))
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
    return [entry for _, _, entry in best if entry is not None]
