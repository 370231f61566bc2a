"""The states of an item: nothing happens that the table does not know."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.connector.request_state import SETTLED, TRANSITIONS, Event, Item, RequestRecord, State

from .conftest import image, request, without_media


def make(identifier="x", rows=10, **kwargs):
    settings = {"has_media": True, "shareable": True, "hinted": False, **kwargs}
    return Item(identifier, b"i" * 32, rows, **settings)


def in_state(state):
    item = make()
    item.state = state
    return item


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_in_the_table_or_refused_by_name(state, event):
    item = in_state(state)
    if (state, event) in TRANSITIONS:
        item.apply(event)
        assert item.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(ValueError, match=rf"{event.name} is impossible for an item that is {state.name}"):
            item.apply(event)
        assert item.state is state


def test_every_state_is_reached_and_left():
    reached, frontier = {State.UNASKED}, [State.UNASKED]
    while frontier:
        state = frontier.pop()
        for (source, _), target in TRANSITIONS.items():
            if source is state and target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State)


@pytest.mark.parametrize("event", [Event.REWOUND, Event.FREED])
def test_vllm_may_take_everything_back_in_every_state(event):
    assert {state for state, possible in TRANSITIONS if possible is event} == set(State)


@given(st.lists(st.sampled_from(list(Event))))
def test_a_lease_is_only_ever_held_after_a_landing(events):
    item = make()
    for event in events:
        if (item.state, event) not in TRANSITIONS:
            continue
        before = item.state
        item.apply(event)
        if item.state is State.LEASED and before is not State.LEASED:
            assert event is Event.LANDED
        if item.state is State.ALLOCATED and before is not State.ALLOCATED:
            assert item.placed
            assert item.kept
        assert item.placed or not item.kept
        assert item.settled == (item.kept or item.state in SETTLED)


def made(feature):
    return make(feature.identifier, feature.mm_position.get_num_embeds(), has_media="pixel_values" in feature.data)


def test_the_same_image_twice_is_one_item():
    record = RequestRecord("r")
    record.grow(request(image("a", 0), image("b", 10), image("a", 20)).mm_features, made)
    assert [i.identifier for i in record.beyond(0)] == ["a", "b"]
    assert [i.identifier for i in record.beyond(20)] == ["a"]
    assert record.beyond(30) == []
    assert record.contradiction is None


def test_an_item_is_worth_what_its_poorest_occurrence_is():
    record = RequestRecord("r")
    record.grow(request(image("a"), image("a", 10, data=without_media)).mm_features, made)
    assert not record.items["a"].has_media


def test_two_sizes_of_one_image_contradict_each_other():
    record = RequestRecord("r")
    record.grow(request(image("a"), image("a", 10, rows=7)).mm_features, made)
    assert record.contradiction is record.items["a"]


def test_a_request_that_grows_keeps_what_is_known():
    record = RequestRecord("r")
    record.grow([image("a")], made)
    record.items["a"].apply(Event.ASKED)
    record.grow([image("a"), image("b", 10)], made)
    assert record.items["a"].state is State.WANTED
    assert record.items["b"].state is State.UNASKED
