from __future__ import annotations

from collections import Counter
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.engine.uses import Uses


def identity(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


@given(st.lists(st.integers(0, 20), max_size=200))
def test_few_identities_are_counted_exactly(numbers: list[int]) -> None:
    uses, exact = Uses(), Counter[int]()
    for number in numbers:
        exact[number] += 1
        assert uses.count(identity(number)) == exact[number]


def test_many_are_counted_too_high_seldom_and_too_low_never() -> None:
    uses, exact, wrong = Uses(), Counter[int](), 0
    uses.make_room_for(10_000)
    for number in (step * step % 9973 for step in range(30_000)):
        exact[number] += 1
        counted = uses.count(identity(number))
        assert counted >= exact[number]
        wrong += counted > exact[number]
    assert wrong < 300


def test_more_counters_forget_nothing() -> None:
    uses = Uses()
    for number in range(100):
        uses.count(identity(number))
    uses.make_room_for(5_000)
    assert [uses.count(identity(number)) for number in range(100)] == [2] * 100


def test_old_uses_fade() -> None:
    uses = Uses()
    for _ in range(40):
        uses.count(identity(0))
    for number in range(1, 1000):
        uses.count(identity(number))
    assert 2 <= uses.count(identity(0)) < 20
