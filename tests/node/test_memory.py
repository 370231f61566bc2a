"""Who waits for memory hears of all that becomes free, whichever part frees it."""

from __future__ import annotations

import pytest

from ec_p2p.control.messages import EntryState
from ec_p2p.engine.cpu import OutOfMemory
from ec_p2p.transport.interface import State

from .played import A, B, C, Rig, advert, holder


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def fill(rig):
    """Take what is left, for good."""
    return rig.memory.reserve(rig.backend.free_bytes)


def fetches(rig, identity=B):
    """Have a fetch wait for the memory of one page."""
    rig.start(holder(1, advert(identity, state=EntryState.DISK)), identity=identity, now=10.0, until=100.0)
    assert (identity in rig.fetches, len(rig.memory)) == (True, 1)


def got_memory(rig, identity=B):
    return ("node1", identity) in rig.wire.asked


def test_a_late_read_that_comes_back_with_nothing_wakes_a_fetch(rig):
    rig.disk.right = False
    rig.bring(A)
    fill(rig)
    fetches(rig)
    rig.turn(12.0)
    assert rig.heard == [("late", A)]
    assert not got_memory(rig)
    rig.disk.let()
    rig.until(lambda: got_memory(rig), now=12.0)


def test_a_read_that_fails_wakes_a_fetch(rig):
    rig.disk.right = False
    rig.bring(A)
    fill(rig)
    fetches(rig)
    rig.disk.let()
    rig.until(lambda: got_memory(rig))


def test_a_staging_that_nobody_leased_wakes_a_fetch(rig):
    rig.bring(A)
    fill(rig)
    fetches(rig)
    rig.disk.let()
    rig.until(lambda: got_memory(rig))
    assert rig.heard == [("staged", A)]
    assert rig.backend.peek(A) is None, "evicted for the fetch"


def test_a_fetch_that_fails_wakes_a_staging(rig):
    rig.disk.let()
    rig.start(holder(1, advert(B, state=EntryState.DISK)), identity=B, now=10.0, until=100.0)
    fill(rig)
    rig.bring(A)
    rig.turn(11.9)
    assert rig.disk.begun == []
    rig.turn(12.0)
    assert rig.failed == [(B, "failed")]
    rig.until(lambda: rig.heard == [("staged", A)], now=12.0)


def test_memory_that_leaves_quarantine_wakes_a_staging(rig):
    rig.disk.let()
    rig.wire.state = State.POSTED
    rig.start(holder(1, advert(B)), identity=B, now=10.0, until=100.0)
    [reading] = rig.wire.readings
    reading.let_go = False
    fill(rig)
    rig.bring(A, now=12.0)
    rig.turn(12.0)
    assert rig.fetches.quarantined_bytes > 0
    assert rig.disk.begun == []
    reading.let_go = True
    rig.until(lambda: rig.heard == [("staged", A)], now=12.1)


def test_the_longest_waiting_is_served_first_whatever_it_is(rig):
    everything = rig.everything()
    fetches(rig, B)
    rig.bring(A)
    rig.start(holder(1, advert(C, state=EntryState.DISK)), identity=C, now=10.0, until=100.0)
    rig.memory.release(everything)
    page = rig.memory.reserve(128)
    fill(rig)
    rig.memory.progress(11.0)
    assert (got_memory(rig, B), rig.disk.begun, got_memory(rig, C)) == (False, [], False)
    rig.memory.release(page)
    rig.memory.progress(11.0)
    assert (got_memory(rig, B), rig.disk.begun, got_memory(rig, C)) == (True, [], False)
    assert len(rig.memory) == 2


# ---------------------------------------------------------------- the line itself


def test_nobody_is_woken_before_something_was_freed(rig):
    woken = []
    held = rig.memory.reserve(1)
    rig.memory.release(held)  # while nobody waits
    rig.memory.wait("a", lambda now: woken.append(("a", now)))
    rig.memory.wait("b", lambda now: woken.append(("b", now)))
    rig.memory.progress(1.0)
    assert (woken, rig.memory.deadlines()) == ([], ())
    rig.memory.freed()
    assert (woken, rig.memory.deadlines()) == ([], (0.0,))
    rig.memory.progress(2.0)
    rig.memory.progress(3.0)
    assert woken == [("a", 2.0), ("b", 2.0)]
    rig.memory.leave("a")
    rig.memory.freed()
    rig.memory.progress(4.0)
    assert woken[2:] == [("b", 4.0)]


def test_what_is_freed_while_others_are_woken_is_for_the_next_time(rig):
    turns = []

    def takes_and_gives_back(now):
        turns.append(now)
        rig.memory.release(rig.memory.reserve(1))
        rig.memory.leave("a")

    rig.memory.wait("a", takes_and_gives_back)
    rig.memory.wait("b", turns.append)
    rig.memory.freed()
    rig.memory.progress(1.0)
    assert (turns, rig.memory.deadlines()) == ([1.0, 1.0], (0.0,))
    rig.memory.progress(2.0)
    assert turns == [1.0, 1.0, 2.0]


def test_who_fails_when_it_is_woken_keeps_nobody_from_the_memory(rig):
    woken = []

    def fails(now):
        raise RuntimeError("a defect")

    rig.memory.wait("a", fails)
    rig.memory.wait("b", woken.append)
    rig.memory.freed()
    with pytest.raises(RuntimeError):
        rig.memory.progress(1.0)
    assert rig.memory.deadlines()
    rig.memory.progress(2.0)
    assert woken == [2.0]
    assert len(rig.memory) == 1


def test_what_cannot_be_had_is_said_by_the_arena(rig):
    rig.everything()
    with pytest.raises(OutOfMemory):
        rig.memory.reserve(1)
