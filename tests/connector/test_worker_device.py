"""A worker whose device is behind with its copies, on a real node."""

from __future__ import annotations

import threading

import pytest
import torch

from ec_p2p.connector.metadata import ECP2PMetadata
from ec_p2p.connector.topology import WorkerRank
from ec_p2p.connector.worker import WorkerSide
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import Landed, Saved, SaveSkipped
from ec_p2p.node.tensors import Loader, Place, Saver
from tests.node.conftest import PATIENCE_S, Fleet, until
from tests.node.slow_device import SlowDevice

A, B = b"A" * 32, b"B" * 32
TENSOR = torch.arange(128, dtype=torch.float32).view(8, 16)


class Host:
    """A node with one engine: a worker on a slow device, and the scheduler's client. The worker's keeper sleeps."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.node = fleet.node("a")
        self.tool = fleet.client(self.node)
        self.scheduler = fleet.client(self.node, "scheduler", "engine/dp0")
        self.device = SlowDevice()
        self.client = NodeClient(self.node.config, "worker", "engine/dp0", 0)
        self.errors = []
        self.cache = {}
        self.side = WorkerSide(
            self.client,
            Saver(self.client, self.device.of),
            Loader(self.client, self.device.of),
            WorkerRank(0, True),
            fetches=True,
            on_error=lambda where, error: self.errors.append((where, str(error))),
            device=lambda: "cpu",
        )
        self.side.start(PATIENCE_S)

    def save(self, identity, identifier="a"):
        self.cache[identifier] = TENSOR.clone()
        self.side.save(self.cache, identifier, ECP2PMetadata(encodes={identifier: identity}))

    def promise(self, identity):
        """As the scheduler does: from now on only the worker ends the lease."""
        [answer] = self.scheduler.want(identity, readers=1)
        assert isinstance(answer, Landed)
        self.scheduler.node.dispatched(answer.lease)
        return Place.of(self.scheduler.node.incarnation, answer)

    def load(self, identity):
        self.side.before_model(self.cache, ECP2PMetadata(loads=[("a", self.promise(identity))]))

    def idle_step(self):
        self.side.before_model(self.cache, ECP2PMetadata())

    def leases(self):
        return self.scheduler.inspect().gauges["leases"]

    def workers_gone(self):
        return self.scheduler.inspect().gauges["sessions"] == len(self.fleet.clients)


@pytest.fixture
def fleet():
    fleet = Fleet("zmq")
    yield fleet
    fleet.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """What a model or the end of its process cannot wait for, a test on a busy machine can."""
    monkeypatch.setattr("ec_p2p.node.tensors._WINDOW_WAIT_S", PATIENCE_S)
    monkeypatch.setattr("ec_p2p.connector.worker.CLOSE_S", PATIENCE_S)
    monkeypatch.setattr("ec_p2p.connector.settler._JOIN_S", PATIENCE_S)


@pytest.fixture
def host(fleet, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 3600.0)
    host = Host(fleet)
    yield host
    host.device.work()
    host.side.close()


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_an_idle_worker_commits_as_soon_as_its_device_is_done(host):
    host.save(A)
    mark = host.device.marks[0]
    assert mark.waited_for.wait(PATIENCE_S)
    assert not any(isinstance(message, Saved) for message in host.scheduler.heard)
    host.device.work()  # and no hook is called any more
    assert host.scheduler.expect(Saved).identity == A


def test_the_model_does_not_wait_for_the_device(host):
    host.save(A)
    host.save(B, "b")
    host.idle_step()
    assert [mark.passed() for mark in host.device.marks] == [False, False]
    host.device.work()
    assert [host.scheduler.expect(Saved).identity for _ in "ab"] == [A, B]


def test_a_lease_is_released_when_the_copy_is_over_and_not_before(host):
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.load(A)
    host.idle_step()
    host.tool.sync()
    assert host.leases() == 1
    host.device.work()
    host.idle_step()
    until(lambda: host.leases() == 0, "the release")
    assert torch.equal(host.cache["a"].view(torch.float32), TENSOR)


def test_what_is_loaded_does_not_alias_the_arena(host):
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.load(A)
    host.device.work()
    host.cache.pop("a").zero_()
    host.load(A)
    host.device.work()
    assert torch.equal(host.cache["a"].view(torch.float32), TENSOR)


def test_the_keeper_releases_what_an_idle_worker_has_copied(fleet, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 0.01)
    host = Host(fleet)
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.load(A)
    assert host.leases() == 1
    host.device.work()
    until(lambda: host.leases() == 0, "the release")
    host.side.close()


def test_a_worker_leaves_only_when_its_device_is_done(host):
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.save(B, "b")
    host.load(A)
    closing = threading.Thread(target=host.side.close)
    closing.start()
    assert host.scheduler.want(B, readers=0, local_only=True)[0].reason == "no_source"
    host.device.work(1)
    assert host.scheduler.expect(Saved).identity == B
    host.tool.sync()
    assert host.leases() == 1
    assert not host.workers_gone()
    host.device.work()
    closing.join()
    until(host.workers_gone, "the worker to leave")
    assert host.leases() == 0


def test_a_worker_whose_device_hangs_ends_its_link_with_its_process_only(host, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.CLOSE_S", 0.0)
    monkeypatch.setattr("ec_p2p.connector.settler._JOIN_S", 0.0)
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.load(A)
    host.save(B, "b")
    host.side.close()
    host.tool.sync()
    assert host.leases() == 1
    assert not host.workers_gone()
    host.device.work()
    host.side.close()
    until(host.workers_gone, "the worker to leave")


def test_a_copy_that_failed_keeps_its_lease_until_the_worker_ends(host):
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.load(A)
    host.device.fail()
    host.idle_step()
    host.idle_step()
    assert host.errors == [("release", "an illegal memory access was encountered")]
    host.tool.sync()
    assert host.leases() == 1
    host.side.close()
    until(lambda: host.leases() == 0, "the end of the worker")


def test_a_save_that_failed_is_told_by_an_idle_worker(host):
    host.save(A)
    host.save(B, "b")
    host.device.fail()
    host.device.work()
    assert host.scheduler.expect(SaveSkipped) == SaveSkipped("error", A)
    assert host.scheduler.expect(Saved).identity == B


def test_where_nothing_has_to_be_waited_for_nobody_waits(fleet, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 3600.0)
    host = Host(fleet)
    host.side._saver, host.side._loader = Saver(host.client), Loader(host.client)
    host.save(A)
    assert host.scheduler.expect(Saved).identity == A
    del host.cache["a"]
    host.load(A)
    until(lambda: host.leases() == 0, "the release")
    assert not threads("ec-p2p-settler")
    host.side.close()


def test_closing_ends_the_threads(host):
    host.save(A)
    assert threads("ec-p2p-settler")
    host.device.work()
    host.side.close()
    assert not threads("ec-p2p-settler")
    assert not threads("ec-p2p-keeper")


class PlayedLander:
    """Has landed what it is told to have."""

    def __init__(self, device, on_close=lambda: None):
        self.landed = {}
        self.on_close = on_close

    def view(self, incarnation, read):
        return self.landed[incarnation, read]

    def close(self):
        self.on_close()


@pytest.fixture
def landing(host):
    """The host, with a lander, and a promise of what has landed there as READ 7."""
    host.side._loader.lander = PlayedLander(host.device)
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.place = host.promise(A)._replace(read=7, rows=8, dim=16, dtype="float32")
    host.memory = TENSOR.clone()
    host.side._loader.lander.landed[host.place.incarnation, 7] = host.memory
    return host


def load_landed(host):
    host.side.before_model(host.cache, ECP2PMetadata(loads=[("a", host.place)]))


def test_what_has_landed_is_leased_until_it_is_copied_and_not_aliased(landing):
    load_landed(landing)
    landing.idle_step()
    landing.tool.sync()
    assert landing.leases() == 1
    landing.device.work()
    landing.idle_step()
    until(lambda: landing.leases() == 0, "the release")
    landing.memory.zero_()
    assert torch.equal(landing.cache["a"], TENSOR)


def test_a_lander_ends_after_the_copies_and_before_the_worker_leaves(landing):
    at_the_end = []
    landing.side._loader.lander.on_close = lambda: at_the_end.append((landing.side._reading, landing.workers_gone()))
    load_landed(landing)
    closing = threading.Thread(target=landing.side.close)
    closing.start()
    landing.tool.sync()
    assert at_the_end == []
    landing.device.work()
    closing.join()
    assert at_the_end == [([], False)]
    until(landing.workers_gone, "the worker to leave")


def test_a_lander_that_does_not_end_well_keeps_no_worker(landing):
    def fail():
        raise ValueError("not well")

    landing.side._loader.lander.on_close = fail
    load_landed(landing)
    landing.device.work()
    landing.side.close()
    until(landing.workers_gone, "the worker to leave")
    assert landing.errors == [("lander", "not well")]


def test_without_a_lander_a_promise_of_what_has_landed_ends_the_engine(landing):
    """vLLM has no way back. So the node promises to none such."""
    landing.side._loader.lander = None
    with pytest.raises(RuntimeError, match="nothing lands on this worker's device"):
        load_landed(landing)


def test_a_worker_whose_lander_cannot_be_made_loads_from_the_arena(fleet, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 3600.0)
    host = Host(fleet)

    def refuse(device):
        raise RuntimeError("landing_size=1: the device has no room for it")

    host.side._make_lander = refuse
    host.side.start(PATIENCE_S)
    assert host.errors == [("lander", "landing_size=1: the device has no room for it")]
    host.tool.store(A, TENSOR.numpy().tobytes(), dim=32)
    host.load(A)
    host.device.work()
    host.side.close()
    assert torch.equal(host.cache["a"].view(torch.float32), TENSOR)
