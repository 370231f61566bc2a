"""Both sides of two connectors on two real nodes, the workers' hooks driven by vLLM's own wrappers."""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.worker import ec_connector_model_runner_mixin as runner_v1
from vllm.v1.worker.gpu import ec_connector as runner_v2

from ec_p2p.connector import ECP2PConnector
from ec_p2p.connector.counts import merge
from ec_p2p.connector.media import MediaFields
from ec_p2p.connector.topology import WorkerRank
from ec_p2p.control.messages import InstanceInfo
from tests.control.harness import Loop
from tests.node.conftest import PATIENCE_S, Fleet, until

from .conftest import ROLES, image, request, step, without_media
from .test_connector import vllm_config


@pytest.fixture
def fleet():
    fleet = Fleet("zmq")
    yield fleet
    fleet.close()


class Runner:
    """One vLLM engine in miniature: a scheduler's connector, a worker's, and the worker's encoder cache."""

    def __init__(self, fleet, node, role, runner, monkeypatch, **settings):
        # What comes late on a busy machine is waited for: nothing encodes it here.
        common = {**fleet.common, "fetch_timeout_s": PATIENCE_S / 2, "expect_s": PATIENCE_S / 2}
        config = vllm_config(ec_role=role, **{**common, "node_name": node, **settings})
        config.ec_transfer_config.engine_id = f"{node}-{role}-{os.urandom(4).hex()}"
        config.ec_transfer_config.ec_port = config.ec_transfer_config.ec_connector_extra_config.pop("ec_port")
        self.config, self.runner, self.patch = config, runner, monkeypatch
        self.worker = ECP2PConnector(config, ECConnectorRole.WORKER)
        self.worker.start_worker_services()
        self.scheduler = ECP2PConnector(config, ECConnectorRole.SCHEDULER)
        self.cache = {}
        self.known = set()

    def run(self, r, outputs):
        """Everything vLLM does for a prompt: `outputs` is what the encoder computes. True if it got to run."""
        scheduler = self.scheduler
        if not scheduler.ensure_cache_available(r, 0):
            self.execute(scheduler.build_connector_meta(step(0)), [], outputs, tokens=0)
            return False
        encodes = []
        for index, feature in enumerate(r.mm_features):
            if feature.identifier in self.known:
                continue
            self.known.add(feature.identifier)
            if not scheduler.has_cache_item(feature.identifier):
                encodes.append(feature.identifier)
            scheduler.update_state_after_alloc(r, index)
        self.execute(scheduler.build_connector_meta(step(1)), encodes, outputs, tokens=1)
        return True

    def serve(self, r, outputs):
        until(lambda: self.run(r, outputs), f"{r.request_id} to run")

    def execute(self, meta, encodes, outputs, tokens):
        meta = pickle.loads(pickle.dumps(meta))
        so = SimpleNamespace(ec_connector_metadata=meta, finished_req_ids=set())
        if self.runner == "v2":
            self.patch.setattr(runner_v2, "get_ec_transfer", lambda: self.worker)
            active = runner_v2.ActiveECConnector(self.config, self.cache)
            if not tokens:
                active.no_forward(so)
                return
            with active.maybe_get_output(so):
                self.cache.update({identifier: outputs[identifier] for identifier in encodes})
        elif tokens or not self.worker.is_consumer:
            self.patch.setattr(runner_v1, "get_ec_transfer", lambda: self.worker)
            self.patch.setattr(runner_v1, "has_ec_transfer", lambda: True)
            mixin = runner_v1.ECConnectorModelRunnerMixin
            with mixin.maybe_get_ec_connector_output(so, encoder_cache=self.cache):
                for identifier in encodes:
                    self.cache[identifier] = outputs[identifier]
                    mixin.maybe_save_ec_to_connector(self.cache, identifier)

    def forget(self, *identifiers):
        """vLLM evicts."""
        for identifier in identifiers:
            self.known.discard(identifier)
            self.cache.pop(identifier, None)
        self.scheduler.build_connector_meta(step(1, identifiers))

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture(params=["v1", "v2"])
def engine(request, fleet, monkeypatch):
    monkeypatch.setattr(MediaFields, "of", classmethod(lambda cls, _: cls(ROLES)))
    for bound in ("connector.connector.SCHEDULER_ATTACH_S", "connector.connector.WORKER_ATTACH_S"):
        monkeypatch.setattr(f"ec_p2p.{bound}", PATIENCE_S)
    monkeypatch.setattr("ec_p2p.node.tensors._WINDOW_WAIT_S", PATIENCE_S)
    made = []

    def make(node, role, **settings):
        made.append(Runner(fleet, node, role, request.param, monkeypatch, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def outputs(*identifiers):
    """What an encoder computes for a batch: views of one storage."""
    batch = torch.randn(10 * len(identifiers), 64).to(torch.bfloat16)
    return dict(zip(identifiers, batch.split(10), strict=True))


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(cache, expected):
    return cache.keys() == expected.keys() and all(torch.equal(cache[name], expected[name]) for name in expected)


class Metrics:
    """An engine's counts, added up over its steps."""

    def __init__(self, engine):
        self.engine = engine
        self.data = {}

    def __getitem__(self, family):
        stats = self.engine.scheduler.get_ec_connector_stats()
        merge(self.data, stats.data if stats else {})
        return self.data.get(family, {})


def finish(engine, r):
    return engine.scheduler.request_finished(r)[1]


def pair(fleet):
    """Two nodes that know each other: their names, and a tool at the second."""
    (first, _), (second, observer) = fleet.connected("a", "b")
    return first.config.name, second.config.name, observer


def test_what_one_engine_encodes_another_loads_bit_by_bit(fleet, engine):
    one, two, observer = pair(fleet)
    producer, consumer = engine(one, "ec_producer"), engine(two, "ec_consumer")
    computed = outputs("x", "y")
    expected = copies(computed)
    r = request("x", "y")
    producer.serve(r, computed)
    # vLLM may overwrite them as soon as the hook has returned.
    for tensor in computed.values():
        tensor.zero_()
    saved = Metrics(producer)
    until(lambda: saved["saves"] == {"saved": 2}, "both saves")
    params = finish(producer, r)
    assert params["x"]["ec_p2p"] == {"node": one, "rows": 10}
    r = request("x", image("y", 10, data=without_media), hint=params)
    consumer.serve(r, {})
    assert same(consumer.cache, expected)
    counted = Metrics(consumer)
    assert counted["lookups"] == {"remote": 2}
    assert counted["fetched_bytes"] == {"remote": 2 * 10 * 64 * 2}
    assert counted["local_encodes"] == {}
    until(lambda: observer.inspect().gauges["leases"] == 0, "all leases to end")


def test_the_fleet_is_told_which_engines_are_at_a_node(fleet, engine):
    node = fleet.node("a")
    fleet.client(node)
    loop = Loop()
    try:
        replica = loop.replica(node.config.directories[0])
        producer = engine(node.config.name, "ec_producer")
        both = engine(node.config.name, "ec_both", namespace="of others")
        transfers = [runner.config.ec_transfer_config.engine_id for runner in (producer, both)]
        expected = [
            InstanceInfo(f"{transfers[0]}/dp0", "producer", "n"),
            InstanceInfo(f"{transfers[1]}/dp0", "both", "of others"),
        ]

        def told():
            return [info for known in replica.nodes() for info in replica.instances(known.incarnation)]

        loop.until(lambda: told() == sorted(expected, key=lambda info: info.name), "both engines to be told")
        producer.scheduler.shutdown()
        loop.until(lambda: InstanceInfo(expected[0].name, "producer", "") in told(), "the worker alone is left")
        producer.worker.shutdown()
        loop.until(lambda: told() == expected[1:])
    finally:
        loop.close()


def test_what_nobody_has_is_encoded_by_a_consumer_and_not_saved(fleet, engine):
    _, two, observer = pair(fleet)
    consumer = engine(two, "ec_consumer")
    computed = outputs("x")
    consumer.serve(request("x"), computed)
    assert same(consumer.cache, computed)
    assert Metrics(consumer)["local_encodes"] == {"no_source": 1}
    assert observer.inspect().gauges["entries"] == 0


def test_ec_both_hits_on_its_own_output_and_on_anothers(fleet, engine):
    one, two, _ = pair(fleet)
    first, second = engine(one, "ec_both"), engine(two, "ec_both")
    computed = outputs("x")
    expected = copies(computed)
    first.serve(request("x"), computed)
    first_counts, second_counts = Metrics(first), Metrics(second)
    until(lambda: first_counts["saves"] == {"saved": 1}, "the save")
    first.forget("x")
    first.serve(request("x"), {})
    assert same(first.cache, expected)
    assert first_counts["lookups"] == {"missing": 1, "local": 1}
    r = request("x", hint={"x": {}})
    second.serve(r, {})
    assert same(second.cache, expected)
    assert second_counts["lookups"] == {"remote": 1}


def test_a_producer_loads_what_its_host_holds_so_that_vllm_is_right(fleet, engine):
    one, _, _ = pair(fleet)
    first, second = engine(one, "ec_producer"), engine(one, "ec_producer")
    computed = outputs("x")
    expected = copies(computed)
    first.serve(request("x"), computed)
    counted = Metrics(first)
    until(lambda: counted["saves"] == {"saved": 1}, "the save")
    r = request("x")
    second.serve(r, {})
    assert same(second.cache, expected)


def test_what_the_node_lost_is_published_again(fleet, engine, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 0.02)
    node = fleet.node("a")
    fleet.client(node)
    producer = engine(node.config.name, "ec_producer")
    counted = Metrics(producer)
    producer.serve(request("x"), outputs("x"))
    until(lambda: counted["saves"] == {"saved": 1}, "the save")
    node.kill()
    observer = fleet.client(fleet.node("a"))

    def published():
        producer.serve(request("x"), {})  # vLLM has it: nothing is encoded
        return observer.inspect().gauges["entries"] == 1

    until(published, "the entry to be there again")
    producer.serve(request("x"), {})


def test_a_node_that_dies_after_the_promise(fleet, engine):
    node = fleet.node("a")
    fleet.client(node)
    both = engine(node.config.name, "ec_both")
    computed = outputs("x")
    expected = copies(computed)
    both.serve(request("x"), computed)
    counted = Metrics(both)
    until(lambda: counted["saves"] == {"saved": 1}, "the save")
    both.forget("x")
    r = request(image("x", data=without_media))
    assert both.scheduler.ensure_cache_available(r, 0)
    assert both.scheduler.has_cache_item("x")
    both.scheduler.update_state_after_alloc(r, 0)
    node.kill()
    both.execute(both.scheduler.build_connector_meta(step(1)), [], {}, tokens=1)
    assert same(both.cache, expected)
    # And the engine goes on without a node.
    again = outputs("z")
    both.serve(request("z"), again)
    assert torch.equal(both.cache["z"], again["z"])


def test_placeholders_alone_survive_a_new_node(fleet, engine, monkeypatch):
    """Nothing but requests without media: no step has tokens, and V1 calls no hook of the worker's."""
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 0.02)
    (holder, _), (node, _) = fleet.connected("a", "b")
    producer, consumer = engine(holder.config.name, "ec_producer"), engine(node.config.name, "ec_consumer")
    computed = outputs("x")
    expected = copies(computed)
    producer.serve(request("x"), computed)
    counted = Metrics(producer)
    until(lambda: counted["saves"] == {"saved": 1}, "the save")
    node.kill()
    fleet.node("b")

    def served():
        r = request(image("x", data=without_media))
        answer = until(lambda: consumer.run(r, {}) or consumer.scheduler.take_unavailable_requests(), "an answer")
        finish(consumer, r)
        return answer is True

    until(served, "the entry to be loaded through the next node")
    assert same(consumer.cache, expected)


def test_a_lease_ends_when_every_rank_has_copied(fleet, engine, monkeypatch):
    one, two, observer = pair(fleet)
    producer = engine(one, "ec_producer")
    computed = outputs("x")
    expected = copies(computed)
    producer.serve(request("x"), computed)
    monkeypatch.setattr("ec_p2p.connector.connector.readers_of", lambda _: 2)
    consumer = engine(two, "ec_consumer")
    monkeypatch.setattr("ec_p2p.connector.connector.worker_rank", lambda _: WorkerRank(1, False))
    second_rank = ECP2PConnector(consumer.config, ECConnectorRole.WORKER)
    try:
        second_rank.start_worker_services()
        r = request(image("x", data=without_media))
        until(lambda: consumer.scheduler.ensure_cache_available(r, 0), "the entry")
        consumer.scheduler.update_state_after_alloc(r, 0)
        meta = consumer.scheduler.build_connector_meta(step(1))
        finish(consumer, r)
        consumer.execute(meta, [], {}, tokens=1)
        assert observer.inspect().gauges["leases"] == 1
        cache = {}
        second_rank.bind_connector_metadata(meta)
        second_rank.start_load_caches(cache)
        assert same(cache, expected)
        until(lambda: observer.inspect().gauges["leases"] == 0, "the lease to end")
    finally:
        second_rank.shutdown()


def test_an_item_larger_than_the_arena_is_refused_and_harms_nobody(fleet, engine):
    node = fleet.node("a", max_local_cpu_size="1MiB", slab_size="1MiB", window_size="256KiB")
    observer = fleet.client(node)
    producer = engine(node.config.name, "ec_producer", max_local_cpu_size="1MiB", slab_size="1MiB")
    big = {"x": torch.ones(20_000, 64, dtype=torch.bfloat16)}
    r = request("x")
    producer.serve(r, big)
    counted = Metrics(producer)
    until(lambda: counted["saves"] == {"too_large": 1}, "the refusal")
    assert finish(producer, r)["x"]["metadata"] == {}
    producer.serve(request("y"), outputs("y"))
    until(lambda: observer.inspect().gauges["entries"] == 1, "the next one")
