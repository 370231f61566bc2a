"""What the scheduler side makes of a request that has changed, or an answer that has waited, since its last look."""

from __future__ import annotations

import pytest

from ec_p2p.config import make_config
from ec_p2p.connector.asking import GRACE_S, RECONSIDER_S
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.media import MediaFields
from ec_p2p.connector.scheduler import SchedulerSide
from ec_p2p.node.messages import Saved, SaveSkipped

from .conftest import ROLES, WAIT_S, identity_of, image, loaded, request
from .test_scheduler import fails_alone, only_metadata, twice_without_media

ALL_THE_TIME = WAIT_S + GRACE_S


# ---------------------------------------------------------------- a request that starts over


@pytest.mark.parametrize("feature", [image, only_metadata])
def test_what_is_waited_for_is_not_given_up_by_a_shorter_prefix(harness, node, clock, feature):
    """vLLM looks for a waiting request's prefix at each step, and holds no blocks for it."""
    h, r = harness(inline_wait_s=0.0), request(feature("a", 64))
    node.slow = {"a"}
    assert h.schedule(r, computed=32) is None
    clock.now += 0.02
    assert h.schedule(r, computed=16) is None
    node.land("a")
    assert loaded(h.schedule(r, computed=16)) == ["a"]
    assert "failed_requests" not in h.counted()


def test_a_shorter_prefix_does_not_make_the_wait_longer(harness, node, clock):
    h, r = harness(), request(only_metadata("a", 64))
    node.slow = {"a"}
    h.schedule(r, computed=32)
    clock.now += ALL_THE_TIME
    assert not h.ensure(r, computed=16)
    fails_alone(h, r)


def test_a_spare_lease_that_is_on_its_way_is_waited_for_after_a_preemption(harness, node, clock):
    h, r = harness(inline_wait_s=0.0), request(only_metadata("a", 0, 20))
    node.holds = {"a": 20}
    assert loaded(h.schedule(r)) == ["a"]
    node.slow = {"a"}
    assert h.ensure(r, computed=8), "vLLM keeps it: the spare one is not waited for"
    clock.now += ALL_THE_TIME
    r.num_preemptions += 1
    assert not h.ensure(r)
    assert not h.side.take_unavailable_requests()
    node.land("a")
    h.cache.clear()
    assert loaded(h.schedule(r)) == ["a"]


# ---------------------------------------------------------------- an engine that has not looked for long


def test_an_answer_that_lay_there_while_the_engine_was_paused_counts(harness, node, clock):
    h, r = harness(), request(only_metadata("a"))
    node.slow = {"a"}
    assert h.schedule(r) is None
    node.answer_open("a")
    clock.now += 60
    assert loaded(h.schedule(r)) == ["a"]


@pytest.mark.parametrize("reason", ["no_memory", "deadline"])
def test_a_no_that_is_old_is_asked_about_once_more(harness, node, clock, reason):
    """The request has queued behind a full batch since, and what was in the way then is gone."""
    h, r = harness(), request(only_metadata("a"))
    node.slow = {"a"}
    h.schedule(r)
    node.answer_open("a", reason)
    h.end()
    clock.now += 60
    node.slow, node.holds = set(), {"a": 10}
    assert loaded(h.schedule(r)) == ["a"]


def test_a_second_no_is_believed(harness, node, clock):
    h, r = harness(inline_wait_s=0.0), request(only_metadata("a"))
    node.slow = {"a"}
    h.schedule(r)
    for _ in range(2):
        assert not h.side.take_unavailable_requests()
        node.answer_open("a", "no_memory")
        h.end()
        clock.now += 60
        assert not h.ensure(r)
        h.end()
    fails_alone(h, r)


def test_a_no_that_is_fresh_is_believed(harness, node, clock):
    h, r = harness(), request(only_metadata("a"))
    node.slow = {"a"}
    h.schedule(r)
    node.answer_open("a", "no_memory")
    h.end()
    clock.now += RECONSIDER_S
    assert not h.ensure(r)
    fails_alone(h, r)


# ---------------------------------------------------------------- a prefix cache that overtakes


def test_what_a_prefix_cache_has_overtaken_is_given_back(harness, node):
    """Of requests with one prompt the first is scheduled, and the others find its blocks at their next look."""
    h, first, second, third = harness(inline_wait_s=0.0), request("a"), request("a"), request("a")
    node.slow = {"a"}
    assert [h.schedule(r) for r in (first, second, third)] == [None, None, None]
    for _ in (first, second):
        node.pending.popitem()
    number, index, _ = node._asked("a")
    node.slow = set()
    node.inbox.clear()
    for want in list(node.wants)[:2]:
        node._land(want, index, "remote", 10)
    assert loaded(h.schedule(first)) == ["a"]
    assert len(node.leases) == 2
    assert h.ensure(second, computed=12)
    assert h.ensure(third, computed=12)
    assert [state for _, state in node.leases.values()] == ["dispatched"]
    assert (number,) in node.told("forget"), "nobody waits for it any more"
    told = len(node.sent)
    assert h.ensure(third, computed=13)
    assert len(node.sent) == told


# ---------------------------------------------------------------- what the node held once


def test_nothing_is_said_to_be_held_that_is_encoded_anew(harness, node, clock):
    """A response that says so has a router leave the media out."""
    h, r = harness("ec_producer"), request("a")
    h.schedule(r)
    node.inbox.append(Saved(identity_of("a"), 80))
    h.end()
    assert "ec_p2p" in h.side.request_finished(r)["a"]
    h.end(freed=["a"])
    again = request("a")
    assert h.schedule(again).encodes == {"a": identity_of("a")}
    params = h.side.request_finished(again)
    assert (params["a"].get("ec_p2p"), params["a"]["metadata"]) == (None, {})
    node.inbox.append(SaveSkipped("no_window", identity_of("a")))
    h.end()
    assert not h.side._asking.is_held(identity_of("a"))


# ---------------------------------------------------------------- the mirror of vLLM's cache


def test_what_is_evicted_and_taken_back_in_one_pass_says_nothing_of_the_rest(harness, node):
    """vLLM leaves it out of what it tells to have freed."""
    h = harness(inline_wait_s=0.0)
    for name in "abc":
        h.schedule(request(name))
    h.cache -= {"a", "c"}
    assert h.ensure(request("a"))
    r = request("a")
    h.ensure(r)
    h.side.update_state_after_alloc(r, 0)
    h.end(freed=["c"])
    node.slow = {"b", "c"}
    assert h.ensure(request("b")), "vLLM has it: it is not waited for"
    assert not h.ensure(request("c"))


def test_a_cache_that_was_reset_is_known_by_its_room(harness, node):
    h = harness(inline_wait_s=0.0)
    for name in "ab":
        h.schedule(request(name))
    h.cache.clear()
    h.schedule(request("a"))
    node.slow = {"a", "b"}
    assert not h.ensure(request("b"))
    assert h.ensure(request("a")), "room was made for it after the reset"


# ---------------------------------------------------------------- leases of others


def test_who_can_encode_takes_no_lease_from_who_cannot(harness, node):
    h = harness(inline_wait_s=0.0)
    node.holds = {"a": 10}
    cannot, can = request(only_metadata("a", 40)), request("a")
    assert h.ensure(cannot)
    node.frozen = True
    h.side._resident.add("a")
    assert h.ensure(can), "vLLM had it a moment ago"
    assert h.schedule(can).loads == []
    assert [state for _, state in node.leases.values()] == ["held"]
    node.frozen, node.holds = False, {}
    h.cache.clear()
    assert loaded(h.schedule(cannot, computed=30)) == ["a"]
    assert not h.side.take_unavailable_requests()


def test_who_cannot_encode_takes_any(harness, node):
    h = harness(inline_wait_s=0.0)
    node.holds = {"a": 10}
    assert h.ensure(request("a"))
    node.slow = {"a"}
    cannot = request(only_metadata("a"))
    assert not h.ensure(cannot)
    assert h.side.has_cache_item("a")


# ---------------------------------------------------------------- a drafter


def test_an_occurrence_that_the_drafter_reads_already_is_one_that_has_begun(node, clock):
    """vLLM makes room for it a few tokens early, and keeps it from then on."""
    looks = {}
    for lookahead in (0, 1):
        side = SchedulerSide(
            node,
            make_config({"inline_wait_s": 0.0}),
            Counts(),
            MediaFields(ROLES),
            identity_of,
            saves=False,
            fetches=True,
            readers=1,
            lookahead=lookahead,
            clock=clock,
        )
        r = twice_without_media()
        node.holds = {"a": 10, "b": 10}
        assert side.ensure_cache_available(r, 0)
        for index in (0, 1):
            side.update_state_after_alloc(r, index)
        node.slow = {"a"}
        r.num_computed_tokens = 20  # the second occurrence begins here
        side.update_state_after_free(r, 0)
        looks[lookahead] = side.ensure_cache_available(r, 20)
        node.slow = set()
    assert looks == {0: False, 1: True}
