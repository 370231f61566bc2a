from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ec_p2p.engine.policy import LRU, EvictionPolicy


def test_lru_gives_up_the_least_recently_used_first() -> None:
    policy: EvictionPolicy = LRU()
    for identity in (b"a", b"b", b"c"):
        policy.added(identity, 1)
    policy.touched(b"a")
    policy.removed(b"b")
    policy.restored(b"d", 1)
    policy.restored(b"e", 1)
    assert list(policy.victims()) == [b"e", b"d", b"c", b"a"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("atr"), st.integers(0, 5))))
def test_lru_agrees_with_a_list(calls: list[tuple[str, int]]) -> None:
    policy, order = LRU(), list[bytes]()
    for call, number in calls:
        identity = bytes([number])
        if call == "a" and identity not in order:
            policy.added(identity, 1)
            order.append(identity)
        elif call == "t" and identity in order:
            policy.touched(identity)
            order.remove(identity)
            order.append(identity)
        elif call == "r" and identity in order:
            policy.removed(identity)
            order.remove(identity)
    assert list(policy.victims()) == order
