"""Many entries in one READ, and what becomes of each when it ends in one way or another."""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from ec_p2p.engine.generation import RECORD_BYTES
from ec_p2p.engine.tally import Tally
from ec_p2p.node import transfers
from ec_p2p.node.rates import Rates
from ec_p2p.node.transfers import BATCH_BYTES, BATCH_LEGS, Leg, Transfers, stretches, take_batch
from ec_p2p.transport.interface import Span, State

from .played import MIB, Rig

ONE, OTHER = bytes(16), bytes([1] * 16)
WINDOW = 16 << 10
"""Of the bench with `small_windows`."""


class Bench:
    """Transfers over a rig's arena and wire."""

    def __init__(self, rig, quarantine_bytes=1 << 30):
        self.rig = rig
        self.quarantine_bytes = quarantine_bytes
        self.ended = []
        self.raises = 0
        self.transfers = Transfers(
            rig.wire,
            rig.memory.release,
            Rates(),
            Tally(),
            2.0,
            lambda: self.quarantine_bytes,
            self.arrived,
            lambda *ending: self.ended.append(ending),
        )
        self.places = itertools.count(4, 4)

    def arrived(self, legs, now):
        while legs:
            leg = legs.popleft()
            if self.raises:
                self.raises -= 1
                raise RuntimeError("a callee's own error")
            self.ended.append((leg.owner, "arrived", leg.extent, now))

    def add(self, owner, peer=ONE, nbytes=4096, at=None, record=None):
        """By default no entry lies behind the one before."""
        extent = self.rig.memory.reserve(nbytes)
        place = next(self.places)
        at = place * MIB if at is None else at
        record = place * RECORD_BYTES if record is None else record
        self.transfers.add(peer, Leg(owner, extent, at, record, nbytes))

    def endings(self):
        return [(owner, how) for owner, how, _, _ in self.ended]


@pytest.fixture
def bench():
    with ExitStack() as stack:
        rig = Rig()
        stack.callback(rig.close)
        yield Bench(rig)


@pytest.fixture
def small_windows(bench, monkeypatch):
    """A bench whose windows are small enough for its arena."""
    monkeypatch.setattr(transfers, "WINDOW_BYTES", WINDOW)
    return Bench(bench.rig)


def reads(bench):
    return [[span.nbytes for span in spans] for _, spans in bench.rig.wire.reads]


def test_of_a_holder_that_is_late_the_log_says_so_until_it_delivers(bench, caplog):
    caplog.set_level("INFO")
    now = 0.0
    for state in (State.POSTED, State.POSTED, State.DONE, State.POSTED):
        bench.rig.wire.state = state
        bench.add("a")
        bench.transfers.turn(now)
        now += 2.1
        bench.transfers.turn(now)
    late, again, late_again = [record.getMessage() for record in caplog.records]
    assert late == late_again
    assert late.startswith("a READ of 4096 bytes from node incarnation 00000000 has not ended in 2.0 s")
    assert again == "node incarnation 00000000 delivers again"


def test_loads_of_records_do_not_overtake_those_of_payloads(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(transfers, "fence", lambda: seen.append(reads(bench)))
    bench.add("a", nbytes=8192)
    bench.transfers.turn(0.0)
    assert seen == [[[8192]]]
    assert reads(bench) == [[8192], [RECORD_BYTES]]


def test_entries_of_one_holder_go_in_one_read_and_their_records_in_another(bench):
    for owner in "abc":
        bench.add(owner)
    bench.add("d", OTHER)
    bench.transfers.turn(0.0)
    assert sorted(map(len, reads(bench))) == [1, 1, 3, 3]
    assert sorted(bench.endings()) == [(owner, "arrived") for owner in "abcd"]
    assert not bench.transfers
    assert not bench.transfers.waiting


def test_entries_that_lie_one_behind_the_other_on_both_sides_are_one_stretch(bench):
    for number, owner in enumerate("abc"):
        bench.add(owner, at=MIB + 4096 * number, record=RECORD_BYTES * number)
    bench.add("elsewhere", at=4 * MIB)
    bench.transfers.turn(0.0)
    assert reads(bench) == [[3 * 4096, 4096], [3 * RECORD_BYTES, RECORD_BYTES]]
    assert bench.endings() == [(owner, "arrived") for owner in [*"abc", "elsewhere"]]


@pytest.mark.parametrize(
    ("parts", "spans"),
    [
        ([], []),
        ([(0, 64, 8), (8, 72, 8), (16, 80, 8)], [(0, 64, 24)]),
        ([(0, 0, 8), (8, 8, 8)], [(0, 0, 16)]),
        ([(0, 64, 8), (8, 128, 8)], [(0, 64, 8), (8, 128, 8)]),
        ([(0, 64, 8), (16, 72, 8)], [(0, 64, 8), (16, 72, 8)]),
        ([(8, 72, 8), (0, 64, 8)], [(8, 72, 8), (0, 64, 8)]),
        ([(0, 64, 8), (8, 72, 0), (8, 72, 8)], [(0, 64, 16)]),
        ([(0, 64, 0), (4096, 64, 0)], []),
    ],
    ids=["none", "a row", "at the start", "apart here", "apart there", "backwards", "an empty one", "empty ones"],
)
def test_what_is_not_in_a_row_on_both_sides_is_a_span_of_its_own(parts, spans):
    assert stretches(parts) == [Span(*span) for span in spans]


def test_an_entry_without_bytes_has_a_record_all_the_same(bench):
    bench.add("empty", nbytes=0)
    bench.transfers.turn(0.0)
    assert reads(bench) == [[RECORD_BYTES]]
    assert bench.endings() == [("empty", "arrived")]


@pytest.mark.parametrize(("state", "how"), [(None, "refused"), (State.FAILED, "disconnected")])
def test_when_the_read_fails_each_has_its_memory_back(bench, state, how):
    bench.rig.wire.state = state
    for owner in "abc":
        bench.add(owner)
    bench.transfers.turn(0.0)
    assert bench.endings() == [(owner, how) for owner in "abc"]
    for _, _, extent, _ in bench.ended:
        bench.rig.memory.release(extent)
    assert bench.rig.backend.reserved_bytes == 0


def test_when_the_read_is_late_nobody_has_the_memory_until_the_library_lets_go(bench):
    bench.rig.wire.state = State.POSTED
    for owner in "ab":
        bench.add(owner)
    bench.transfers.turn(0.0)
    [reading] = bench.rig.wire.readings
    reading.let_go = False
    bench.transfers.turn(1.9)
    assert bench.ended == []
    bench.transfers.turn(2.0)
    assert bench.ended == [("a", "late", None, 2.0), ("b", "late", None, 2.0)]
    bench.transfers.settle()
    assert bench.transfers.quarantined_bytes == bench.rig.backend.reserved_bytes > 0
    reading.let_go = True
    bench.transfers.settle()
    assert bench.transfers.quarantined_bytes == bench.rig.backend.reserved_bytes == 0


def test_of_a_holder_that_hangs_nothing_more_is_read_until_it_lets_go(bench):
    bench.rig.wire.state = State.POSTED
    bench.add("a")
    bench.transfers.turn(0.0)
    [reading] = bench.rig.wire.readings
    reading.let_go = False
    assert not bench.transfers.stuck(ONE)
    bench.transfers.turn(2.0)
    assert bench.transfers.stuck(ONE)
    assert not bench.transfers.stuck(OTHER)
    reading.let_go = True
    bench.transfers.settle()
    assert not bench.transfers.stuck(ONE)


def test_a_window_bounds_what_is_in_flight_and_so_what_a_holder_can_detain(small_windows):
    bench = small_windows
    bench.rig.wire.state = State.POSTED
    for owner in "abcd":
        bench.add(owner, nbytes=3 * WINDOW // 4)
    bench.transfers.turn(0.0)
    assert len(bench.rig.wire.readings) == 2
    assert not bench.transfers.waiting
    assert bench.transfers.outstanding(ONE) == 3 * WINDOW
    assert bench.transfers.outstanding(OTHER) == 0
    for reading in bench.rig.wire.readings:
        reading.let_go = False
    bench.transfers.turn(2.0)
    bench.transfers.turn(2.0)
    assert sorted(bench.endings()) == [("a", "late"), ("b", "late"), ("c", "stuck"), ("d", "stuck")]
    assert {owner for owner, _, extent, _ in bench.ended if extent is None} == {"a", "b"}
    assert not bench.transfers


def test_what_waits_behind_a_late_read_does_not_wait_for_its_own_turn_to_be_late(small_windows):
    """Also where the transport lets go of the memory at once, so that nobody is stuck."""
    bench = small_windows
    bench.rig.wire.state = State.POSTED
    for peer in (ONE, OTHER):
        for owner in "abc":
            bench.add((peer, owner), peer, nbytes=WINDOW)
        bench.transfers.turn(float(peer == OTHER))
    bench.transfers.turn(2.0)
    bench.transfers.turn(2.0)
    assert bench.endings() == [((ONE, "a"), "late"), ((ONE, "b"), "stuck"), ((ONE, "c"), "stuck")]
    assert not bench.transfers.stuck(ONE)
    assert bench.transfers.outstanding(OTHER) == 3 * WINDOW


def test_what_waits_for_its_window_goes_out_when_there_is_room(small_windows):
    bench = small_windows
    bench.rig.wire.state = State.POSTED
    for owner in "abc":
        bench.add(owner, nbytes=WINDOW)
    bench.transfers.turn(0.0)
    assert len(bench.rig.wire.readings) == 1
    bench.rig.wire.state = bench.rig.wire.readings[0].state = State.DONE
    bench.transfers.turn(0.1)
    assert bench.endings() == [(owner, "arrived") for owner in "abc"]


def all_hang(bench):
    """Let time pass until every READ is late, and the library lets go of none."""
    for reading in bench.rig.wire.readings:
        reading.let_go = False
    bench.transfers.turn(2.0)
    bench.transfers.turn(2.0)


def test_with_too_much_in_quarantine_nobody_is_read_from(bench):
    bench = Bench(bench.rig, quarantine_bytes=4096)
    bench.rig.wire.state = State.POSTED
    bench.add("a")
    bench.transfers.turn(0.0)
    all_hang(bench)
    assert bench.transfers.stuck(OTHER)


def test_what_was_added_before_the_bound_became_smaller_is_told_at_once(bench):
    """The arena counts less once a slab of it is refused; only a READ that is late would tell otherwise, and there is
    none."""
    bench.rig.wire.state = State.POSTED
    bench.add("a")
    bench.transfers.turn(0.0)
    all_hang(bench)
    bench.ended.clear()
    bench.add("b", peer=OTHER)
    bench.quarantine_bytes = 4096
    bench.transfers.turn(10.0)
    assert bench.transfers.waiting
    bench.transfers.turn(10.0)
    assert bench.endings() == [("b", "stuck")]
    assert not len(bench.transfers)


@pytest.mark.parametrize("nbytes", [64, 3 << 10])
@pytest.mark.parametrize("holders", [1, 2, 10])
def test_whoever_hangs_what_is_in_quarantine_stays_below_its_bound_and_one_read(bench, holders, nbytes):
    bench = Bench(bench.rig, quarantine_bytes=64 << 10)
    bench.rig.wire.state = State.POSTED
    owners = [(holder, number) for holder in range(holders) for number in range(60 // holders)]
    for holder, number in owners:
        bench.add((holder, number), bytes([holder] * 16), nbytes=nbytes)
    bench.transfers.turn(0.0)
    all_hang(bench)
    assert sorted(owner for owner, _ in bench.endings()) == owners, "each is told, also who was never posted"
    assert {how for _, how in bench.endings()} == {"late", "stuck"}
    one_read = 16 << 10
    assert 0 < bench.transfers.quarantined_bytes < (64 << 10) + one_read
    if holders == 1:
        assert bench.transfers.quarantined_bytes <= 32 << 10, "one holder alone reaches at most half of the bound"
    assert bench.transfers.stuck(bytes([10] * 16)) is (holders == 10), "few holders that hang stop no other"
    assert (len(bench.transfers), bench.transfers.waiting) == (0, False)
    for _, how, extent, _ in bench.ended:
        assert (extent is None) is (how == "late")
        if extent is not None:
            bench.rig.memory.release(extent)
    assert bench.rig.backend.reserved_bytes == bench.transfers.quarantined_bytes
    for reading in bench.rig.wire.readings:
        reading.let_go = True
    bench.transfers.settle()
    assert bench.rig.backend.reserved_bytes == bench.transfers.quarantined_bytes == 0


def test_holders_that_fill_the_bound_over_and_over_do_not_keep_another_from_being_read(bench):
    bench = Bench(bench.rig, quarantine_bytes=16 << 10)
    bench.rig.wire.state = State.POSTED
    *busy, patient = [bytes([holder] * 16) for holder in range(5)]
    for peer, _ in itertools.product(busy, range(3)):
        bench.add("busy", peer)
    bench.add("patient", patient)
    bench.transfers.turn(0.0)
    assert [peer for peer, _ in bench.rig.wire.reads] == [peer.hex() for peer in busy]
    for reading in bench.rig.wire.readings:
        reading.state = State.DONE
    for now in (0.1, 0.2):  # the records travel, then whatever is next
        bench.transfers.turn(now)
        for reading in bench.rig.wire.readings[4:8]:
            reading.state = State.DONE
    next_round = [peer for peer, _ in bench.rig.wire.reads[8:]]
    assert next_round == [peer.hex() for peer in (patient, *busy[:3])]


def test_an_entry_larger_than_the_bound_is_read_when_nothing_else_is(bench):
    bench = Bench(bench.rig, quarantine_bytes=64 << 10)
    bench.rig.wire.state = State.POSTED
    bench.add("large", nbytes=128 << 10)
    bench.add("small", OTHER)
    bench.transfers.turn(0.0)
    assert reads(bench) == [[128 << 10]]
    bench.rig.wire.state = bench.rig.wire.readings[0].state = State.DONE
    bench.transfers.turn(0.1)
    assert bench.endings() == [("large", "arrived"), ("small", "arrived")]


def test_a_slow_read_holds_up_no_other(bench):
    bench.rig.wire.state = State.POSTED
    bench.add("slow")
    bench.transfers.turn(0.0)
    bench.rig.wire.state = State.DONE
    bench.add("fast")
    bench.transfers.turn(0.1)
    assert bench.endings() == [("fast", "arrived")]
    assert len(bench.transfers) == 1


def test_a_callee_that_raises_costs_the_others_nothing(bench):
    for owner in "abc":
        bench.add(owner)
    bench.raises = 1
    with pytest.raises(RuntimeError):
        bench.transfers.turn(0.0)
    assert bench.transfers.newest_posted_at == 0.0
    bench.transfers.turn(0.0)
    assert bench.endings() == [("b", "arrived"), ("c", "arrived")]
    assert len(bench.transfers) == 0


def test_batches_are_bounded_in_bytes_and_in_entries():
    def legs(*sizes):
        """With so much memory to land in; batches do not count payload."""
        return [Leg(index, SimpleNamespace(nbytes=size), 0, 0, 0) for index, size in enumerate(sizes)]

    def sizes(legs):
        waiting = deque(legs)
        batches = []
        while waiting:
            batches.append([leg.extent.nbytes for leg in take_batch(waiting, BATCH_BYTES)])
        return batches

    assert sizes([]) == []
    assert sizes(legs(MIB, MIB)) == [[MIB, MIB]]
    assert sizes(legs(2 * BATCH_BYTES, 1, 2)) == [[2 * BATCH_BYTES], [1, 2]]
    assert sizes(legs(BATCH_BYTES - 1, 1, 1)) == [[BATCH_BYTES - 1, 1], [1]]
    assert list(map(len, sizes(legs(*[1] * (BATCH_LEGS + 1))))) == [BATCH_LEGS, 1]
