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


def deliver(rates, holder, nbytes, seconds):
    """One READ that takes so long."""
    clock = rates._clock
    delivery = rates.begun(holder, clock.now)
    clock.now += seconds
    delivery.done(nbytes)


def test_of_a_stranger_nothing_is_expected():
    assert Rates().expected_s(ONE, MIB) is None
    assert not Rates().distrusted(ONE)


def test_small_reads_tell_the_latency_and_large_ones_the_bandwidth():
    clock = Clock()
    rates = Rates(clock)
    deliver(rates, ONE, 64, 0.001)
    assert rates.expected_s(ONE, 64) == pytest.approx(0.001)
    deliver(rates, ONE, 10 * MIB, 0.01)
    assert rates.expected_s(ONE, 20 * MIB) == pytest.approx(0.021)
    assert rates.expected_s(OTHER, 64) is None


def test_what_is_new_counts_more_than_what_is_old():
    clock = Clock()
    rates = Rates(clock)
    for seconds in [1.0] * 5 + [0.1] * 3:
        deliver(rates, ONE, MIB, seconds)
    assert rates.expected_s(ONE, MIB) == pytest.approx(0.1)


def test_one_bad_moment_decides_nothing():
    clock = Clock()
    rates = Rates(clock)
    for seconds in (0.1, 0.1, 0.1, 2.5):
        deliver(rates, ONE, MIB, seconds)
    assert rates.expected_s(ONE, MIB) == pytest.approx(0.1)


def test_a_stranger_is_taken_for_one_like_the_others():
    clock = Clock()
    rates = Rates(clock)
    assert 0 < rates.usual_s(0) < rates.usual_s(MIB) < 0.01
    deliver(rates, ONE, MIB, 0.5)
    assert rates.usual_s(2 * MIB) == pytest.approx(1.0)
    assert rates.expected_s(OTHER, MIB) is None
    clock.now += 31
    assert rates.usual_s(MIB) < 0.01


def test_reads_that_are_done_as_soon_as_posted_do_not_count_each_others_time():
    """As through shared memory: those of one turn have the same time of posting."""
    clock = Clock()
    rates = Rates(clock)
    posted_at = clock.now
    for _ in range(5):
        delivery = rates.begun(ONE, posted_at)
        clock.now += 0.1
        delivery.done(MIB)
    assert rates.expected_s(ONE, MIB) == pytest.approx(0.1)


def test_a_holder_that_failed_is_distrusted_until_it_delivers_or_time_has_passed():
    clock = Clock()
    rates = Rates(clock)
    rates.failed(ONE)
    rates.failed(OTHER)
    assert rates.distrusted(ONE)
    deliver(rates, ONE, MIB, 0.1)
    assert not rates.distrusted(ONE)
    assert rates.distrusted(OTHER)
    clock.now += 11
    assert not rates.distrusted(OTHER)


def test_who_was_waited_for_in_vain_is_distrusted_and_more():
    clock = Clock()
    rates = Rates(clock)
    rates.failed(ONE)
    rates.silent(OTHER)
    assert (rates.silent_lately(ONE), rates.silent_lately(OTHER)) == (False, True)
    assert rates.distrusted(OTHER)
    rates.failed(OTHER)
    assert rates.silent_lately(OTHER)
    deliver(rates, OTHER, MIB, 0.0)
    assert not rates.silent_lately(OTHER)


def test_reads_in_flight_together_share_the_wire():
    clock = Clock()
    rates = Rates(clock)
    deliveries = [rates.begun(ONE, clock.now) for _ in range(3)]
    for delivery in deliveries:
        assert rates.expected_s(ONE, MIB) is None
        clock.now += 0.1
        delivery.done(10 * MIB)
    assert rates.expected_s(ONE, 30 * MIB) == pytest.approx(0.3)
    deliver(rates, ONE, 20 * MIB, 0.2)
    assert rates.expected_s(ONE, 30 * MIB) == pytest.approx(0.3), "the time between spells counts for nothing"


def test_a_spell_without_an_end_is_measured_all_the_same():
    clock = Clock()
    rates = Rates(clock)
    delivery = rates.begun(ONE, clock.now)
    for _ in range(20):
        clock.now += 0.1
        delivery, before = rates.begun(ONE, clock.now), delivery
        before.done(10 * MIB)
    assert rates.expected_s(ONE, 10 * MIB) == pytest.approx(0.1)


def test_a_spell_in_which_something_was_lost_measures_nothing():
    clock = Clock()
    rates = Rates(clock)
    one, other = rates.begun(ONE, clock.now), rates.begun(ONE, clock.now)
    clock.now += 10.0
    one.lost()
    clock.now += 0.001
    other.done(16 * MIB)
    assert rates.expected_s(ONE, MIB) is None
    deliver(rates, ONE, MIB, 0.1)
    assert rates.expected_s(ONE, MIB) == pytest.approx(0.1)


def test_a_spell_without_an_end_is_measured_again_after_a_loss():
    clock = Clock()
    rates = Rates(clock)
    rates.begun(ONE, clock.now).lost()
    lasting = rates.begun(ONE, clock.now)
    rates.begun(ONE, clock.now).lost()
    for _ in range(20):
        deliver(rates, ONE, 10 * MIB, 0.1)
    assert rates.expected_s(ONE, 10 * MIB) == pytest.approx(0.1)
    lasting.lost()


def test_a_small_read_behind_a_large_one_is_no_measure_of_the_latency():
    clock = Clock()
    rates = Rates(clock)
    large, small = rates.begun(ONE, clock.now), rates.begun(ONE, clock.now)
    clock.now += 1.9
    small.done(64)
    clock.now += 0.1
    large.done(20 * MIB)
    assert rates.measured() == [(ONE, Measured(None, pytest.approx(10 * MIB, rel=0.01)))]


def test_what_was_measured_long_ago_is_forgotten():
    clock = Clock()
    rates = Rates(clock)
    deliver(rates, ONE, MIB, 2.5)
    clock.now += 29
    assert rates.expected_s(ONE, MIB) == pytest.approx(2.5)
    clock.now += 2
    assert rates.expected_s(ONE, MIB) is None
    assert rates.measured() == [(ONE, Measured(None, pytest.approx(MIB / 2.5)))]
    deliver(rates, ONE, MIB, 0.1)
    assert rates.expected_s(ONE, MIB) == pytest.approx(0.1), "one bad moment is not blended into what is true now"


def test_what_was_measured_long_ago_is_told_and_not_counted_on():
    clock = Clock()
    rates = Rates(clock)
    deliver(rates, ONE, 64, 0.5)
    clock.now += 31
    deliver(rates, ONE, MIB, 0.1)
    assert rates.expected_s(ONE, MIB) == pytest.approx(0.1)
    assert rates.measured() == [(ONE, Measured(0.5, pytest.approx(10 * MIB)))]


def test_what_was_measured_is_told_as_far_as_it_was():
    clock = Clock()
    rates = Rates(clock)
    assert rates.measured() == []
    deliver(rates, ONE, 64, 0.5)
    rates.failed(OTHER)
    assert rates.measured() == [(ONE, Measured(0.5, None)), (OTHER, Measured(None, None))]
    deliver(rates, ONE, 10 * MIB, 0.25)
    deliver(rates, OTHER, MIB, 0.0)  # in no time at all: nothing to divide by
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
