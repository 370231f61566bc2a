"""In which order the holders of an entry are tried."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.node.peers import PeerState
from ec_p2p.node.rates import Rates
from ec_p2p.node.sources import FleetSources

A = bytes([1]) * 32
MIB = 1 << 20
HERE = NodeInfo(bytes(16), "here", "tcp://10.0.0.1:5000")


class Fleet:
    """What the directory, the peers and the rates say. Every node is ready unless said otherwise."""

    def __init__(self):
        self.holders = []
        self.asking = set()
        self.unusable = set()
        self.now = 100.0
        self.rates = Rates(lambda: self.now)
        self.outstanding = {}
        self.sources = FleetSources(
            HERE,
            SimpleNamespace(lookup=lambda identity: self.holders),
            self,
            None,
            self.rates,
            lambda incarnation: self.outstanding.get(incarnation, 0),
        )

    def get(self, incarnation):
        state = PeerState.ASKING if incarnation in self.asking else PeerState.READY
        if incarnation in self.unusable:
            state = PeerState.UNUSABLE
        return SimpleNamespace(state=state)

    def add(self, number, host="10.0.0.2", state=EntryState.RESIDENT):
        info = NodeInfo(bytes([number]) * 16, f"n{number}", f"tcp://{host}:{5000 + number}")
        self.holders.append((info, Advert(A, state, 4 * MIB, 1, 2 * MIB, "bfloat16", 0, 0, 1)))
        return info.incarnation

    def delivers(self, incarnation, seconds):
        delivery = self.rates.begun(incarnation, self.now)
        self.now += seconds
        delivery.done(4 * MIB)

    def order(self):
        return [info.name for info, _ in self.sources.holders(A)]


@pytest.fixture
def fleet():
    return Fleet()


def test_memory_comes_before_disk_and_this_node_is_no_holder(fleet):
    fleet.add(1, state=EntryState.DISK)
    fleet.add(2)
    fleet.add(3, state=EntryState.PENDING)
    fleet.holders.append((HERE, fleet.holders[0][1]))
    assert fleet.order() == ["n2", "n1"]


def test_this_host_comes_before_others(fleet):
    for number in range(1, 6):
        fleet.add(number)
    fleet.add(9, host="10.0.0.1")
    assert fleet.order()[0] == "n9"


def test_who_cannot_be_read_yet_or_has_failed_comes_last(fleet):
    fleet.asking.add(fleet.add(1, host="10.0.0.1"))
    failed = fleet.add(2, host="10.0.0.1")
    fleet.rates.failed(failed)
    fleet.add(3)
    assert fleet.order() == ["n3", "n2", "n1"]
    fleet.now += 60
    assert fleet.order() == ["n2", "n3", "n1"]


def test_the_faster_holder_comes_first_and_a_small_difference_does_not_count(fleet):
    slow, fast, like_it = fleet.add(1), fleet.add(2), fleet.add(3)
    fleet.delivers(slow, 0.1)
    fleet.delivers(fast, 0.0012)
    fleet.delivers(like_it, 0.0013)
    order = fleet.order()
    assert order[-1] == "n1"
    fleet.delivers(fast, 0.0016)
    assert fleet.order() == order


def test_who_is_busy_with_us_comes_later(fleet):
    one, other = fleet.add(1), fleet.add(2)
    for incarnation in (one, other):
        fleet.delivers(incarnation, 0.001)
    first, second = fleet.order()
    fleet.outstanding[{"n1": one, "n2": other}[first]] = 64 * MIB
    assert fleet.order() == [second, first]


def test_who_was_never_measured_is_tried(fleet):
    known = fleet.add(1)
    fleet.add(2)
    fleet.delivers(known, 0.000001)
    assert fleet.order() == ["n2", "n1"]


@pytest.mark.parametrize("measured", [0, 3, 4])
def test_the_items_of_a_want_spread_over_those_never_measured_too(fleet, measured):
    incarnations = [fleet.add(number) for number in range(1, 5)]
    for incarnation in incarnations[:measured]:
        fleet.delivers(incarnation, 0.004)
    for _ in range(16):
        info, advert = fleet.sources.holders(A)[0]
        fleet.outstanding[info.incarnation] = fleet.outstanding.get(info.incarnation, 0) + advert.nbytes
    assert sorted(fleet.outstanding) == sorted(incarnations)
    assert max(fleet.outstanding.values()) <= 8 * 4 * MIB


def test_of_holders_that_disagree_the_one_comes_first_that_asks_for_the_least(fleet):
    fleet.add(1, host="10.0.0.1")
    info, advert = fleet.holders.pop()
    fleet.holders.append((info, msgspec.structs.replace(advert, nbytes=1 << 40)))
    fleet.add(2, state=EntryState.DISK)
    assert fleet.order() == ["n2", "n1"]


def test_who_was_waited_for_and_who_cannot_be_read_from_are_tried_in_vain(fleet):
    _, silent, failed = (fleet.add(number) for number in (1, 2, 3))
    fleet.rates.silent(silent)
    fleet.rates.failed(failed)
    fleet.unusable.add(fleet.add(4))
    assert [fleet.sources.in_vain(holder) for holder in fleet.holders] == [False, True, False, True]


def test_readers_spread_over_equal_holders():
    first = set()
    for reader in range(32):
        fleet = Fleet()
        fleet.sources._incarnation = bytes([reader]) * 16
        for number in range(1, 5):
            fleet.add(200 + number)
        first.add(fleet.order()[0])
    assert len(first) > 1
