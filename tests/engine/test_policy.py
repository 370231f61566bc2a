from __future__ import annotations

from itertools import islice
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_p2p.engine import line
from ec_p2p.engine.gdsf import GDSF
from ec_p2p.engine.policy import LRU, EvictionPolicy, make_policy


@pytest.mark.parametrize(("word", "policy"), [("LRU", LRU), ("GDSF", GDSF)])
def test_a_word_makes_a_policy(word: str, policy: type) -> None:
    assert type(make_policy(word)) is policy


@pytest.mark.parametrize("word", ["lru", "FIFO", ""])
def test_an_unknown_word_is_one_clear_error(word: str) -> None:
    with pytest.raises(ValueError, match=f"cache_policy='{word}'; accepted: LRU, GDSF"):
        make_policy(word)


def test_lru_gives_up_the_least_recently_used_first() -> None:
    policy: EvictionPolicy = LRU()
    for identity in (b"a", b"b", b"c"):
        policy.added(identity, 1)
    policy.touched(b"a", 1)
    policy.removed(b"b", 1)
    policy.restored(b"d", 1)
    policy.restored(b"e", 1)
    assert list(policy.victims()) == [b"e", b"d", b"c", b"a"]
    policy.touched(b"d", 1)
    assert list(policy.victims()) == [b"e", b"c", b"a", b"d"]


def test_lru_refuses_to_forget_what_it_does_not_know() -> None:
    policy = LRU()
    for call in (policy.removed, policy.touched):
        with pytest.raises(KeyError):
            call(b"a", 1)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("aortv"), st.integers(0, 9)), max_size=80))
def test_lru_agrees_with_a_list(calls: list[tuple[str, int]]) -> None:
    """Looked up a few at a time, so that a short list of calls gets past every look-up."""
    policy, order = LRU(), list[bytes]()
    with mock.patch.multiple(line, _FEW=2, _MANY=4):
        for call, number in calls:
            identity = bytes([number])
            known = identity in order
            if call == "a" and not known:
                policy.added(identity, 1)
                order.append(identity)
            elif call == "o" and not known:
                policy.restored(identity, 1)
                order.insert(0, identity)
            elif call == "t" and known:
                policy.touched(identity, 1)
                order.remove(identity)
                order.append(identity)
            elif call == "r" and known:
                policy.removed(identity, 1)
                order.remove(identity)
            elif call == "v":
                assert list(islice(policy.victims(), number)) == order[:number]
        assert list(policy.victims()) == order
