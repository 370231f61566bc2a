"""`ec_transfer_params` come from whoever sent the request: they may say what to expect, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.connector.identifiers import is_hinted

from .conftest import Clock, Harness, ScriptedNode, image, loaded, request, without_media

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("a"), inner, max_size=4),
    max_leaves=20,
)
HOSTILE = [
    "a",
    ["a"],
    7,
    -1,
    True,
    {"a": None},
    {"a": {"peer_host": "10.0.0.1", "peer_port": 22, "size_bytes": -5, "shape": [1 << 60, -1]}},
    {"a": {"ec_p2p": {"node": "../../x", "rows": 1 << 80}}},
    {"a": "x" * 1_000_000},
    {"a": {str(n): n for n in range(100_000)}},
    {"b" * 100_000: 1},
]


@pytest.mark.parametrize("hint", HOSTILE, ids=lambda hint: repr(hint)[:40])
@pytest.mark.parametrize("data", ["media", "placeholder only"])
def test_no_hint_changes_what_a_request_gets(hint, data):
    node = ScriptedNode(Clock())
    h = Harness(node, node.clock, "ec_consumer")
    feature = image("a") if data == "media" else image("a", data=without_media)
    r = request(feature, hint=hint)
    assert h.ensure(r) is (data == "media")
    assert h.side.take_unavailable_requests() == (set() if data == "media" else {r.request_id})
    node.holds = {"a": 10}
    assert loaded(h.schedule(request(feature, hint=hint))) == ["a"]


@given(JSON)
def test_any_value_is_survived(hint):
    node = ScriptedNode(Clock())
    h = Harness(node, node.clock, "ec_both")
    node.holds = {"a": 10}
    r = request("a", "b")
    r.ec_transfer_params = hint
    step = h.schedule(r)
    assert loaded(step) == ["a"]
    assert list(step.encodes) == ["b"]
    h.side.request_finished(r)
    expected = [kind["expect_s"] > 0 for *_, kind in node.told("want")]
    assert any(expected) == (isinstance(hint, dict) and not {"a", "b"}.isdisjoint(hint))


def test_a_hint_makes_an_entry_expected():
    node = ScriptedNode(Clock())
    h = Harness(node, node.clock, "ec_consumer", expect_s=0.7)
    h.ensure(request("a", "b", hint={"b": {"item_indices": [1], "metadata": {}}}))
    assert [(len(identities), kind["expect_s"]) for _, identities, kind in node.told("want")] == [(1, 0.0), (1, 0.7)]


@pytest.mark.parametrize("hint", [None, "a", ["a"], {"a"}, 7, object()])
def test_only_a_dict_hints(hint):
    assert not is_hinted(hint, "a")
    assert is_hinted({"a": hint}, "a")
