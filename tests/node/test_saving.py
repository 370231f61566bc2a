"""What the fleet is told of an entry whose place changes: no advert outlives what it says.

The arena is real. What the fleet hears is kept as the last word of each entry.
"""

from __future__ import annotations

import pytest

from ec_p2p.control.messages import EntryState
from ec_p2p.node.fetch_policy import EncodeTimes
from ec_p2p.node.saving import Saving

from .played import A, Rig


class Fleet:
    def __init__(self):
        self.told = {}

    def store(self, advert):
        self.told[advert.identity] = advert.state

    def withdraw(self, identity):
        self.told.pop(identity, None)


@pytest.fixture
def rig():
    rig = Rig(on_evicted=lambda entry: rig.saving.evicted(entry))
    rig.fleet = Fleet()
    rig.saving = Saving(
        rig.backend,
        rig.memory,
        None,
        rig.fleet,
        rig.counters,
        EncodeTimes(),
        on_disk=rig.disk.find,
        on_stored=rig.heard.append,
        on_change=rig.heard.append,
    )
    yield rig
    rig.close()


def lands(rig):
    """It is in the arena by a fetch, of which the fleet is told only with `share_fetched`."""
    extent = rig.memory.reserve(128)
    return rig.memory.publish(extent, A, 128, 1, 64, "bfloat16")


def is_evicted(rig):
    rig.memory.release(rig.everything())


def test_a_file_that_is_lost_is_withdrawn_although_the_entry_was_fetched_meanwhile(rig):
    rig.saving.filed(A)
    assert rig.fleet.told == {A: EntryState.DISK}
    lands(rig)
    rig.disk.there = False
    rig.saving.lost(A)
    assert rig.fleet.told == {}


def test_a_file_that_is_lost_changes_nothing_for_an_entry_that_others_have_from_the_arena(rig):
    rig.saving.filed(A)
    rig.saving.advertise(lands(rig))
    rig.disk.there = False
    rig.saving.lost(A)
    assert rig.fleet.told == {A: EntryState.RESIDENT}
    is_evicted(rig)
    assert rig.fleet.told == {}


def test_an_entry_that_left_the_arena_can_be_told_of_as_one_that_is_on_disk_and_then_lost(rig):
    rig.saving.advertise(lands(rig))
    is_evicted(rig)
    assert rig.fleet.told == {A: EntryState.DISK}
    rig.disk.there = False
    rig.saving.lost(A)
    assert rig.fleet.told == {}
