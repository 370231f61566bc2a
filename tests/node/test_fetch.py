"""Fetches where holders lie, vanish or are many: states that real nodes cannot be brought into at will.

The arena, the index and the records are real; what is played is the other end of the wire.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from msgspec import structs

from ec_p2p.control.messages import EntryState
from ec_p2p.engine.cpu import OutOfMemory
from ec_p2p.engine.extents import SlabRefused
from ec_p2p.engine.generation import RECORD_BYTES, Record, pack
from ec_p2p.node import transfers
from ec_p2p.node.peers import PeerState
from ec_p2p.transport.interface import State

from .played import MIB, A, B, C, D, Peers, Rig, advert, holder


@pytest.fixture
def open_rig():
    with ExitStack() as stack:

        def make(**options):
            rig = Rig(**options)
            stack.callback(rig.close)
            return rig

        yield make


def test_a_true_advert_lands(open_rig):
    rig = open_rig()
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
def test_an_advert_that_the_record_does_not_bear_out_is_no_hit(open_rig, lie):
    rig = open_rig()
    rig.start(holder(1, lie), holder(2, advert()))
    assert [entry.rows for entry in rig.landed] == [1]  # from the second holder
    rig = open_rig()
    rig.start(holder(1, lie))
    assert (rig.landed, rig.failed) == ([], [(A, "failed")])
    assert rig.backend.reserved_bytes == 0


@pytest.mark.parametrize(
    "what", [advert(dtype=""), advert(dtype="float4_of_tomorrow"), advert(rows=1 << 32), advert(rows=2, nbytes=128)]
)
def test_what_could_not_be_stored_is_not_read(open_rig, what):
    rig = open_rig(record=bytes(pack(Record(7, A, 128, 1, 64, "bfloat16"))[:56]) + (999).to_bytes(8, "little"))
    rig.start(holder(1, what))
    assert rig.failed == [(A, "failed")]
    assert rig.counters.get("fetches", outcome="layout", peer="node1") == 1
    assert rig.wire.reads == []
    assert rig.backend.reserved_bytes == 0


def test_of_each_node_that_advertises_what_could_not_be_stored_the_log_says_so_once(open_rig, caplog):
    rig = open_rig()
    caplog.set_level("WARNING")
    odd = advert(dtype="float4_of_tomorrow")
    for _ in range(3):
        rig.start(holder(1, odd), holder(2, odd))
    assert [record.args[0] for record in caplog.records] == ["node1", "node2"]
    rig.fetches.peer_gone((1).to_bytes(16, "big"), 0.0)
    rig.start(holder(1, odd), holder(2, odd))
    assert [record.args[0] for record in caplog.records] == ["node1", "node2", "node1"]


def test_what_is_wanted_together_lands_side_by_side_and_comes_in_one_stretch(open_rig):
    rig = open_rig()
    wanted = {A: 4096, B: 8192, C: 5000, D: 4096}
    at = MIB
    for identity, nbytes in wanted.items():
        what = advert(identity, rows=nbytes // 2, dim=1)
        wanted[identity] = [holder(1, structs.replace(what, offset=at))]
        at += -(-nbytes // 4096) * 4096
    rig.wire.state = State.POSTED
    rig.fetches.start(wanted, 0.0, 10.0)
    rig.fetches.turn(0.0)
    [(_, spans)] = rig.wire.reads
    # The third does not fill its last page: there the stretch ends.
    assert [(span.remote, span.nbytes) for span in spans] == [(MIB, 4096 + 8192 + 5000), (MIB + 5 * 4096, 4096)]
    first, second = spans
    assert second.local == first.local + 5 * 4096


def test_of_a_batch_what_is_whole_lands_and_the_rest_goes_to_its_next_holder(open_rig):
    """The record that is read says A: the others are not what was promised."""
    rig = open_rig()
    elsewhere = advert(C, rows=2, dim=64)
    rig.fetches.start(
        {
            B: [holder(1, advert(B))],
            A: [holder(1, advert(A))],
            C: [holder(1, advert(C)), holder(2, elsewhere)],
        },
        0.0,
        10.0,
    )
    rig.fetches.turn(0.0)
    assert [entry.identity for entry in rig.landed] == [A]
    assert sorted(rig.failed) == [(B, "failed"), (C, "failed")]
    peers = [(outcome, node) for outcome in ("landed", "changed") for node in ("node1", "node2")]
    counts = [rig.counters.get("fetches", outcome=outcome, peer=node) for outcome, node in peers]
    assert counts == [1, 0, 2, 1]
    assert rig.counters.get("fetched_bytes", peer="node1") == 128
    assert rig.backend.reserved_bytes == 0


def test_an_error_in_the_middle_of_a_batch_ends_the_fetches_of_all(open_rig):
    def stored(entry):
        if entry.identity == B:
            raise RuntimeError("a listener's own error")

    rig = open_rig(on_stored=stored)
    wanted = {}
    for place, identity in enumerate((A, B, C, D)):
        wanted[identity] = [holder(1, structs.replace(advert(identity), record=place * RECORD_BYTES))]
        rig.wire.records[place * RECORD_BYTES] = pack(Record(7, identity, 128, 1, 64, "bfloat16"))
    rig.wire.records[3 * RECORD_BYTES] = bytes(RECORD_BYTES)
    rig.fetches.start(wanted, 0.0, 10.0)
    with pytest.raises(RuntimeError):
        rig.fetches.turn(0.0)
    rig.fetches.progress(0.1)
    assert rig.failed == [(identity, "failed") for identity in wanted]
    assert [rig.backend.peek(identity) is not None for identity in wanted] == [True, True, False, False]
    assert (len(rig.fetches), rig.backend.reserved_bytes) == (0, 0)
    rig.start(holder(1, structs.replace(advert(C), record=2 * RECORD_BYTES)), identity=C)
    assert [entry.identity for entry in rig.landed] == [C]


def test_where_there_is_no_room_side_by_side_each_takes_what_there_is(open_rig):
    rig = open_rig()
    taken = [rig.memory.reserve(16 << 10) for _ in range(62)]
    for extent in taken[::2]:
        rig.memory.release(extent)
    rig.wire.state = State.POSTED
    wanted = (A, B, C)
    rig.fetches.start({each: [holder(1, advert(each, rows=8 << 10, dim=1))] for each in wanted}, 0.0, 10.0)
    rig.fetches.turn(0.0)
    [(_, spans)] = rig.wire.reads
    assert [span.nbytes for span in spans] == [16 << 10] * 3
    assert {span.local for span in spans} <= {extent.offset for extent in taken[::2]}


@pytest.mark.parametrize("how", ["unusable", "refused", "failed"])
def test_a_thousand_holders_that_all_fail_at_once(open_rig, how):
    rig = open_rig()
    rig.wire.peer_state = PeerState.UNUSABLE if how == "unusable" else PeerState.READY
    rig.wire.state = None if how == "refused" else State.FAILED
    rig.start(*(holder(number, advert()) for number in range(1000)))
    assert rig.failed == [(A, "failed")]
    assert rig.backend.reserved_bytes == 0
    assert len(rig.fetches) == 0


def test_memory_that_comes_free_wakes_who_waits_for_it(open_rig):
    rig = open_rig()
    rig.wire.peer_state = None  # known to the directory, not yet to us
    big = advert(rows=300 << 10, dim=1)
    rig.start(holder(1, big), until=1.0)
    rig.start(holder(2, advert(B, rows=300 << 10, dim=1)), identity=B, until=100.0)
    assert rig.backend.free_bytes < big.nbytes
    rig.fetches.progress(2.5)
    assert rig.failed == [(A, "deadline")]
    rig.memory.progress(2.6)
    assert rig.backend.free_bytes < big.nbytes  # taken by the one that waited
    rig.fetches.peer_gone((2).to_bytes(16, "big"), 2.7)
    assert rig.failed[-1] == (B, "failed")
    assert rig.backend.reserved_bytes == 0


def test_a_late_read_is_quarantined_until_the_library_lets_go(open_rig):
    rig = open_rig()
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


def test_who_joins_later_may_wait_longer(open_rig):
    rig = open_rig()
    rig.wire.state = State.POSTED
    rig.start(holder(1, advert()), holder(2, advert()), until=1.0)
    rig.fetches.extend(A, 10.0)
    rig.wire.state = State.DONE
    rig.fetches.progress(3.0)  # the first holder is late, and there is time for the second
    assert len(rig.landed) == 1


def test_what_is_stuck_behind_a_late_read_is_tried_elsewhere_at_once(open_rig, monkeypatch):
    """The node's loop sleeps until a deadline where the wire has nothing to say."""
    monkeypatch.setattr(transfers, "WINDOW_BYTES", 1)
    rig = open_rig()
    rig.wire.state = State.POSTED
    for identity in (A, B):
        rig.start(holder(1, advert(identity)), holder(2, advert(identity)), identity=identity)
    assert len(rig.wire.reads) == 1, "the other waits for its window"
    rig.fetches.progress(2.0)
    assert 0.0 in rig.fetches.deadlines()
    rig.fetches.turn(2.0)
    assert rig.counters.get("fetches", outcome="stuck", peer="node1") == 1
    assert 0.0 not in rig.fetches.deadlines(), "nothing is left to do until somebody delivers"


def test_a_slab_that_cannot_be_registered_is_done_without(open_rig):
    def on_slab(offset, nbytes):
        if offset:
            raise SlabRefused("locked memory")

    rig = open_rig(nbytes=4 * MIB, on_slab=on_slab)
    held = rig.backend.reserve(700 << 10)
    rig.start(holder(1, advert(rows=256 << 10, dim=1)), until=5.0)
    assert (rig.landed, rig.failed) == ([], [])
    rig.memory.release(held)
    rig.memory.progress(1.0)
    rig.fetches.turn(1.0)
    assert rig.failed == [(A, "failed")]  # it was read: its record says something else
    assert rig.backend.reserved_bytes == 0


@pytest.mark.parametrize("second", ["in memory", "on disk"])
def test_a_holder_that_cannot_be_asked_to_stage_is_passed_over_at_once(open_rig, second):
    rig = open_rig()
    rig.wire.takes_requests = False
    on_disk = advert(state=EntryState.DISK)
    rig.start(holder(1, on_disk), holder(2, advert() if second == "in memory" else on_disk))
    assert rig.counters.get("fetches", outcome="not_asked", peer="node1") == 1
    assert len(rig.landed) == (second == "in memory")
    assert rig.failed == ([] if second == "in memory" else [(A, "failed")])
    assert rig.backend.reserved_bytes == 0


def test_the_holders_disk_has_its_time_from_when_the_holder_was_asked(open_rig):
    rig = open_rig()
    rig.wire.peer_state = PeerState.ASKING
    info, what = holder(1, advert(state=EntryState.DISK))
    rig.start((info, what), now=0.0, until=100.0)
    rig.turn(1.9)
    rig.wire.peer_state = PeerState.READY
    rig.fetches.peer_ready(Peers(rig.wire).get(info.incarnation), 1.9)
    assert rig.wire.asked == [("node1", A)]
    assert list(rig.fetches.deadlines()) == [3.9]
    rig.turn(3.8)
    rig.fetches.staged(info.incarnation, A, advert(), 3.8)
    rig.turn(3.8)
    assert [entry.identity for entry in rig.landed] == [A]


@pytest.mark.parametrize("what", ["card", "disk"])
def test_a_holder_that_does_not_answer_is_not_the_first_to_be_asked_next_time(open_rig, what):
    rig = open_rig()
    rig.wire.peer_state = None if what == "card" else PeerState.READY
    silent, entry = holder(1, advert(state=EntryState.RESIDENT if what == "card" else EntryState.DISK))
    rig.start((silent, entry))
    rig.turn(1.9)
    assert not rig.rates.distrusted(silent.incarnation)
    rig.turn(2.0)
    assert rig.failed == [(A, "failed")]
    assert rig.rates.distrusted(silent.incarnation)


def test_a_holder_that_is_gone_is_not_tried_any_more(open_rig):
    rig = open_rig()
    rig.wire.peer_state = None
    rig.start(holder(1, advert()), holder(2, advert()), holder(3, advert()))
    for number in (2, 1):
        rig.fetches.peer_gone(number.to_bytes(16, "big"), 0.0)
    rig.wire.peer_state = PeerState.READY
    rig.fetches.peer_ready(SimpleNamespace(info=holder(3, None)[0]), 0.0)
    rig.fetches.turn(0.0)
    assert [entry.identity for entry in rig.landed] == [A]
    assert [peer for peer, _ in rig.wire.reads] == [(3).to_bytes(16, "big").hex()] * 2


def test_memory_is_not_waited_for_to_read_from_who_is_gone(open_rig):
    rig = open_rig()
    rig.everything()
    rig.start(holder(1, advert()))
    assert len(rig.memory) == 1
    rig.fetches.peer_gone((1).to_bytes(16, "big"), 0.0)
    assert (rig.failed, len(rig.memory)) == ([(A, "failed")], 0)


def test_who_is_passed_over_for_the_sake_of_another_is_not_distrusted(open_rig):
    """All memory that may be in quarantine is there because of one: nothing is read from the others, either."""
    rig = open_rig()
    rig.wire.state = State.POSTED
    many = {bytes([number]) * 32: [holder(1, advert(rows=MIB // 4 // 128))] for number in range(40, 42)}
    rig.fetches.start(many, 0.0, 10.0)
    rig.fetches.turn(0.0)
    rig.start(holder(2, advert(B)), identity=B)
    for reading in rig.wire.readings:
        reading.let_go = False
    rig.now = 2.5
    for _ in range(2):
        rig.fetches.progress(2.5)
    assert rig.counters.get("fetches", outcome="stuck", peer="node2") == 1
    assert rig.rates.distrusted((1).to_bytes(16, "big"))
    assert not rig.rates.distrusted((2).to_bytes(16, "big"))


def test_memory_that_cannot_be_had_leaves_less_for_the_quarantine(open_rig):
    """Three of four slabs are refused: a quarter of the first is as much as a holder that hangs may cost."""

    def on_slab(offset, nbytes):
        if offset:
            raise SlabRefused("locked memory")

    rig = open_rig(nbytes=4 * MIB, on_slab=on_slab)
    whole = rig.everything()
    with pytest.raises(OutOfMemory):
        rig.backend.reserve(1)
    rig.memory.release(whole)
    rig.wire.state = State.POSTED
    quarter = advert(rows=MIB // 4 // 128)
    for number, identity in enumerate((A, B), start=1):
        rig.start(holder(number, structs.replace(quarter, identity=identity)), identity=identity)
    assert len(rig.wire.reads) == 1


def test_nobody_is_called_from_within_start(open_rig):
    rig = open_rig()
    rig.fetches.start({A: [holder(1, advert())]}, 0.0, 10.0)
    rig.wire.peer_state = PeerState.UNUSABLE
    rig.fetches.start({B: [holder(1, advert(B))], C: [holder(1, advert(C, rows=MIB))]}, 0.0, 10.0)
    rig.fetches.start({D: [holder(1, advert(D))]}, 0.0, 0.0)
    assert (rig.landed, rig.failed, len(rig.fetches)) == ([], [], 4)
    assert min(rig.fetches.deadlines()) <= 0.0, "the loop must not sleep over it"
    rig.fetches.turn(0.0)
    assert [entry.identity for entry in rig.landed] == [A]
    assert sorted(rig.failed) == [(B, "failed"), (C, "too_large"), (D, "deadline")]


def test_a_fetch_that_nobody_wants_any_more_takes_no_memory(open_rig):
    rig = open_rig()
    everything = rig.everything()
    rig.start(holder(1, advert()))
    rig.unwanted.add(A)
    rig.memory.release(everything)
    rig.memory.progress(1.0)
    assert (rig.wire.readings, len(rig.fetches), len(rig.memory)) == ([], 0, 0)
    assert rig.failed == [(A, "no_memory")]
