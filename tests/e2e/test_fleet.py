"""Real vLLM instances on three hosts: where each embedding comes from, and that answers are those of a plain vLLM."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chat import ask, chat_body
from fleet import DemoFleet, Fleet, Server

from tests.e2e.counting import Change, salted, same
from tests.e2e.rig import encode, until_known

Image = Callable[..., str]

pytestmark = pytest.mark.nixl


def encoded(lasting_fleet: Fleet, fleet: DemoFleet, body: dict[str, Any], by: Server | None = None) -> None:
    """Have the images of a request encoded, by the producer if not by another, and the consumers' node be told."""
    host = fleet.consumers[0].host
    assert host is not None
    until_known(lasting_fleet, host, encode((by or fleet.producer).url, body))


def test_found_through_the_directory_without_a_hint(
    lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    image = fresh_image()
    encoded(lasting_fleet, fleet, chat_body("encode", [image]))
    consumer = fleet.consumers[0]
    change, body = Change(consumer), salted("no hint", image)
    answer = ask(consumer.url, body)
    change.settles(answered=1, encodes=0, landed_remote=1, landed_local=0, missing=0)
    same(answer, plain, body)


def test_found_with_the_producers_hint(fleet: DemoFleet, plain: Server, fresh_image: Image) -> None:
    images = [fresh_image(), fresh_image(640, 240)]
    hint = encode(fleet.producer.url, chat_body("encode", images))
    assert len(hint) == 2
    consumer = fleet.consumers[0]
    change, body = Change(consumer), salted("hint", *images)
    answer = ask(consumer.url, {**body, "ec_transfer_params": hint})
    change.settles(answered=1, encodes=0, landed_remote=2)
    same(answer, plain, body)


def test_two_instances_of_one_host_share_its_node(
    lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    image = fresh_image()
    encoded(lasting_fleet, fleet, chat_body("encode", [image]))
    first, second = fleet.consumers
    change = Change(first)
    ask(first.url, salted("first", image))
    change.settles(answered=1, encodes=0, landed_remote=1)
    node = fleet.consumers[0].host
    assert node is not None
    fetched = node.metrics()
    change, body = Change(second), salted("second", image)
    answer = ask(second.url, body)
    change.settles(answered=1, encodes=0, landed_remote=0, landed_local=1)
    assert (node.metrics() - fetched).total("ec_p2p_node_fetches_total") == 0
    same(answer, plain, body)


def test_the_same_image_twice_in_one_request_is_one_fetch(
    lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    image = fresh_image()
    encoded(lasting_fleet, fleet, chat_body("encode", [image]))
    consumer = fleet.consumers[1]
    change, body = Change(consumer), salted("twice", image, image)
    answer = ask(consumer.url, body)
    change.settles(answered=1, encodes=0, landed_remote=1)
    same(answer, plain, body)


def test_an_image_that_nobody_has_is_encoded_by_the_consumer(
    fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    consumer = fleet.consumers[0]
    change, body = Change(consumer), salted("alone", fresh_image())
    answer = ask(consumer.url, body)
    change.settles(answered=1, encodes=1, landed_remote=0, landed_local=0, missing=1)
    assert change.now().by("reason", "vllm:ec_p2p_local_encodes_total") == {"no_source": 1}
    same(answer, plain, body)


def test_cached_and_uncached_items_in_one_request(
    lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    known, new = fresh_image(), fresh_image()
    encoded(lasting_fleet, fleet, chat_body("encode", [known]))
    consumer = fleet.consumers[1]
    change, body = Change(consumer), salted("mixed", new, known)
    answer = ask(consumer.url, body)
    change.settles(answered=1, encodes=1, landed_remote=1)
    same(answer, plain, body)


def test_an_instance_of_both_roles_shares_and_is_shared_with(
    lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    image = fresh_image()
    change, body = Change(fleet.both), salted("mine", image)
    same(ask(fleet.both.url, body), plain, body)
    change.settles(answered=1, encodes=1, landed_remote=0)
    change, body = Change(fleet.both), salted("mine again", image)
    same(ask(fleet.both.url, body), plain, body)
    change.settles(answered=1, encodes=0, landed_remote=0, encoder_cache=1)
    encoded(lasting_fleet, fleet, salted("whose", image), fleet.both)
    change, body = Change(fleet.consumers[0]), salted("yours", image)
    same(ask(fleet.consumers[0].url, body), plain, body)
    change.settles(answered=1, encodes=0, landed_remote=1)


def test_text_alone_asks_nobody(fleet: DemoFleet, plain: Server) -> None:
    change, body = Change(fleet.consumers[0]), salted("only words")
    same(ask(fleet.consumers[0].url, body), plain, body)
    change.settles(answered=1, encodes=0, landed_remote=0, landed_local=0, missing=0)


def test_a_hint_of_nonsense_changes_nothing(
    lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image
) -> None:
    consumer = fleet.consumers[0]
    for number, nonsense in enumerate(
        ({"x": None}, {"http://elsewhere:1": {"peer_host": "198.51.100.1", "size_bytes": -5}}, {"": [[]]})
    ):
        image = fresh_image()
        encoded(lasting_fleet, fleet, chat_body("encode", [image]))
        change, body = Change(consumer), salted(f"nonsense {number}", image)
        answer = ask(consumer.url, {**body, "ec_transfer_params": nonsense})
        change.settles(answered=1, encodes=0, landed_remote=1)
        same(answer, plain, body)


def test_many_requests_at_once(lasting_fleet: Fleet, fleet: DemoFleet, plain: Server, fresh_image: Image) -> None:
    images = [fresh_image(200, 200) for _ in range(4)]
    encoded(lasting_fleet, fleet, chat_body("encode", images))
    consumer = fleet.consumers[0]
    bodies = [salted(f"burst {number}", images[number % 4], images[(number + 1) % 4]) for number in range(12)]
    change = Change(consumer)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: ask(consumer.url, body), bodies))
    change.settles(answered=12, encodes=0)
    for answer, body in zip(answers, bodies, strict=True):
        assert [token["token"] for token in answer.tokens] == [token["token"] for token in ask(plain.url, body).tokens]
