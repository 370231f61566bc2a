"""What was counted of peers that are gone: kept for a while, then forgotten, but for the sums."""

from __future__ import annotations

import pytest

from ec_p2p.engine.tally import Tally
from ec_p2p.node.inspection import summed_over
from ec_p2p.node.peer_counts import KEPT_S, PeerCounts

SUMS = {("fetches", (("outcome", "landed"),)): 3.0, ("fetched_bytes", ()): 300.0, ("saves", ()): 1.0}


@pytest.fixture
def counters():
    counters = Tally()
    counters.add("saves")
    for peer, times in (("one", 1), ("two", 2)):
        counters.add("fetches", times, outcome="landed", peer=peer)
        counters.add("fetched_bytes", 100 * times, peer=peer)
    return counters


def peers_of(counters):
    return {text for _, labels in counters.values() for label, text in labels if label == "peer"}


def sums(counters):
    return summed_over("peer", counters.values(), counters.forgotten())


def test_what_is_counted_of_a_peer_that_is_gone_for_long_is_forgotten_and_the_sums_stay(counters):
    present = ["one", "two"]
    counts = PeerCounts(counters, lambda: present)
    counts.tick(0.0)
    counts.tick(2 * KEPT_S)
    assert peers_of(counters) == {"one", "two"}
    present.remove("two")
    gone_at = 3 * KEPT_S
    counts.tick(gone_at)
    counts.tick(gone_at + KEPT_S - 1)
    assert peers_of(counters) == {"one", "two"}
    counts.tick(gone_at + KEPT_S + 60)
    assert peers_of(counters) == {"one"}
    assert sums(counters) == SUMS
    assert counters.get("saves") == 1


def test_a_peer_that_comes_back_in_time_keeps_its_counts(counters):
    present = ["one"]
    counts = PeerCounts(counters, lambda: present)
    counts.tick(0.0)
    present.append("two")
    counts.tick(KEPT_S / 2)
    present.remove("two")
    counts.tick(KEPT_S)
    counts.tick(2 * KEPT_S - 1)
    assert peers_of(counters) == {"one", "two"}


def test_one_that_comes_back_later_begins_anew_and_is_forgotten_again(counters):
    counts = PeerCounts(counters, lambda: ["one"])
    counts.tick(0.0)
    counts.tick(KEPT_S)
    assert peers_of(counters) == {"one"}
    counters.add("fetched_bytes", 7, peer="two")
    counts.tick(2 * KEPT_S)
    assert counters.get("fetched_bytes", peer="two") == 7
    counts.tick(3 * KEPT_S)
    assert peers_of(counters) == {"one"}
    assert sums(counters)["fetched_bytes", ()] == 307
