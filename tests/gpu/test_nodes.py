"""From a tensor on a GPU, through two real nodes, to a tensor on a GPU."""

from __future__ import annotations

import contextlib
import importlib
import warnings

import pytest
import torch

from ec_p2p.node.messages import Landed, Saved
from ec_p2p.node.tensors import Loader, Place, Saver
from ec_p2p.transport import nixl_available
from tests.node.conftest import PATIENCE_S, Fleet, until

ROWS, DIM = 640, 1024


@pytest.fixture(params=["nixl", "zmq"])
def fleet(request):
    if request.param == "nixl" and not nixl_available():
        pytest.skip("NIXL is not installed")
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


class Engine:
    """A worker and the scheduler's client of one instance, on a host of its own."""

    def __init__(self, fleet, node, client):
        self.tool = client
        self.name = f"{node.config.name}/dp0"
        self.worker = fleet.client(node, "worker", self.name, 0)
        self.scheduler = fleet.client(node, "scheduler", self.name)
        self.saver, self.loader = Saver(self.worker.node), Loader(self.worker.node)

    def save(self, identity, tensor):
        until(lambda: self.saver.save(identity, tensor) == "saved", "a window")

    def commit(self):
        def settled():
            self.saver.settle()
            return self.saver.copying is None

        until(settled, "the copies")

    def promise(self, identity):
        def landed():
            [answer] = self.scheduler.want(identity, readers=1, wait_s=2.0, expect_s=2.0)
            return answer if isinstance(answer, Landed) else None

        at = until(landed, "the entry")
        self.scheduler.node.dispatched(at.lease)
        return Place.of(self.scheduler.node.incarnation, at)

    def leases(self):
        return self.tool.inspect().gauges["leases"]


@pytest.fixture
def engines(fleet):
    return [Engine(fleet, node, client) for node, client in fleet.connected("a", "b", max_local_cpu_size="256MiB")]


def identity_of(number):
    return number.to_bytes(32, "big")


def test_what_one_gpu_has_encoded_another_hosts_gpu_gets(engines, gpu):
    producer, consumer = engines
    expected = {}
    for number in range(1, 33):
        tensor = torch.randn(ROWS, DIM, device=f"cuda:{gpu.index}").to(torch.bfloat16)
        expected[number] = tensor.cpu()
        producer.save(identity_of(number), tensor)
        del tensor
    producer.commit()
    for number in expected:
        assert producer.scheduler.expect(Saved).identity == identity_of(number)
    marks = []
    for number in expected:
        place = consumer.promise(identity_of(number))
        loaded, mark = consumer.loader.load(place, f"cuda:{gpu.index}")
        assert torch.equal(loaded.cpu(), expected[number])
        marks.append((place, mark))
    assert consumer.leases() == len(expected)
    for place, mark in marks:
        mark.wait()
        consumer.worker.node.release(place.lease, 0)
    until(lambda: consumer.leases() == 0, "the releases")
    assert producer.saver.close(PATIENCE_S)


def test_a_workers_hooks(engines, gpu):
    """Save on one host and load on the other, as vLLM has it done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM's own imports have to say is nobody's error here
        pytest.importorskip("vllm")
        with contextlib.suppress(ImportError):
            importlib.import_module("vllm.utils.gpu_sync_debug")
        from ec_p2p.connector.metadata import ECP2PMetadata
        from ec_p2p.connector.topology import WorkerRank
        from ec_p2p.connector.worker import WorkerSide

    errors = []

    def side_of(engine):
        return WorkerSide(
            engine.worker.node,
            engine.saver,
            engine.loader,
            WorkerRank(0, True),
            fetches=True,
            on_error=lambda where, error: errors.append((where, error)),
            device=lambda: f"cuda:{gpu.index}",
        )

    producer, consumer = engines
    sides = [side_of(engine) for engine in engines]
    for side in sides:
        side.start(PATIENCE_S)
    encoded = {str(number): torch.randn(ROWS, DIM, device=f"cuda:{gpu.index}") for number in range(1, 9)}
    step = ECP2PMetadata(encodes={name: identity_of(int(name)) for name in encoded})
    sides[0].before_model(encoded, step)
    for name in encoded:
        sides[0].save(encoded, name, step)
    # Nobody calls a hook of the producer any more.
    for name in encoded:
        assert producer.scheduler.expect(Saved).identity == identity_of(int(name))
    cache = {}
    places = [(name, consumer.promise(identity_of(int(name)))) for name in encoded]
    sides[1].before_model(cache, ECP2PMetadata(loads=places))
    for name, tensor in encoded.items():
        assert cache[name].device == tensor.device
        assert torch.equal(cache[name], tensor)
    until(lambda: consumer.leases() == 0, "the keeper to release")
    for side in sides:
        side.close()
    assert not errors
