"""Staging from a disk that is slow, hangs or is unwell: states that a real disk cannot be brought into at will.

The arena, the index and the threads are real; what is played is the disk.
"""

from __future__ import annotations

import pytest

from ec_p2p.engine.extents import whole_pages

from .played import MIB, A, B, C, D, E, Rig


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def reserved(rig):
    return rig.backend.reserved_bytes


def test_who_waits_for_a_hanging_disk_is_told_and_its_memory_comes_back(rig):
    rig.bring(A)
    rig.staging.look(B)
    rig.staging.turn(10.0)
    assert sorted(rig.staging.deadlines()) == [12.0, 12.0]
    rig.staging.progress(11.9)
    assert rig.heard == []
    assert reserved(rig) > 0
    rig.staging.progress(12.0)
    assert rig.heard == [("late", A), ("looked", B)]
    assert (A in rig.staging, rig.staging.find(A), rig.staging.can_look) == (False, None, False)
    assert reserved(rig) > 0, "the thread may still write there"
    rig.disk.let()
    rig.until(lambda: rig.staging.can_look)
    # Late is better than never.
    assert rig.heard[2:] == [("staged", A)]
    assert rig.backend.peek(A) is not None
    assert reserved(rig) == 0
    assert rig.counters.get("stagings", outcome="late") == 1
    assert rig.counters.get("stagings", outcome="staged") == 0


def test_what_is_late_and_unreadable_is_freed_without_another_word(rig):
    rig.disk.right = False
    rig.bring(A)
    rig.staging.progress(12.0)
    rig.disk.let()
    rig.until(lambda: rig.staging.can_look)
    assert rig.heard == [("late", A)]
    assert reserved(rig) == 0


def test_what_on_disk_has_a_dtype_of_tomorrow_is_unreadable_and_ends_nothing(rig):
    rig.disk.dtype = "float4_of_tomorrow"
    rig.disk.let()
    rig.bring(A)
    rig.until(lambda: rig.heard)
    assert (rig.heard, reserved(rig)) == ([("unreadable", A)], 0)
    rig.disk.dtype = "bfloat16"
    rig.bring(A)
    rig.until(lambda: rig.heard[1:])
    assert rig.heard[1:] == [("staged", A)]


# ---------------------------------------------------------------- more than there are threads


def test_a_disk_that_is_only_busy_is_not_taken_for_one_that_hangs(rig):
    """A read is late when a thread has been at it for too long; how long it was queued says nothing of the disk."""
    rig.bring(A, B, C, D, E, now=10.0)
    assert set(rig.begun(2)) == {A, B}
    assert reserved(rig) == 2 * whole_pages(128), "memory is for those that are read"
    rig.disk.let(2)
    rig.until(lambda: len(rig.heard) == 2, now=11.9)
    rig.begun(4)
    rig.turn(13.8)
    assert sorted(rig.heard) == [("staged", A), ("staged", B)]
    assert rig.staging.can_look
    rig.disk.let(3)
    rig.until(lambda: len(rig.heard) == 5, now=13.8)
    assert sorted(rig.heard) == [("staged", identity) for identity in (A, B, C, D, E)]


def test_a_look_waits_in_the_same_queue_and_its_time_begins_with_it(rig):
    rig.bring(A, B, now=10.0)
    rig.staging.look(C)
    rig.staging.look(C)
    rig.staging.turn(10.0)
    assert set(rig.begun(2)) == {A, B}
    rig.disk.let(2)
    rig.until(lambda: len(rig.heard) == 2, now=11.9)
    assert rig.begun(3)[2] == C
    rig.turn(13.8)
    assert rig.staging.looking(C)
    assert rig.staging.can_look
    rig.disk.let(1)
    rig.until(lambda: rig.heard[2:], now=13.8)
    assert rig.heard[2:] == [("looked", C)]


def test_when_the_disk_hangs_all_that_no_thread_has_taken_is_told(rig):
    rig.bring(A, B, C)
    rig.staging.look(D)
    everything_else = rig.memory.reserve(rig.backend.free_bytes)
    rig.begun(2)
    rig.turn(12.0)
    assert rig.heard[:2] == [("late", A), ("late", B)]
    assert sorted(rig.heard[2:]) == [("late", C), ("looked", D)]
    assert len(rig.staging) == 0
    rig.memory.release(everything_else)
    rig.disk.let()
    rig.until(lambda: rig.staging.can_look)
    assert rig.disk.begun == [A, B] or rig.disk.begun == [B, A]


def test_who_is_out_of_patience_before_a_thread_is_idle_is_told(rig):
    rig.bring(A, B, now=10.0)
    rig.bring(C, now=10.0, until=11.0)
    rig.begun(2)
    assert sorted(rig.staging.deadlines()) == [11.0, 12.0, 12.0]
    rig.turn(11.0)
    assert rig.heard == [("deadline", C)]


def test_nobody_is_called_from_within_bring(rig):
    rig.disk.nbytes = 2 * MIB
    assert rig.staging.bring(A, 10.0, 100.0)
    assert rig.heard == []
    assert min(rig.staging.deadlines()) < 10.0, "the loop must not sleep over it"
    rig.staging.turn(10.0)
    assert rig.heard == [("too_large", A)]


# ---------------------------------------------------------------- memory


def test_an_entry_waits_for_memory_and_goes_on_when_some_is_freed(rig):
    rig.disk.let()
    everything = rig.everything()
    rig.bring(A)
    assert list(rig.staging.deadlines()) == [100.0]
    rig.turn(10.5)
    assert rig.disk.begun == []
    rig.memory.release(everything)
    rig.until(lambda: rig.heard)
    assert rig.heard == [("staged", A)]


def test_an_entry_that_finds_no_memory_in_time_is_given_up(rig):
    everything = rig.everything()
    rig.bring(A, now=10.0, until=20.0)
    rig.bring(A, now=10.0, until=30.0)
    rig.bring(A, now=10.0, until=15.0)
    rig.turn(29.9)
    assert rig.heard == []
    rig.turn(30.0)
    assert rig.heard == [("no_memory", A)]
    rig.memory.release(everything)
    assert not rig.memory.deadlines()


def test_who_waited_for_memory_keeps_its_place_in_the_queue(rig):
    everything = rig.everything()
    rig.bring(A, B, C)
    assert len(rig.memory) == 3
    rig.memory.release(everything)
    rig.memory.progress(10.0)
    assert set(rig.begun(2)) == {A, B}
    rig.bring(D)
    for count, identity in ((3, C), (4, D)):
        rig.disk.let(1)
        rig.until(lambda n=count: len(rig.disk.begun) == n)
        assert rig.disk.begun[-1] == identity


@pytest.mark.parametrize("waits_for", ["memory", "a thread"])
def test_what_nobody_wants_any_more_is_not_read(rig, waits_for):
    """Whoever waited has the entry by another way, or is gone."""
    if waits_for == "memory":
        held = rig.everything()
        rig.bring(A)
    else:
        held = rig.memory.reserve(1)
        rig.bring(B, C, A)
        rig.begun(2)
    rig.unwanted.add(A)
    rig.memory.release(held)
    rig.memory.progress(11.0)  # before any look at who is wanted
    rig.disk.let()
    rig.until(lambda: A not in rig.staging and not len(rig.staging))
    assert A not in rig.disk.begun
    assert A not in [identity for _, identity in rig.heard]
    assert rig.counters.get("stagings", outcome="dropped") == 1
    assert reserved(rig) == 0


def test_a_disk_that_became_unwell_costs_nobody_an_entry(rig):
    """What cannot be read now is worth no eviction, although it could be when it was asked for."""
    filler = rig.memory.reserve(rig.backend.largest_entry - 2 * whole_pages(128))
    rig.memory.publish(filler, E, filler.nbytes, 1, filler.nbytes, "int8")
    rig.bring(A, B, C)
    rig.begun(2)
    rig.disk.there = False
    rig.disk.let()
    rig.until(lambda: len(rig.heard) == 3)
    assert sorted(rig.heard) == [("staged", A), ("staged", B), ("unreadable", C)]
    assert all(rig.backend.peek(identity) for identity in (A, B, E))


def test_what_nobody_wants_any_more_waits_for_no_memory(rig):
    rig.everything()
    rig.bring(A)
    rig.unwanted.add(A)
    rig.turn(11.0)
    assert (len(rig.staging), len(rig.memory), rig.heard) == (0, 0, [])
