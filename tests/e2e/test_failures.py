"""Real vLLM instances, and things that go wrong around them: every request is answered, every engine lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat import ask, chat_body
from fleet import Fleet, Host, Server
from processes import Run, until

from ec_p2p.identity import entry_identity
from tests.e2e.counting import Change, salted, same
from tests.e2e.rig import (
    FORKED_SERVER,
    PATIENCE_S,
    encode,
    entry_bytes,
    kill_node,
    looking_into,
    node_pids,
    post,
    until_known,
)

Image = Callable[..., str]

NAMESPACE = "tests"
DEV = {"VLLM_SERVER_DEV_MODE": "1"}

pytestmark = pytest.mark.nixl


class Pair:
    """An encoder and a consumer on two hosts. Tests that kill a piece put a new one in its place."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.producer_host = fleet.host("host1")
        self.consumer_host = fleet.host("host2")
        self.producer = self.start("ec_producer", self.producer_host)
        self.consumer = self.start("ec_consumer", self.consumer_host)
        fleet.wait_ready([self.producer, self.consumer])

    def start(self, role: str, host: Host) -> Server:
        # A node outlives its instances long enough for a test to start the next one. A READ may take as long as a
        # request waits.
        settings = {"namespace": NAMESPACE, "grace_s": 120.0, "fetch_timeout_s": 5.0, "read_timeout_s": 5.0}
        name = f"{role}-{len(self.fleet.run.processes)}"
        return self.fleet.server(name, host, self.fleet.connector(role, host, **settings), env=DEV)

    def restart_producer(self) -> None:
        self.producer = self.start("ec_producer", self.producer_host)
        self.fleet.wait_ready([self.producer])

    def restart_consumer(self) -> None:
        self.consumer = self.start("ec_consumer", self.consumer_host)
        self.fleet.wait_ready([self.consumer])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path, lasting_fleet: Fleet, plain: Server) -> Iterator[Pair]:
    with Run(tmp_path_factory.mktemp("pair")) as run:
        yield Pair(Fleet(run, model, FORKED_SERVER, caches=lasting_fleet.caches))


def fetches(pair: Pair, plain: Server, image: str) -> bool:
    """Encode an image on the producer and ask the consumer about it: true if it was fetched, not encoded again."""
    encode(pair.producer.url, chat_body("encode", [image]))
    change, body = Change(pair.consumer), salted(image[-64:].replace("/", "-"), image)
    same(ask(pair.consumer.url, body), plain, body)
    change.settles(answered=1)
    return change.now().total("vllm:ec_p2p_fetches_total", outcome="landed", source="remote") == 1


def test_the_bytes_at_the_consumer_are_those_of_the_producer(pair: Pair, fresh_image: Image) -> None:
    image = fresh_image()
    hint = encode(pair.producer.url, chat_body("encode", [image]))
    until_known(pair.fleet, pair.consumer_host, hint)
    [identifier] = hint
    identity = entry_identity(NAMESPACE, identifier)
    ask(pair.consumer.url, salted("bytes", image))
    with looking_into(pair.fleet, pair.producer_host) as there, looking_into(pair.fleet, pair.consumer_host) as here:
        sent, landed = entry_bytes(there, identity), entry_bytes(here, identity)
    assert sent is not None
    assert len(sent) == 320 * 128 * 2
    assert any(sent)
    assert landed == sent


def test_an_item_is_still_there_after_the_producer_forgot_it(pair: Pair, plain: Server, fresh_image: Image) -> None:
    """The same image twice, and again after the encoder cache was emptied, which vLLM tells nobody: always answered,
    and still fetchable. After the reset it may be encoded again, where the node's answer is too late for the step."""
    image, change = fresh_image(), Change(pair.producer)
    for _ in range(2):
        hint = encode(pair.producer.url, salted("again", image))
    for path in ("/reset_encoder_cache", "/reset_mm_cache"):
        assert post(pair.producer.url + path, {}).status == 200
    encode(pair.producer.url, salted("after the reset", image))
    until(
        lambda: change.now().total("vllm:ec_p2p_local_encodes_total") in (1, 2),
        "one encode, or two",
        timeout_s=PATIENCE_S,
    )
    until_known(pair.fleet, pair.consumer_host, hint)
    change, body = Change(pair.consumer), salted("and fetched", image)
    same(ask(pair.consumer.url, body), plain, body)
    change.settles(encodes=0, landed_remote=1)


def test_an_item_the_node_lost_is_published_again(pair: Pair, plain: Server, fresh_image: Image) -> None:
    """The producer's node dies with everything it holds; the encoder cache of the engine still has the item."""
    image = fresh_image()
    encode(pair.producer.url, salted("before", image))
    kill_node(pair.fleet.run, pair.producer_host)

    def fetched() -> bool:
        encode(pair.producer.url, salted("publish", image))
        change, body = Change(pair.consumer), salted("republished", image)
        same(ask(pair.consumer.url, body), plain, body)
        change.settles(answered=1)
        return change.now().total("vllm:ec_p2p_local_encodes_total") == 0

    until(fetched, "the item to be published again", timeout_s=PATIENCE_S)
    assert node_pids(pair.fleet.run, pair.producer_host)


def test_pause_and_resume_complete(pair: Pair) -> None:
    for server in (pair.producer, pair.consumer):
        assert post(f"{server.url}/pause", {}).status == 200
        assert post(f"{server.url}/resume", {}).status == 200


def test_a_new_engine_beside_a_living_node_is_warm_at_once(pair: Pair, plain: Server, fresh_image: Image) -> None:
    image = fresh_image()
    until_known(pair.fleet, pair.consumer_host, encode(pair.producer.url, chat_body("encode", [image])))
    ask(pair.consumer.url, salted("cold", image))
    [node] = node_pids(pair.fleet.run, pair.consumer_host)
    pair.consumer.process.kill()
    pair.restart_consumer()
    assert node_pids(pair.fleet.run, pair.consumer_host) == [node]
    change, body = Change(pair.consumer), salted("warm", image)
    same(ask(pair.consumer.url, body), plain, body)
    change.settles(answered=1, encodes=0, landed_local=1, landed_remote=0)


def test_a_consumer_outlives_its_node(pair: Pair, plain: Server, fresh_image: Image) -> None:
    kill_node(pair.fleet.run, pair.consumer_host)
    body = salted("without a node", fresh_image())
    same(ask(pair.consumer.url, body), plain, body)
    until(lambda: fetches(pair, plain, fresh_image()), "the consumer to fetch through a new node", timeout_s=PATIENCE_S)


def test_a_frozen_node_costs_a_deadline_and_nothing_else(pair: Pair, plain: Server, fresh_image: Image) -> None:
    [node] = node_pids(pair.fleet.run, pair.consumer_host)
    os.kill(node, signal.SIGSTOP)
    try:
        body = salted("frozen", fresh_image())
        same(ask(pair.consumer.url, body), plain, body)
    finally:
        os.kill(node, signal.SIGCONT)


def test_producer_and_node_killed_between_advert_and_fetch(pair: Pair, plain: Server, fresh_image: Image) -> None:
    lost = fresh_image()
    encode(pair.producer.url, chat_body("encode", [lost]))
    until(
        lambda: fetches(pair, plain, fresh_image()), "the adverts to arrive", timeout_s=PATIENCE_S
    )  # in order: the first too
    pair.producer.process.kill()
    kill_node(pair.fleet.run, pair.producer_host)
    change, body = Change(pair.consumer), salted("lost", lost)
    same(ask(pair.consumer.url, body), plain, body)
    change.settles(answered=1, encodes=1, landed_remote=0)


def test_both_caches_off_share_nothing(own: Fleet, plain: Server, fresh_image: Image) -> None:
    """vLLM then counts items per process: two instances give different images the same name."""
    off = ("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")
    hosts = own.host("host1"), own.host("host2")
    producer, consumer = (
        own.server(role, host, own.connector(role, host), options=off)
        for role, host in zip(("ec_producer", "ec_consumer"), hosts, strict=True)
    )
    own.wait_ready([producer, consumer])
    first, second = fresh_image(), fresh_image()
    encode_answer = post(f"{producer.url}/v1/chat/completions", chat_body("encode", [first]))
    assert encode_answer.status == 200
    assert encode_answer.body.get("ec_transfer_params") is None
    change, body = Change(consumer), salted("other", second)
    same(ask(consumer.url, body), plain, body)
    change.settles(answered=1, landed_remote=0, landed_local=0)
    assert change.now().by("reason", "vllm:ec_p2p_local_encodes_total") == {"not_shared": 1}
    assert "mm_processor_cache_gb=0" in consumer.process.log.read_text()
