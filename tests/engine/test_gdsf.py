from __future__ import annotations

import random
from collections import Counter
from hashlib import sha256
from itertools import islice
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_p2p.engine import gdsf, line
from ec_p2p.engine.gdsf import FIXED_BYTES, GDSF
from ec_p2p.engine.policy import EvictionPolicy

MIB = 1 << 20


def identity(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def order(policy: GDSF, count: int) -> list[int]:
    names = {identity(number): number for number in range(count)}
    return [names[victim] for victim in policy.victims()]


def test_what_was_used_once_goes_first_and_oldest_first_whatever_its_size() -> None:
    policy: EvictionPolicy = GDSF()
    for number, nbytes in enumerate([MIB, 64 * MIB, 4096, MIB]):
        policy.added(identity(number), nbytes)
    assert list(policy.victims()) == [identity(number) for number in range(4)]


def test_more_uses_and_less_size_are_worth_more() -> None:
    policy = GDSF()
    for number, nbytes in enumerate([MIB, 16 * MIB, MIB, 16 * MIB]):
        policy.added(identity(number), nbytes)
    for number in (0, 1, 2, 3, 2, 3):
        policy.touched(identity(number), [MIB, 16 * MIB][number % 2])
    assert order(policy, 4) == [1, 0, 3, 2]


def test_the_clock_lets_new_uses_overtake_old_ones() -> None:
    policy = GDSF()
    policy.added(identity(0), MIB)
    for _ in range(3):
        policy.touched(identity(0), MIB)
    for number in range(1, 100):
        policy.added(identity(number), MIB)
        policy.touched(identity(number), MIB)
        victim = next(policy.victims())
        policy.removed(victim, MIB)
        if victim == identity(0):
            return
    raise AssertionError("what was popular once is never given up")


def test_an_entry_that_comes_back_is_known() -> None:
    policy = GDSF()
    policy.added(identity(0), MIB)
    policy.removed(identity(0), MIB)
    policy.added(identity(0), MIB)
    policy.added(identity(1), MIB)
    assert order(policy, 2) == [1, 0]


def test_what_is_restored_goes_before_all_else_last_one_first() -> None:
    policy = GDSF()
    policy.restored(identity(0), MIB)
    policy.added(identity(1), MIB)
    policy.restored(identity(2), MIB)
    assert order(policy, 3) == [2, 0, 1]
    policy.touched(identity(2), MIB)
    assert order(policy, 3) == [0, 1, 2]


def test_what_goes_out_of_turn_moves_no_clock() -> None:
    policy = GDSF()
    for number in range(3):
        policy.added(identity(number), MIB)
    for _ in range(5):
        policy.touched(identity(0), MIB)
    policy.touched(identity(1), MIB)
    assert next(policy.victims()) == identity(2)
    policy.removed(identity(0), MIB)  # worth much; had it moved the clock, the next would be worth more than 1 is
    policy.added(identity(3), MIB)
    assert order(policy, 4) == [2, 3, 1]


def test_a_use_never_lowers_worth_though_counts_fade() -> None:
    policy = GDSF()
    for number, uses in enumerate([8, 5, 2000]):
        policy.added(identity(number), MIB)
        for _ in range(uses):
            policy.touched(identity(number), MIB)
    policy.touched(identity(0), MIB)
    assert order(policy, 3) == [1, 0, 2]


def test_unknown_identities_are_refused() -> None:
    policy = GDSF()
    for call in (policy.removed, policy.touched):
        with pytest.raises(KeyError):
            call(identity(0), MIB)


def test_memory_is_bounded_by_what_is_known() -> None:
    """Lines that have ended are forgotten when victims are asked for, and are one to a step until then."""
    policy = GDSF()
    for number in range(20_000):
        nbytes = 4096 << number % 13
        policy.added(identity(number), nbytes)
        for _ in range(number % 9):
            policy.touched(identity(number), nbytes)
        if number >= 100:
            policy.removed(identity(number - 100), 4096 << (number - 100) % 13)
    assert len(policy._heads) == len(policy._lines) <= 200
    assert set(policy.victims()) == {identity(number) for number in range(19_900, 20_000)}
    for number in range(19_900, 20_000):
        policy.removed(identity(number), 4096 << number % 13)
    assert list(policy.victims()) == []
    assert (policy._heads, policy._lines) == ([], {})


def test_what_is_worth_almost_as_much_stands_in_one_line() -> None:
    """What the rounding does: by at most half a step."""
    for nbytes in (1, 4096, 333_333, MIB, 64 * MIB, 1 << 40):
        for repeats in range(1, gdsf._ENOUGH_REPEATS + 1):
            exact = repeats * (1 + FIXED_BYTES / nbytes)
            assert exact / 2 ** (1 / 32) <= gdsf._lead(gdsf._steps(nbytes)[repeats]) * 1.000001
            assert gdsf._lead(gdsf._steps(nbytes)[repeats]) <= exact * 2 ** (1 / 32) * 1.000001
        assert gdsf._lead(gdsf._steps(nbytes)[0]) == 0


class Model:
    """The policy as its text has it: worth by identity, sorted when asked for; among equals by step."""

    def __init__(self) -> None:
        self.uses = Counter[bytes]()
        self.worth: dict[bytes, float] = {}
        self.step: dict[bytes, int] = {}
        self.nbytes: dict[bytes, int] = {}
        self.clock = self.reach = self.oldest = 0.0

    def use(self, identity: bytes) -> None:
        self.uses[identity] += 1
        self.clock += gdsf._TICK
        repeats = min(self.uses[identity] - 1, gdsf._ENOUGH_REPEATS)
        step = gdsf._steps(self.nbytes[identity])[repeats]
        worth = self.clock + gdsf._lead(step)
        if worth > self.worth.get(identity, -1):
            self.worth[identity], self.step[identity] = worth, step

    def restore(self, identity: bytes) -> None:
        self.oldest -= 1
        self.worth[identity], self.step[identity] = self.oldest, 0

    def remove(self, identity: bytes) -> None:
        worth = self.worth.pop(identity)
        if worth <= self.reach:
            self.clock = max(self.clock, worth)

    def victims(self, count: int) -> list[bytes]:
        victims = sorted(self.worth, key=lambda identity: (self.worth[identity], self.step[identity]))[:count]
        if victims:
            self.reach = self.worth[victims[-1]]
        return victims


CALLS = st.tuples(st.sampled_from("aaottrvvg"), st.integers(0, 11), st.sampled_from([4096, MIB, 5 * MIB]))


@settings(max_examples=300)
@given(st.lists(CALLS, max_size=120))
def test_the_order_is_the_models(calls: list[tuple[str, int, int]]) -> None:
    """Looked up a few at a time, so that short looks get past every look-up. `g`: as a tier does, the first victims
    but one go."""
    policy, model = GDSF(), Model()
    with mock.patch.multiple(line, _FEW=2, _MANY=3):
        for call, number, nbytes in calls:
            name = identity(number)
            known = name in model.worth
            if call in "ao" and not known:
                model.nbytes[name] = nbytes
            if call == "a" and not known:
                policy.added(name, nbytes)
                model.use(name)
            elif call == "o" and not known:
                policy.restored(name, nbytes)
                model.restore(name)
            elif call == "t" and known:
                policy.touched(name, model.nbytes[name])
                model.use(name)
            elif call == "r" and known:
                policy.removed(name, model.nbytes[name])
                model.remove(name)
            elif call in "vg":
                victims = list(islice(policy.victims(), number))
                assert victims == model.victims(number)
                for victim in victims[1:] if call == "g" else ():
                    policy.removed(victim, model.nbytes[victim])
                    model.remove(victim)
        assert list(policy.victims()) == model.victims(len(model.worth))


def test_the_order_is_the_models_in_a_long_life() -> None:
    policy, model, rng = GDSF(), Model(), random.Random(0)
    names = [identity(number) for number in range(400)]
    for name in names:
        model.nbytes[name] = rng.choice([4096, 300_000, MIB, 17 * MIB])
    policy._uses.make_room_for(10_000)  # so that it counts as exactly as the model, and nothing fades
    for _ in range(6000):
        name = rng.choice(names[: rng.choice([20, 400])])
        if name not in model.worth:
            policy.added(name, model.nbytes[name])
        else:
            policy.touched(name, model.nbytes[name])
        model.use(name)
        if len(model.worth) > 100:
            victims = list(islice(policy.victims(), rng.randrange(1, 20)))
            assert victims == model.victims(len(victims))
            for victim in rng.sample(victims, rng.randrange(1, len(victims) + 1)):
                policy.removed(victim, model.nbytes[victim])
                model.remove(victim)
    assert list(policy.victims()) == model.victims(len(model.worth))
