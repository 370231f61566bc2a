"""Staging from a disk that does not answer: a state that a real disk cannot be brought into at will.

The arena and the index are real; what is played is the disk.
"""

from __future__ import annotations

import select
import threading

import pytest

from ec_p2p.engine.filed import Filed
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Tally
from ec_p2p.node.mailbox import Mailbox
from ec_p2p.node.staging import Staging

from .conftest import until

A, B = b"\x01" * 32, b"\x02" * 32
MIB = 1 << 20


class Disk:
    """Answers when it is let."""

    def __init__(self):
        self.answers = threading.Event()
        self.right = True

    def find(self, identity):
        return Filed(identity, 128, 1, 64, "bfloat16")

    def look(self, identity):
        self.answers.wait()

    def read(self, identity, into):
        self.answers.wait()
        into[:] = b"\x05" * 128
        return self.find(identity) if self.right else None


class Rig:
    def __init__(self):
        self.storage = StorageManager(MIB, slab_size=MIB)
        self.disk = self.storage.disk = Disk()
        self.mailbox = Mailbox()
        self.counters = Tally()
        self.heard = []
        self.staging = Staging(
            self.storage,
            self.mailbox,
            self.counters,
            2.0,
            lambda entry, started_at: self.heard.append(("staged", entry.identity)),
            lambda identity, reason: self.heard.append((reason, identity)),
            lambda identity: self.heard.append(("looked", identity)),
        )

    def until(self, condition):
        def turned():
            if select.select([self.mailbox.fd], [], [], 0)[0]:
                self.mailbox.run()
            return condition()

        until(turned)

    def close(self):
        self.disk.answers.set()
        self.staging.close()
        self.storage.disk = None
        self.mailbox.close()
        self.storage.close()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def test_who_waits_for_a_hanging_disk_is_told_and_its_memory_comes_back(rig):
    rig.staging.bring(A, 10.0, 100.0)
    rig.staging.look(B, 10.0)
    assert sorted(rig.staging.deadlines()) == [12.0, 12.0]
    rig.staging.progress(11.9)
    assert rig.heard == []
    assert rig.storage.cpu.reserved_bytes > 0
    rig.staging.progress(12.0)
    assert rig.heard == [("late", A), ("looked", B)]
    assert (A in rig.staging, rig.staging.find(A), rig.staging.can_look) == (False, None, False)
    assert rig.storage.cpu.reserved_bytes > 0, "the thread may still write there"
    rig.disk.answers.set()
    rig.until(lambda: rig.staging.can_look)
    # Late is better than never.
    assert rig.heard[2:] == [("staged", A)]
    assert rig.storage.cpu.peek(A) is not None
    assert rig.storage.cpu.reserved_bytes == 0
    assert rig.counters.get("stagings", outcome="late") == 1
    assert rig.counters.get("stagings", outcome="staged") == 0


def test_what_is_late_and_unreadable_is_freed_without_another_word(rig):
    rig.disk.right = False
    rig.staging.bring(A, 10.0, 100.0)
    rig.staging.progress(12.0)
    rig.disk.answers.set()
    rig.until(lambda: rig.staging.can_look)
    assert rig.heard == [("late", A)]
    assert rig.storage.cpu.reserved_bytes == 0


def test_an_entry_waits_for_memory_and_goes_on_when_some_is_freed(rig):
    rig.disk.answers.set()
    everything = rig.storage.cpu.reserve(rig.storage.cpu.largest_entry)
    rig.staging.bring(A, 10.0, 100.0)
    assert list(rig.staging.deadlines()) == [100.0]
    rig.storage.cpu.release(everything)
    assert not rig.staging.memory_pending
    rig.staging.memory_freed()
    assert rig.staging.memory_pending
    rig.staging.progress(11.0)
    rig.until(lambda: rig.heard)
    assert rig.heard == [("staged", A)]


def test_an_entry_that_finds_no_memory_in_time_is_given_up(rig):
    everything = rig.storage.cpu.reserve(rig.storage.cpu.largest_entry)
    rig.staging.bring(A, 10.0, 20.0)
    rig.staging.bring(A, 10.0, 30.0)
    rig.staging.bring(A, 10.0, 15.0)
    rig.staging.progress(29.9)
    assert rig.heard == []
    rig.staging.progress(30.0)
    assert rig.heard == [("no_memory", A)]
    rig.storage.cpu.release(everything)
