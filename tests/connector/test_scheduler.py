"""What the scheduler's side promises vLLM. It never promises what is not there, nor waits for what is not coming."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ec_p2p.config import make_config
from ec_p2p.connector.asking import GRACE_S, ON_ITS_WAY_S
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.media import MediaFields
from ec_p2p.connector.scheduler import SchedulerSide
from ec_p2p.node.client import Detached
from ec_p2p.node.messages import Missing, Saved, SaveSkipped

from .conftest import NEW, OLD, WAIT_S, identity_of, image, item_of, loaded, request, without_media


def only_metadata(identifier, offset=0, rows=10):
    return image(identifier, offset, rows, data=without_media)


def fails_alone(harness, failing):
    assert harness.side.take_unavailable_requests() == {failing.request_id}
    assert harness.side.take_unavailable_requests() == set()
    assert harness.ensure(failing) is False
    harness.side.request_finished(failing)


# ---------------------------------------------------------------- the ordinary ways


def test_what_the_node_holds_is_loaded_and_not_encoded(harness, node):
    h, r = harness(), request("a")
    node.holds, node.remote = {"a": 10}, {"a"}
    step = h.schedule(r)
    assert loaded(step) == ["a"]
    [(_, place)] = step.loads
    assert (place.incarnation, place.rows, place.dtype) == (OLD, 10, "bfloat16")
    assert node.leases[place.lease] == (1, "dispatched")
    assert h.counted() == {
        "lookups": {"remote": 1},
        "fetches": {"landed,remote": 1},
        "fetched_bytes": {"remote": 80},
        "fetch_seconds": [0.002],
    }


def test_what_nobody_holds_is_encoded_here(harness, node):
    h, r = harness(), request("a")
    step = h.schedule(r)
    assert (step.loads, step.encodes) == ([], {})
    assert h.counted() == {"lookups": {"missing": 1}, "local_encodes": {"no_source": 1}}


def test_a_producer_announces_and_publishes_what_it_encodes(harness, node):
    h, r = harness("ec_producer"), request("a")
    step = h.schedule(r)
    assert step.encodes == {"a": identity_of("a")}
    assert node.told("encoding") == [([identity_of("a")],)]
    assert node.told("want")[0][2] == {"expect_s": 0.0, "local_only": True, "landing": "host"}
    assert h.counted()["local_encodes"] == {"producer": 1}


def test_a_producer_does_not_encode_what_its_host_holds(harness, node):
    h, r = harness("ec_producer"), request("a")
    node.holds = {"a": 10}
    step = h.schedule(r)
    assert loaded(step) == ["a"]
    assert step.encodes == {}


def test_ec_both_hits_on_its_own_second_request(harness, node):
    h, first, second = harness("ec_both"), request("a"), request("a")
    assert h.schedule(first).encodes == {"a": identity_of("a")}
    node.holds = {"a": 10}
    h.cache.clear()
    h.end(freed=["a"])
    assert loaded(h.schedule(second)) == ["a"]


def test_a_request_waits_for_all_its_items_together(harness, node):
    h, r = harness(), request("a", "b")
    node.holds, node.slow = {"a": 10}, {"b"}
    assert h.schedule(r) is None
    assert h.schedule(r) is None
    assert len(node.asked) == 2
    node.land("b")
    assert sorted(loaded(h.schedule(r))) == ["a", "b"]


def test_cached_and_uncached_items_in_one_request(harness, node):
    h = harness()
    h.schedule(request("a"))
    node.holds = {"b": 10}
    mixed = request("a", "b", "c")
    step = h.schedule(mixed)
    assert loaded(step) == ["b"]
    h.side.request_finished(mixed)
    assert h.counted()["lookups"] == {"missing": 2, "encoder_cache": 1, "local": 1}


def test_the_same_image_twice_in_one_request_is_one_want_and_one_load(harness, node):
    h, r = harness(), request("a", "a")
    node.holds = {"a": 10}
    assert loaded(h.schedule(r)) == ["a"]
    assert len(node.asked) == 1
    assert h.counted()["lookups"] == {"local": 1}


def test_two_requests_for_one_image_at_once_load_it_once(harness, node):
    h, first, second = harness(), request("a"), request("a")
    node.slow = {"a"}
    assert h.schedule(first) is None
    assert h.schedule(second) is None
    for number in node.wants:
        node._land(number, 0, "remote", 10)
    assert loaded(h.schedule(first)) == ["a"]
    assert loaded(h.schedule(second)) == []
    h.side.request_finished(first)
    h.side.request_finished(second)
    assert [state for _, state in node.leases.values()] == ["dispatched"]


def test_decode_steps_ask_nobody_and_drop_what_was_not_needed(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    assert h.ensure(r)
    h.cache.add("a")  # another request has brought it in meanwhile
    assert h.ensure(r, computed=10)
    assert node.leases == {}
    before = list(node.sent)
    for computed in range(10, 15):
        assert h.ensure(r, computed)
    assert node.sent == before


def test_a_lease_that_was_not_needed_ends_as_soon_as_its_item_is_computed(harness, node):
    h, r = harness(), request("a", "b")
    node.holds = {"a": 10, "b": 10}
    assert h.ensure(r)
    h.cache.add("a")  # another request has brought it in meanwhile
    assert h.ensure(r, computed=10)
    assert len(node.leases) == 1
    assert h.side.has_cache_item("b")


def test_text_requests_run_while_a_fetch_is_in_flight(harness, node):
    h, r = harness(), request("a")
    node.slow = {"a"}
    assert h.schedule(r) is None
    assert h.end(tokens=64).loads == []
    node.land("a")
    assert loaded(h.schedule(r)) == ["a"]


def test_a_load_of_a_step_without_tokens_is_kept_for_the_next(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    assert loaded(h.schedule(r, tokens=0)) == []
    assert loaded(h.end(tokens=1)) == ["a"]


# ---------------------------------------------------------------- promises


def test_nothing_is_promised_without_a_lease(harness, node):
    h, r = harness(), request("a")
    assert not h.side.has_cache_item("a")
    node.slow = {"a"}
    h.ensure(r)
    assert not h.side.has_cache_item("a")
    node.land("a")
    h.ensure(r)
    assert h.side.has_cache_item("a")
    h.side.update_state_after_alloc(r, 0)
    assert not h.side.has_cache_item("a")


def test_a_request_that_is_asked_again_and_again_keeps_one_lease(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    for _ in range(20):  # no KV blocks: vLLM asks at every step
        assert h.ensure(r)
        assert h.side.has_cache_item("a")
        h.end(tokens=3)
    assert len(node.leases) == len(node.asked) == 1
    h.schedule(r)
    assert h.counted()["lookups"] == {"local": 1}


def test_other_rows_are_refused_for_that_request_only(harness, node):
    h, right = harness(), request("a")
    node.holds = {"a": 10}
    wrong = request(image("a", rows=4))
    assert h.ensure(right)
    assert h.ensure(wrong)
    assert not h.side.has_cache_item("a")
    h.side.update_state_after_alloc(wrong, 0)
    assert h.ensure(right)
    assert h.side.has_cache_item("a")
    assert h.counted()["local_encodes"] == {"rows": 1}


@pytest.mark.parametrize("rows", [(10, 4), (4, 10)])
def test_a_request_that_gives_one_image_two_sizes_fails_alone(harness, node, rows):
    h = harness()
    node.holds = {"a": 10}
    r = request(image("a", 0, rows=rows[0]), only_metadata("a", rows[0], rows=rows[1]))
    assert not h.ensure(r)
    fails_alone(h, r)
    assert node.asked == []


def test_an_image_once_with_media_and_once_without(harness, node):
    h, r = harness(), request(image("a"), only_metadata("a", 10))
    assert not h.ensure(r)
    fails_alone(h, r)
    node.holds = {"a": 10}
    assert loaded(h.schedule(request(image("a"), only_metadata("a", 10)))) == ["a"]


def test_wrong_rows_without_media_fail_that_request_alone(harness, node):
    h = harness()
    node.holds = {"a": 10}
    r = request(only_metadata("a", rows=4))
    assert not h.ensure(r)
    fails_alone(h, r)
    assert h.counted()["failed_requests"] == {"rows": 1}


def test_what_another_request_has_encoded_meanwhile_is_not_encoded_again(harness, node):
    h, first, second = harness("ec_both"), request("a"), request("a")
    assert h.ensure(second)  # nobody has it; but no room for this request yet
    h.schedule(first)
    node.holds = {"a": 10}
    assert h.ensure(second)
    h.cache.clear()
    h.end(freed=["a"])
    assert loaded(h.schedule(second)) == ["a"]


def test_a_lease_of_another_request_is_used_when_vllm_needs_the_item_now(harness, node):
    h, first, second = harness(), request("a"), request("a")
    assert h.ensure(first)  # missing: it would encode
    node.holds = {"a": 10}
    assert h.ensure(second)
    assert h.ensure(first)
    assert h.side.has_cache_item("a")
    h.side.update_state_after_alloc(first, 0)
    assert loaded(h.end()) == ["a"]
    assert h.ensure(second)  # resident now
    h.side.request_finished(second)
    h.side.request_finished(first)
    assert [state for _, state in node.leases.values()] == ["dispatched"]


# ---------------------------------------------------------------- items without media


def test_without_media_and_without_a_source_the_request_fails_alone(harness, node):
    h, r, other = harness(), request(only_metadata("a")), request("b")
    assert not h.ensure(r)
    fails_alone(h, r)
    assert h.ensure(other)
    assert h.counted()["failed_requests"] == {"no_source": 1}


def test_without_media_it_is_expected_even_without_a_hint(harness, node):
    h = harness(expect_s=0.7)
    h.ensure(request(image("a"), only_metadata("b", 10)))
    assert [kind["expect_s"] for *_, kind in node.told("want")] == [0.0, 0.7]


def test_what_lands_on_devices_is_asked_for_as_such_and_loaded_from_there(harness, node):
    node.holds, node.remote, node.read = {"a": 10}, {"a"}, 7
    h = harness(landing="device")
    (load,) = h.schedule(request("a")).loads
    assert [kind["landing"] for *_, kind in node.told("want")] == ["device"]
    assert load[1].read == 7


def test_without_media_vllms_own_cache_is_not_trusted(harness, node):
    h = harness()
    h.schedule(request("a"))
    assert h.ensure(request("a"))
    r = request(only_metadata("a"))
    assert not h.ensure(r)
    fails_alone(h, r)


def test_without_media_a_lease_is_held_as_long_as_tokens_need_it(harness, node):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    assert loaded(h.schedule(r, computed=0, tokens=4)) == ["a"]
    assert loaded(h.schedule(r, computed=4, tokens=4)) == []
    h.cache.clear()  # vLLM resets its encoder cache and tells nobody
    assert loaded(h.schedule(r, computed=8, tokens=1)) == ["a"]
    h.ensure(r, 9)
    h.end()
    assert h.ensure(r, 10)
    assert [state for _, state in node.leases.values()] == ["dispatched", "dispatched"]
    assert len(node.asked) == 3
    assert h.counted()["fetches"] == {"landed,local": 2}  # a spare lease that is not used is none


def test_without_media_a_reset_right_after_the_load_is_survived(harness, node):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    h.schedule(r, computed=0, tokens=4)
    h.cache.clear()
    assert loaded(h.schedule(r, computed=4, tokens=4)) == ["a"]


def test_a_request_that_has_its_item_does_not_wait_for_a_spare_lease(harness, node):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    h.schedule(r, computed=0, tokens=4)
    node.slow = {"a"}
    assert h.ensure(r, 4)


def test_a_spare_lease_is_asked_for_again_until_there_is_one(harness, node, clock):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    h.schedule(r, computed=0, tokens=2)
    node.holds = {}
    h.schedule(r, computed=2, tokens=2)
    node.holds = {"a": 10}
    clock.now += 0.2
    h.schedule(r, computed=4, tokens=2)
    h.cache.clear()
    assert loaded(h.schedule(r, computed=6, tokens=2)) == ["a"]


def test_a_lease_taken_by_another_request_is_asked_for_again(harness, node):
    h, first, second = harness(), request("a"), request("a")
    assert h.ensure(first)
    node.holds = {"a": 10}
    assert h.ensure(second)
    assert h.ensure(first)
    h.side.update_state_after_alloc(first, 0)
    h.end(freed=["a"])
    node.slow = {"a"}
    assert not h.ensure(second)
    node.land("a")
    assert h.ensure(second)
    assert h.side.has_cache_item("a")


def test_a_vanished_source_does_not_hurt_a_request_that_has_its_item(harness, node):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    h.schedule(r, computed=0, tokens=4)
    node.holds = {}
    assert h.ensure(r, 4)
    assert h.side.take_unavailable_requests() == set()


def test_without_media_and_data_at_all(harness, node):
    h, r = harness(), request(image("a", data=None))
    assert not h.ensure(r)
    fails_alone(h, r)


def test_an_embedding_that_the_client_computed_is_not_shared(harness, node):
    own = image("a", data=lambda: item_of(image_embeds=torch.zeros(10, 4)))
    h, r = harness("ec_both"), request(own)
    node.holds = {"a": 10}
    step = h.schedule(r)
    assert (step.loads, step.encodes, node.asked) == ([], {}, [])
    assert h.counted()["local_encodes"] == {"not_shared": 1}


# ---------------------------------------------------------------- preemption, reset, eviction


def test_a_preempted_request_asks_again(harness, node):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    h.schedule(r)
    r.num_preemptions += 1
    h.cache.clear()
    h.end(freed=["a"])
    node.slow = {"a"}
    assert not h.ensure(r)
    node.land("a")
    assert loaded(h.schedule(r)) == ["a"]


def test_preemption_before_any_other_look(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    h.schedule(r)
    r.num_preemptions += 1
    assert h.ensure(r)
    assert loaded(h.schedule(r)) == []  # still in vLLM's cache
    r.num_preemptions += 1
    h.end(freed=["a"])
    h.cache.clear()
    assert loaded(h.schedule(r)) == ["a"]


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_a_reset_of_vllms_cache_costs_no_encode_of_what_the_node_holds(harness, node, role):
    h, first, second = harness(role), request("a"), request("a")
    node.holds = {"a": 10}
    h.schedule(first)
    h.side.request_finished(first)
    h.cache.clear()
    assert loaded(h.schedule(second)) == ["a"]
    h.side.request_finished(second)
    assert [state for _, state in node.leases.values()] == ["dispatched", "dispatched"]
    counted = h.counted()
    assert (counted["lookups"], counted["fetches"]) == ({"local": 2}, {"landed,local": 2})


def test_what_vllm_has_is_waited_for_no_longer_than_a_moment(harness, node, clock):
    h = harness(inline_wait_s=0.003)
    h.schedule(request("a"))
    node.frozen = True
    for _ in range(200):
        before = clock.now
        r = request("a")
        assert h.ensure(r)
        assert clock.now - before <= 0.0031
        h.end(tokens=0)
        h.side.request_finished(r)
    assert len(node.asked) < 100
    node.die(successor=NEW)
    node.frozen = False
    h.end()
    node.holds = {"b": 10}
    assert loaded(h.schedule(request("b"))) == ["b"]
    assert h.side._asking._wants.keys() == {max(node.wants)}


def test_a_reset_of_vllms_cache_is_noticed_at_the_next_alloc(harness, node):
    h = harness()
    for name in "ab":
        h.schedule(request(name))
    h.cache.clear()
    assert h.schedule(request("a")).loads == []
    node.holds, node.remote = {"b": 10}, {"b"}
    assert loaded(h.schedule(request("b"))) == ["b"]
    assert h.counted()["local_encodes"] == {"no_source": 2, "evicted": 1}


def test_evicted_between_the_look_and_the_pass(harness, node):
    h, r = harness(), request("a")
    h.schedule(request("a"))
    assert h.ensure(r)
    node.holds = {"a": 10}
    h.end(freed=["a"])
    assert loaded(h.schedule(request("a"))) == ["a"]
    assert h.ensure(r)


# ---------------------------------------------------------------- aborts


@pytest.mark.parametrize("when", ["never asked", "waiting", "leased", "loading"])
def test_abort(harness, node, when):
    h, r = harness(), request("a")
    node.slow = {"a"} if when in ("waiting",) else set()
    node.holds = {"a": 10}
    if when == "loading":
        h.schedule(r)
    elif when != "never asked":
        h.ensure(r)
    h.side.request_finished(r)
    if when == "waiting":
        # What lands for nobody belongs to the node, which has read our Forget by then.
        node.land("a")
        node.leases.clear()
    h.end()
    assert [state for _, state in node.leases.values()] == (["dispatched"] if when == "loading" else [])
    node.slow = set()
    assert loaded(h.schedule(request("b"))) == []
    h.cache.clear()
    h.end(freed=["a"])
    assert loaded(h.schedule(request("a"))) == ["a"]


@pytest.mark.parametrize("reason", ["deadline", "failed", "no_source"])
def test_a_late_no_for_an_aborted_request_does_not_fail_the_next(harness, node, reason):
    h, gone, r = harness(), request(only_metadata("a")), request(only_metadata("a"))
    node.slow = {"a"}
    h.ensure(gone)
    h.side.request_finished(gone)
    node.miss("a", reason)
    assert not h.ensure(r)
    assert h.side.take_unavailable_requests() == set()
    node.land("a")
    assert loaded(h.schedule(r)) == ["a"]


def test_an_abort_of_a_failed_request_is_not_reported_again(harness, node):
    h, r = harness(), request(only_metadata("a"))
    h.ensure(r)
    h.side.request_finished(r)
    assert h.side.take_unavailable_requests() == set()


# ---------------------------------------------------------------- a node that is slow, frozen, gone


def test_a_fetch_that_fails_is_encoded_here(harness, node):
    h, r = harness(), request("a")
    node.slow = {"a"}
    assert h.schedule(r) is None
    node.miss("a", "deadline")
    assert h.schedule(r).loads == []
    assert h.counted() == {
        "lookups": {"missing": 1},
        "fetches": {"failed,remote": 1},
        "local_encodes": {"deadline": 1},
    }


def test_a_frozen_node_costs_one_request_its_patience_and_the_next_nothing(harness, node, clock):
    h, first = harness(), request("a")
    node.frozen = True
    assert not h.ensure(first)
    clock.now += WAIT_S + GRACE_S
    h.end()
    assert h.ensure(first)
    before = clock.now
    assert h.ensure(request("b"))
    assert clock.now == before
    h.end()
    # It thaws, and is believed again.
    node.frozen = False
    h.ensure(request("c"))
    h.end()
    node.holds = {"d": 10}
    assert loaded(h.schedule(request("d"))) == ["d"]


def test_a_frozen_node_fails_only_what_has_no_media(harness, node, clock):
    h, r, other = harness(), request(only_metadata("a")), request("b")
    node.frozen = True
    assert not h.ensure(r)
    assert not h.ensure(other)
    clock.now += WAIT_S + GRACE_S
    assert h.ensure(other)
    assert not h.ensure(r)
    fails_alone(h, r)
    assert h.counted()["failed_requests"] == {"node_silent": 1}


def test_an_answer_after_we_gave_up_is_given_back(harness, node, clock):
    h, r = harness(), request("a")
    node.slow = {"a"}
    h.ensure(r)
    clock.now += WAIT_S + GRACE_S
    h.end()
    assert h.ensure(r)
    node.land("a")
    h.end()
    assert node.leases == {}
    h.schedule(r)
    assert h.counted()["lookups"] == {"missing": 1}


def test_no_node_at_all(harness, node):
    h, r = harness("ec_both"), request("a")
    node.there = False
    node.incarnation = b""
    step = h.schedule(r)
    assert step.loads == []
    assert h.counted()["local_encodes"] == {"detached": 1}


def test_without_media_and_without_a_node_it_waits_for_the_next_node(harness, node, clock):
    h, r = harness(), request(only_metadata("a"))
    node.there = False
    assert not h.ensure(r)
    assert h.side.take_unavailable_requests() == set()
    node.there, node.holds = True, {"a": 10}
    assert loaded(h.schedule(r)) == ["a"]


def test_without_media_and_without_a_node_it_fails_in_the_end(harness, node, clock):
    h, r = harness(), request(only_metadata("a"))
    node.there = False
    assert not h.ensure(r)
    clock.now += WAIT_S + GRACE_S
    assert not h.ensure(r)
    fails_alone(h, r)


def test_leases_die_with_their_node_and_are_asked_for_again(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    assert h.ensure(r)
    node.die(successor=NEW)
    h.end()
    assert not h.side.has_cache_item("a")
    node.holds = {"a": 10}
    step = h.schedule(r)
    assert [place.incarnation for _, place in step.loads] == [NEW]


def test_a_lease_lost_after_a_long_wait_is_asked_for_with_new_patience(harness, node, clock):
    h, r = harness(), request(only_metadata("a"))
    node.holds = {"a": 10}
    assert h.ensure(r)
    clock.now += 10 * WAIT_S  # no KV blocks
    node.die(successor=NEW)
    h.end()
    node.slow = {"a"}
    assert h.schedule(r) is None
    assert h.side.take_unavailable_requests() == set()
    node.land("a")
    assert loaded(h.schedule(r)) == ["a"]


def test_waiting_requests_are_asked_for_again_at_the_next_node(harness, node):
    h, r = harness(), request("a")
    node.slow = {"a"}
    assert h.schedule(r) is None
    node.die(successor=NEW)
    node.slow, node.holds = set(), {"a": 10}
    assert loaded(h.schedule(r)) == ["a"]


def test_no_next_node(harness, node):
    h, r = harness(), request("a")
    node.slow = {"a"}
    assert not h.ensure(r)
    node.die()
    assert h.schedule(r).loads == []
    assert h.counted()["local_encodes"] == {"detached": 1}


def test_a_dispatched_load_survives_its_node(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    assert h.ensure(r)
    h.side.update_state_after_alloc(r, 0)
    node.die(successor=NEW)
    [(identifier, place)] = h.end().loads
    assert (identifier, place.incarnation) == ("a", OLD)


def test_nothing_is_said_of_an_old_lease_to_a_new_node(harness, node):
    h, r = harness(), request("a")
    node.holds = {"a": 10}
    assert h.ensure(r)
    # The client has attached to the next node inside a hook, and has not reported the loss yet.
    node.incarnation = NEW
    node.sent.clear()
    h.side.request_finished(r)
    assert node.sent == []


def test_the_first_answers_of_a_new_node_survive_the_news_of_the_old_ones_death(harness, node):
    h, r = harness(), request("a")
    node.incarnation = NEW
    node.holds = {"a": 10}
    node.slow = {"a"}
    h.ensure(r)
    node.land("a")
    node.inbox.append(Detached(OLD))
    assert loaded(h.schedule(r)) == ["a"]


def test_workers_that_are_not_attached_yet(harness, node, clock):
    h, r, without = harness(), request("a"), request(only_metadata("b"))
    node.readers = False
    assert h.schedule(r).loads == []
    assert h.counted()["local_encodes"] == {"no_readers": 1}
    assert not h.ensure(without)
    asked = len(node.asked)
    assert not h.ensure(without)
    assert len(node.asked) == asked  # not at every step
    node.readers, node.holds = True, {"b": 10}
    clock.now += 0.2
    assert loaded(h.schedule(without)) == ["b"]


@pytest.mark.parametrize("reason", ["too_large", "no_memory"])
def test_what_can_never_fit(harness, node, reason):
    h, r, without = harness(), request("a", "b"), request(only_metadata("a"))
    node.slow = {"a"}
    h.ensure(r)
    node.miss("a", reason)
    assert h.ensure(r)
    h.ensure(without)
    node.miss("a", reason)
    assert not h.ensure(without)
    fails_alone(h, without)


# ---------------------------------------------------------------- waiting inside a step


def test_a_fresh_fetch_may_land_within_the_step(harness, node, clock):
    h, r = harness(inline_wait_s=0.003), request("a")
    node.slow = {"a"}
    poll = node.poll

    def land_while_waiting(timeout_s=0.0):
        if timeout_s:
            node.land("a")
        return poll(timeout_s)

    node.poll = land_while_waiting
    assert loaded(h.schedule(r)) == ["a"]


def twice_without_media():
    """Another image lies between the two occurrences."""
    return request(only_metadata("a"), image("b", 10), only_metadata("a", 20))


def free(h, r, index, computed):
    """vLLM does it when the tokens of an occurrence are computed."""
    r.num_computed_tokens = computed
    h.side.update_state_after_free(r, index)


def test_a_later_occurrence_does_not_rest_on_what_vllm_has_freed(harness, node):
    """vLLM keeps an item for the occurrences that it has scheduled, and may evict it between two of them."""
    h, r = harness(inline_wait_s=0.0), twice_without_media()
    node.holds = {"a": 10, "b": 10}
    assert loaded(h.schedule(r)) == ["a", "b"]
    node.slow = {"a"}
    free(h, r, 0, computed=12)
    assert not h.ensure(r, computed=12), "to be encoded it would need its media"
    node.land("a")
    assert h.ensure(r, computed=12)
    h.cache.discard("a")
    assert loaded(h.schedule(r, computed=12)) == ["a"]


def test_an_occurrence_that_has_begun_rests_on_what_vllm_keeps(harness, node):
    h, r = harness(inline_wait_s=0.0), twice_without_media()
    node.holds = {"a": 10, "b": 10}
    h.schedule(r)
    node.slow = {"a"}
    free(h, r, 0, computed=25)
    assert h.ensure(r, computed=25)


def test_a_later_occurrence_is_waited_for_with_all_the_time_that_there_is(harness, node, clock):
    """However long nothing could be had that was not needed."""
    h, r = harness(inline_wait_s=0.0), twice_without_media()
    node.holds = {"a": 10, "b": 10}
    h.schedule(r)
    node.slow = {"a"}
    assert h.ensure(r, computed=5)
    clock.now += WAIT_S + 2 * GRACE_S
    assert h.ensure(r, computed=5)
    free(h, r, 0, computed=12)
    assert not h.ensure(r, computed=12)
    assert h.side.take_unavailable_requests() == set()
    clock.now += WAIT_S + 2 * GRACE_S
    assert not h.ensure(r, computed=12)
    fails_alone(h, r)


def test_a_step_waits_once_whatever_the_number_of_requests(harness, node, clock):
    h = harness(inline_wait_s=0.003)
    node.slow = set("abcdef")
    before = clock.now
    for name in "abcdef":
        assert not h.ensure(request(name))
    assert clock.now - before == pytest.approx(0.003)


def test_a_running_batch_is_not_held_up_by_an_old_fetch(harness, node, clock):
    h, r = harness(inline_wait_s=0.003), request("a")
    node.slow = {"a"}
    h.ensure(r)
    h.end(tokens=8)
    before = clock.now
    assert not h.ensure(r)
    assert clock.now == before
    h.end(tokens=0)  # nothing else to do: waiting costs nobody anything
    assert not h.ensure(r)
    assert clock.now - before == pytest.approx(0.003)


# ---------------------------------------------------------------- producers


def test_an_output_on_its_way_to_the_node_is_not_published_twice(harness, node):
    """The check of the next step may be faster than the worker's save."""
    h = harness("ec_producer")
    h.schedule(request("a"))
    assert h.schedule(request("a")).saves_resident == {}
    node.inbox.append(Saved(identity_of("a"), 80))
    h.end()
    assert h.schedule(request("a")).saves_resident == {"a": identity_of("a")}  # it was saved and is gone again


def test_a_resident_item_that_the_node_lost_is_published_again(harness, node, clock):
    h = harness("ec_producer")
    h.schedule(request("a"))
    clock.now += ON_ITS_WAY_S
    step = h.schedule(request("a"))  # vLLM has it, the node does not
    assert step.saves_resident == {"a": identity_of("a")}
    node.holds = {"a": 10}
    r = request("a")
    step = h.schedule(r)
    assert (step.saves_resident, step.loads) == ({}, [])
    h.side.request_finished(r)
    assert node.leases == {}


def test_a_consumer_publishes_nothing(harness, node):
    h = harness("ec_consumer")
    for _ in range(2):
        step = h.schedule(request("a"))
        assert (step.encodes, step.saves_resident) == ({}, {})
    assert node.told("encoding") == []


def test_any_number_of_requests_may_rest_on_vllms_cache(harness, node, clock):
    h = harness("ec_producer")
    h.schedule(request("a"))
    clock.now += ON_ITS_WAY_S
    node.holds = {"a": 10}
    crowd = [request("a") for _ in range(200)]
    for r in crowd:
        h.schedule(r)
    assert len(node.leases) == 200
    for r in crowd:
        h.side.request_finished(r)
    assert node.leases == {}
    node.holds = {}
    assert h.schedule(request("a")).saves_resident == {"a": identity_of("a")}


def test_a_check_holds_nothing_up_and_is_not_lost(harness, node, clock):
    h = harness("ec_producer", inline_wait_s=0.003)
    h.schedule(request("a"))
    clock.now += ON_ITS_WAY_S
    node.frozen = True
    r = request("a")
    assert h.ensure(r)
    h.side.request_finished(r)
    number, index, _ = node._asked("a")
    node.inbox.append(Missing(number, index, "no_source"))
    assert h.end().saves_resident == {"a": identity_of("a")}


def test_a_check_that_lands_for_a_finished_request_is_given_back(harness, node):
    h, r = harness("ec_producer"), request("a")
    h.schedule(request("a"))
    node.slow = {"a"}
    assert h.ensure(r)
    h.side.request_finished(r)
    node.land("a")
    h.end()
    assert node.leases == {}
    assert len(h.side._asking._leases) == 0


def test_parameters_name_what_the_node_holds(harness, node):
    h, r = harness("ec_producer"), request("a", "b", "a")
    h.schedule(r)
    node.inbox.append(Saved(identity_of("a"), 80))
    params = h.side.request_finished(r)
    assert params == {
        "a": {
            "item_indices": [0, 2],
            "metadata": {"image_grid_thw": [1, 2, 2]},
            "ec_p2p": {"node": "host1", "rows": 10},
        },
        # Its save is not confirmed: with placeholders alone nobody could compute it.
        "b": {"item_indices": [1], "metadata": {}},
    }
    counted = h.counted()
    assert (counted["saves"], counted["adverts"]) == ({"saved": 1}, {"": 1})


def test_parameters_do_not_name_what_went_with_its_node(harness, node):
    h, r = harness("ec_producer"), request("a")
    h.schedule(r)
    node.inbox.append(Saved(identity_of("a"), 80))
    node.die(successor=NEW)
    h.end()
    assert h.side.request_finished(r) == {"a": {"item_indices": [0], "metadata": {}}}


def test_parameters_are_for_producers_and_for_media(harness, node):
    for role, has_params in (("ec_consumer", False), ("ec_producer", True), ("ec_both", True)):
        h, r = harness(role), request("a")
        h.schedule(r)
        assert bool(h.side.request_finished(r)) is has_params
        assert h.side.request_finished(request()) is None


def test_a_save_that_was_skipped_is_not_waited_for(harness, node, clock):
    h, r = harness("ec_producer", inline_wait_s=0.003), request("a")
    h.schedule(r)
    node.inbox.append(SaveSkipped("no_window", identity_of("a")))
    h.end()
    before = clock.now
    assert h.side.request_finished(r)["a"]["metadata"] == {}
    assert clock.now == before


def test_saves_that_were_skipped_are_counted(harness, node):
    h = harness("ec_producer")
    node.inbox += [SaveSkipped("no_window"), SaveSkipped("too_large")]
    h.end()
    assert h.counted() == {"saves": {"no_window": 1, "too_large": 1}}


def test_adapters_of_the_encoder_are_not_shared(node, clock):
    side = SchedulerSide(
        node,
        make_config({}),
        Counts(),
        MediaFields({}),
        identity_of,
        saves=True,
        fetches=True,
        readers=1,
        shares_lora=False,
        clock=clock,
    )
    node.holds = {"adapter:a": 10}
    r = request("adapter:a")
    r.lora_request = SimpleNamespace(lora_name="adapter")
    assert side.ensure_cache_available(r, 0)
    assert not side.has_cache_item("adapter:a")
    assert node.asked == []


def test_nothing_of_a_finished_request_stays(harness, node):
    h = harness("ec_both")
    node.holds = {"a": 10}
    for name in ("a", "b", "c"):
        r = request(name)
        h.schedule(r)
        h.ensure(r, 10)
        h.side.request_finished(r)
    assert h.side._records == {}
    assert h.side._asking._wants == {}
    assert len(h.side._asking._leases) == 0
    assert node.leases.keys() == {1}  # the one load
    assert h.side._current is None
