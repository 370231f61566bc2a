"""Fetches where holders lie, vanish or are many: states that real nodes cannot be brought into at will.

The arena, the index and the records are real; what is played is the other end of the wire.
"""

from __future__ import annotations

import pytest

from ec_p2p.control.messages import Advert, NodeInfo
from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import LocalCPUBackend
from ec_p2p.engine.extents import SlabRefused
from ec_p2p.engine.generation import RECORD_BYTES, Record, pack
from ec_p2p.engine.tally import Tally
from ec_p2p.node.fetch import Fetches, landing_bytes
from ec_p2p.node.peers import PeerState
from ec_p2p.transport.interface import State, TransportError

A, B = b"\x01" * 32, b"\x02" * 32
MIB = 1 << 20


def advert(identity=A, rows=1, dim=64, dtype="bfloat16", nbytes=None, generation=7):
    nbytes = rows * dim * 2 if nbytes is None else nbytes
    return Advert(identity, 1, nbytes, rows, dim, dtype, 4096, 0, generation)


def holder(number, what):
    return NodeInfo(number.to_bytes(16, "big"), f"node{number}", "tcp://127.0.0.1:1"), what


class Reading:
    peer = error = ""
    unposted = 0

    def __init__(self, state):
        self.state = state
        self.let_go = True

    def poll(self):
        return self.state

    def release(self):
        return self.let_go


class Wire:
    """A transport and its peers. `record` is what every holder's record says."""

    kind = "played"

    def __init__(self, arena, record):
        self.arena = arena
        self.record = record
        self.state = State.DONE
        self.peer_state = PeerState.READY
        self.readings = []

    def read(self, peer, spans):
        if self.state is None:
            raise TransportError("refused")
        [span] = spans
        if span.nbytes == RECORD_BYTES:
            self.arena.buffer[span.local : span.local + RECORD_BYTES] = self.record
        self.readings.append(Reading(self.state))
        return self.readings[-1]


class Peers:
    def __init__(self, wire):
        self.wire = wire

    def get(self, incarnation):
        return None if self.wire.peer_state is None else Peer(self.wire)

    def ask(self, peer, now):
        pass


class Peer:
    def __init__(self, wire):
        self.state = wire.peer_state

    def covers(self, offset, nbytes):
        return True


class Rig:
    def __init__(self, record=None, nbytes=MIB, slab=MIB, on_slab=None):
        self.arena = Arena.create(nbytes, slab)
        self.backend = LocalCPUBackend(self.arena, on_slab=on_slab)
        self.wire = Wire(self.arena, record or pack(Record(7, A, 128, 1, 64, "bfloat16")))
        self.landed, self.failed = [], []
        self.counters = Tally()
        self.fetches = Fetches(
            self.backend,
            self.arena.buffer,
            self.wire,
            Peers(self.wire),
            self.counters,
            2.0,
            lambda entry, fetch: self.landed.append(entry),
            lambda identity, reason: self.failed.append((identity, reason)),
            lambda identity: True,
        )

    def start(self, *holders, identity=A, now=0.0, until=10.0):
        self.fetches.start(identity, holders, now, until)


def test_a_true_advert_lands():
    rig = Rig()
    rig.start(holder(1, advert()))
    [entry] = rig.landed
    assert (entry.identity, entry.rows, entry.dim, entry.dtype) == (A, 1, 64, "bfloat16")


@pytest.mark.parametrize(
    "lie",
    [
        advert(rows=64, dim=1),
        advert(dtype="float16"),
        advert(dtype="float4_of_tomorrow"),
        advert(rows=2, nbytes=128),
        advert(generation=8),
        advert(generation=0),
    ],
    ids=["shape", "dtype", "unknown dtype", "numbers", "generation", "no generation"],
)
def test_an_advert_that_the_record_does_not_bear_out_is_no_hit(lie):
    rig = Rig()
    rig.start(holder(1, lie), holder(2, advert()))
    assert [entry.rows for entry in rig.landed] == [1]  # from the second holder
    rig = Rig()
    rig.start(holder(1, lie))
    assert (rig.landed, rig.failed) == ([], [(A, "failed")])
    assert rig.backend.reserved_bytes == 0


def test_a_record_of_tomorrows_dtype_ends_nothing():
    rig = Rig(record=bytes(pack(Record(7, A, 128, 1, 64, "bfloat16"))[:56]) + (999).to_bytes(8, "little"))
    rig.start(holder(1, advert(dtype="")))
    assert rig.failed == [(A, "failed")]


@pytest.mark.parametrize("how", ["unusable", "refused", "failed"])
def test_a_thousand_holders_that_all_fail_at_once(how):
    rig = Rig()
    rig.wire.peer_state = PeerState.UNUSABLE if how == "unusable" else PeerState.READY
    rig.wire.state = None if how == "refused" else State.FAILED
    rig.start(*(holder(number, advert()) for number in range(1000)))
    assert rig.failed == [(A, "failed")]
    assert rig.backend.reserved_bytes == 0
    assert len(rig.fetches) == 0


def test_memory_that_comes_free_wakes_who_waits_for_it():
    rig = Rig()
    rig.wire.peer_state = None  # known to the directory, not yet to us
    big = advert(rows=300 << 10, dim=1)
    rig.start(holder(1, big), until=1.0)
    rig.start(holder(2, advert(B, rows=300 << 10, dim=1)), identity=B, until=100.0)
    assert rig.backend.free_bytes < landing_bytes(big.nbytes)
    rig.fetches.progress(2.5)
    assert rig.failed == [(A, "deadline")]
    rig.fetches.progress(2.6)
    assert rig.backend.free_bytes < landing_bytes(big.nbytes)  # taken by the one that waited
    rig.fetches.peer_gone((2).to_bytes(16, "big"), 2.7)
    assert rig.failed[-1] == (B, "failed")
    assert rig.backend.reserved_bytes == 0


def test_a_late_read_is_quarantined_until_the_library_lets_go():
    rig = Rig()
    rig.wire.state = State.POSTED
    rig.start(holder(1, advert()))
    [reading] = rig.wire.readings
    reading.let_go = False
    rig.fetches.progress(3.0)
    assert rig.failed == [(A, "failed")]
    assert rig.fetches.quarantined_bytes == rig.backend.reserved_bytes > 0
    reading.let_go = True
    rig.fetches.progress(3.1)
    assert rig.fetches.quarantined_bytes == rig.backend.reserved_bytes == 0


def test_who_joins_later_may_wait_longer():
    rig = Rig()
    rig.wire.state = State.POSTED
    rig.start(holder(1, advert()), holder(2, advert()), until=1.0)
    rig.fetches.extend(A, 10.0)
    rig.wire.state = State.DONE
    rig.fetches.progress(3.0)  # the first holder is late, and there is time for the second
    assert len(rig.landed) == 1


def test_a_slab_that_cannot_be_registered_is_done_without():
    def on_slab(offset, nbytes):
        if offset:
            raise SlabRefused("locked memory")

    rig = Rig(nbytes=4 * MIB, on_slab=on_slab)
    held = rig.backend.reserve(700 << 10)
    rig.start(holder(1, advert(rows=256 << 10, dim=1)), until=5.0)
    assert (rig.landed, rig.failed) == ([], [])
    rig.backend.release(held)
    rig.fetches.memory_freed()
    rig.fetches.progress(1.0)
    assert rig.failed == [(A, "failed")]  # it was read: its record says something else
    assert rig.backend.reserved_bytes == 0
