"""What is expected of a holder, from what it has delivered."""

from __future__ import annotations

import pytest

from ec_p2p.node.rates import Measured, Rates

ONE, OTHER = bytes(16), bytes([1] * 16)
MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_of_a_stranger_nothing_is_expected():
    assert Rates().expected_s(ONE, MIB) is None
    assert not Rates().distrusted(ONE)


def test_small_reads_tell_the_latency_and_large_ones_the_bandwidth():
    clock = Clock()
    rates = Rates(clock)
    rates.observe(ONE, 64, clock.now - 0.001)
    assert rates.expected_s(ONE, 64) == pytest.approx(0.001)
    rates.observe(ONE, 10 * MIB, clock.now - 0.01)
    assert rates.expected_s(ONE, 20 * MIB) == pytest.approx(0.021)
    assert rates.expected_s(OTHER, 64) is None


def test_what_is_new_counts_more_than_what_is_old():
    clock = Clock()
    rates = Rates(clock)
    rates.observe(ONE, MIB, clock.now - 1.0)
    for _ in range(20):
        rates.observe(ONE, MIB, clock.now - 0.1)
    assert 0.1 < rates.expected_s(ONE, MIB) < 0.11


def test_a_holder_that_failed_is_distrusted_until_it_delivers_or_time_has_passed():
    clock = Clock()
    rates = Rates(clock)
    rates.failed(ONE)
    rates.failed(OTHER)
    assert rates.distrusted(ONE)
    rates.observe(ONE, MIB, clock.now - 0.1)
    assert not rates.distrusted(ONE)
    assert rates.distrusted(OTHER)
    clock.now += 11
    assert not rates.distrusted(OTHER)


def test_what_was_measured_is_told_as_far_as_it_was():
    clock = Clock()
    rates = Rates(clock)
    assert rates.measured() == []
    rates.observe(ONE, 64, clock.now - 0.5)
    rates.failed(OTHER)
    assert rates.measured() == [(ONE, Measured(0.5, None)), (OTHER, Measured(None, None))]
    rates.observe(ONE, 10 * MIB, clock.now - 0.25)
    rates.observe(OTHER, MIB, clock.now)  # in no time at all: nothing to divide by
    assert rates.measured() == [(ONE, Measured(0.5, 40 * MIB)), (OTHER, Measured(None, None))]
    rates.forget(ONE)
    assert [holder for holder, _ in rates.measured()] == [OTHER]


def test_holders_whose_reads_end_after_they_were_forgotten_do_not_gather():
    rates = Rates()
    for number in range(10_000):
        holder = number.to_bytes(16)
        rates.forget(holder)
        rates.failed(holder)
    assert len(rates.measured()) < 5_000
    assert rates.distrusted(holder)
    assert not rates.distrusted(ONE)


def test_a_holder_that_left_is_forgotten():
    rates = Rates()
    rates.failed(ONE)
    rates.forget(ONE)
    rates.forget(ONE)
    assert not rates.distrusted(ONE)
