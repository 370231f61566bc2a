from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ec_p2p.engine.breaker import Breaker
from tests.engine.disks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(1.0, 60.0, clock)


def test_closed_admits_all(breaker: Breaker) -> None:
    assert all(breaker.admit() for _ in range(3))
    assert not breaker.succeeded()
    assert (breaker.is_open, breaker.refuses(), breaker.delay_s) == (False, False, 0)


def test_after_a_failure_one_trial_decides(breaker: Breaker, clock: Clock) -> None:
    assert breaker.failed()
    assert breaker.is_open
    assert not breaker.admit()
    clock.now += 0.99
    assert breaker.refuses()
    assert not breaker.admit()
    clock.now += 0.01
    assert not breaker.refuses()
    assert breaker.admit()
    assert breaker.refuses()
    assert not breaker.admit()
    assert breaker.succeeded()
    assert not breaker.is_open
    assert all(breaker.admit() for _ in range(3))


def test_asking_makes_nobody_the_trial(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now += 1
    assert not any(breaker.refuses() for _ in range(3))
    assert breaker.admit()


def test_the_delay_doubles_to_a_minute_and_starts_over(breaker: Breaker, clock: Clock) -> None:
    delays = []
    breaker.failed()
    for _ in range(8):
        delays.append(breaker.delay_s)
        clock.now += breaker.delay_s
        assert breaker.admit()
        assert breaker.failed()
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now += 60
    assert breaker.admit()
    assert breaker.succeeded()
    assert breaker.failed()
    assert breaker.delay_s == 1


def test_stragglers_of_before_the_failure_decide_nothing(breaker: Breaker, clock: Clock) -> None:
    assert all(breaker.admit() for _ in range(4))
    assert breaker.failed()
    assert not breaker.failed()
    assert not breaker.succeeded()
    assert breaker.delay_s == 1
    assert not breaker.admit()
    clock.now += 1
    assert breaker.admit()


def test_a_trial_that_never_reports_is_followed_by_another(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now += 1
    assert breaker.admit()
    clock.now += 59
    assert not breaker.admit()
    clock.now += 1
    assert breaker.admit()
    assert breaker.succeeded()


def test_a_trial_that_learnt_nothing_is_followed_by_another_at_once(breaker: Breaker, clock: Clock) -> None:
    breaker.undecided()
    assert not breaker.is_open
    breaker.failed()
    breaker.undecided()  # no trial
    assert not breaker.admit()
    clock.now += 1
    assert breaker.admit()
    breaker.undecided()
    assert (breaker.is_open, breaker.delay_s, breaker.refuses()) == (True, 1, False)
    assert breaker.admit()
    assert not breaker.admit()
    assert breaker.failed()
    assert breaker.delay_s == 2


@pytest.mark.parametrize("report", [Breaker.succeeded, Breaker.failed, Breaker.undecided])
def test_only_who_is_on_trial_decides(breaker: Breaker, clock: Clock, report: Callable[[Breaker], bool | None]) -> None:
    """Not who was admitted before the failure, and is ready while the trial goes on."""
    breaker.failed()
    clock.now += 1
    assert breaker.admit()
    straggler = threading.Thread(target=report, args=(breaker,))
    straggler.start()
    straggler.join()
    assert (breaker.is_open, breaker.delay_s, breaker.refuses()) == (True, 1, True)
    assert breaker.succeeded()


class BreakerMachine(RuleBasedStateMachine):
    """Whatever is reported whenever: it always admits again after a minute, and never two at once while open."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.breaker = Breaker(1.0, 60.0, self.clock)

    @rule(seconds=st.floats(0.01, 70))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def admit(self) -> None:
        was_open, refuses = self.breaker.is_open, self.breaker.refuses()
        assert self.breaker.admit() == (not refuses)
        if was_open:
            assert not self.breaker.admit()

    @rule()
    def succeeded(self) -> None:
        if self.breaker.succeeded():
            assert self.breaker.admit()

    @rule()
    def undecided(self) -> None:
        before = self.breaker.delay_s
        self.breaker.undecided()
        assert self.breaker.delay_s == before

    @rule()
    def failed(self) -> None:
        before = self.breaker.delay_s
        if self.breaker.failed():
            assert self.breaker.delay_s == (min(60, 2 * before) or 1)
            assert not self.breaker.admit()
        else:
            assert self.breaker.delay_s == before > 0

    @invariant()
    def it_never_refuses_for_longer_than_a_minute(self) -> None:
        now = self.clock.now
        self.clock.now += 60
        assert not self.breaker.refuses()
        self.clock.now = now


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=50, stateful_step_count=40)
