"""What the fleet is told of an entry: its advert, made from where the entry is, or read."""

from __future__ import annotations

from ec_p2p.control.messages import Advert, EntryState
from ec_p2p.engine.cpu import Entry
from ec_p2p.engine.entry import Layout, layout_of
from ec_p2p.engine.filed import Filed


def resident(entry: Entry) -> Advert:
    """In the arena: others may read it."""
    return Advert(
        entry.identity,
        EntryState.RESIDENT,
        entry.nbytes,
        entry.rows,
        entry.dim,
        entry.dtype,
        entry.offset,
        entry.record_offset,
        entry.generation,
    )


def on_disk(filed: Filed) -> Advert:
    """Only on disk: others may ask for it to be staged."""
    return Advert(filed.identity, EntryState.DISK, filed.nbytes, filed.rows, filed.dim, filed.dtype, 0, 0, 0)


def pending(identity: bytes) -> Advert:
    """Being encoded: others may wait for it."""
    return Advert(identity, EntryState.PENDING, 0, 0, 0, "unknown", 0, 0, 0)


def promised(advert: Advert) -> Layout | None:
    """Of the entry that is advertised, on disk or in an arena; None where nothing is that could be stored: a peer may
    say anything."""
    try:
        layout = layout_of(advert.rows, advert.dim, advert.dtype)
    except ValueError:
        return None
    return layout if layout.nbytes == advert.nbytes else None
