from __future__ import annotations

import gc

import pytest

from ec_p2p.engine.arena import PAGE, Slab
from ec_p2p.engine.entry import Entry, layout_of

IDENTITY = bytes(32)


def entry(rows: int, dim: int) -> Entry:
    return Entry(IDENTITY, layout_of(rows, dim, "bfloat16"), Slab(1 << 20, 1 << 20), 5 << 18, 3, 77)


def test_what_follows_from_the_rest_is_told_too() -> None:
    one = entry(700, 3)
    assert (one.rows, one.dim, one.dtype, one.nbytes) == (700, 3, "bfloat16", 4200)
    assert one.extent_bytes == 2 * PAGE
    assert one.record_offset == (1 << 20) + 3 * 64


def test_zero_rows_still_take_a_page() -> None:
    assert (entry(0, 4096).nbytes, entry(0, 4096).extent_bytes) == (0, PAGE)


def test_equal_layouts_are_one_object() -> None:
    rows, dim = int("7000"), int("4096")
    assert layout_of(rows, dim, "bfloat16") is layout_of(int("7000"), int("4096"), "".join(["bfloat", "16"]))


def test_an_unknown_dtype_has_no_layout() -> None:
    with pytest.raises(ValueError, match="'float3' cannot be stored"):
        layout_of(1, 1, "float3")


@pytest.mark.parametrize(("rows", "dim"), [(-1, -1), (1 << 32, 0), (0, 1 << 32)])
def test_a_shape_that_no_record_can_say_has_no_layout(rows: int, dim: int) -> None:
    with pytest.raises(ValueError, match="does not fit a record"):
        layout_of(rows, dim, "uint8")


def test_an_entry_equals_only_itself_and_never_changes() -> None:
    one, other = entry(1, 1), entry(1, 1)
    assert one != other
    assert len({one, other}) == 2
    with pytest.raises(AttributeError):
        one.offset = 0  # type: ignore[misc]


def test_the_garbage_collector_does_not_visit_entries() -> None:
    one = entry(1, 1)
    assert not gc.is_tracked(one)
    index = {IDENTITY: one}
    assert not gc.is_tracked(index)
