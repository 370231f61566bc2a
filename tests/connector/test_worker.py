"""The worker's side: what it copies, for whom, and what it says when it cannot."""

from __future__ import annotations

import threading

import pytest
import torch

from ec_p2p.connector.metadata import ECP2PMetadata
from ec_p2p.connector.topology import WorkerRank
from ec_p2p.connector.worker import WorkerSide
from ec_p2p.node.device import PASSED
from ec_p2p.node.messages import SaveSkipped
from ec_p2p.node.tensors import Place

INCARNATION = b"n" * 16


def place(lease=1, incarnation=INCARNATION):
    return Place(incarnation, lease, 0, 80, 10, 4, "bfloat16")


class Client:
    def __init__(self):
        self.incarnation = INCARNATION
        self.said = []
        self.closed = 0
        self.attached = threading.Event()

    def attach(self, timeout_s=0.0):
        self.attached.set()
        return True

    def poll(self, timeout_s=0.0):
        return []

    def send(self, message):
        self.said.append(message)
        return True

    def release(self, lease, reader=-1):
        self.said.append(("release", lease, reader))

    def close(self):
        self.closed += 1


class Loader:
    def __init__(self):
        self.error = None
        self.lander = None

    def load(self, place, device):
        if self.error:
            raise self.error
        return torch.full((place.rows, place.dim), float(place.lease), device=device), PASSED


class Saver:
    def __init__(self):
        self.saved = {}
        self.error = None
        self.copying = None

    def prepare(self):
        pass

    def save(self, identity, tensor):
        if self.error:
            raise self.error
        self.saved[identity] = tensor.clone()
        return "saved"

    def close(self, timeout_s):
        return True


class Rig:
    def __init__(self, reader=0, fetches=True):
        self.client, self.saver, self.loader = Client(), Saver(), Loader()
        self.errors = []
        self.side = WorkerSide(
            self.client,
            self.saver,
            self.loader,
            WorkerRank(reader, reader == 0),
            fetches=fetches,
            on_error=lambda where, error: self.errors.append((where, str(error))),
            device=lambda: "cpu",
        )
        self.cache = {}


@pytest.fixture
def rig():
    rigs = []

    def make(**settings):
        rigs.append(Rig(**settings))
        return rigs[-1]

    yield make
    for made in rigs:
        made.side.close()


def test_it_attaches_when_it_is_made(rig):
    assert rig().client.attached.is_set()


@pytest.mark.parametrize("reader", [0, 1])
def test_every_rank_loads_and_releases_as_itself(rig, reader):
    r = rig(reader=reader)
    r.side.before_model(r.cache, ECP2PMetadata(loads=[("a", place(7)), ("b", place(8))]))
    assert r.cache["a"].unique().tolist() == [7.0]
    assert r.client.said == [("release", 7, reader), ("release", 8, reader)]


def test_what_is_there_already_is_not_loaded_but_released(rig):
    r = rig()
    mine = r.cache["a"] = torch.ones(1, 1)
    r.loader.error = LookupError("not needed")
    r.side.before_model(r.cache, ECP2PMetadata(loads=[("a", place(7))]))
    assert r.cache["a"] is mine
    assert r.client.said == [("release", 7, 0)]


def test_a_lease_of_another_life_is_not_released_to_this_one(rig):
    r = rig()
    r.side.before_model(r.cache, ECP2PMetadata(loads=[("a", place(7, b"o" * 16))]))
    assert "a" in r.cache
    assert r.client.said == []


def test_a_promise_that_cannot_be_kept_is_an_error_that_says_why(rig):
    r = rig()
    r.loader.error = LookupError("the arena is not mapped")
    with pytest.raises(RuntimeError, match=r"promised embeddings cannot be loaded: 'a': the arena is not mapped"):
        r.side.before_model(r.cache, ECP2PMetadata(loads=[("a", place(7))]))
    assert r.client.said == [("release", 7, 0)]
    assert r.errors == [("load", "the arena is not mapped")]


def test_on_a_producer_it_costs_nobody_anything(rig):
    r = rig(fetches=False)
    r.loader.error = LookupError("the arena is not mapped")
    r.side.before_model(r.cache, ECP2PMetadata(loads=[("a", place(7))]))
    assert r.cache == {}
    assert r.errors == [("load", "the arena is not mapped")]


def test_only_what_the_scheduler_named_is_saved(rig):
    r = rig()
    r.cache = {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}
    step = ECP2PMetadata(encodes={"a": b"A" * 32})
    r.side.save(r.cache, "a", step)
    r.side.save(r.cache, "b", step)
    assert list(r.saver.saved) == [b"A" * 32]


def test_only_the_first_rank_saves(rig):
    r = rig(reader=1)
    r.cache = {"a": torch.ones(2, 2)}
    r.side.save(r.cache, "a", ECP2PMetadata(encodes={"a": b"A" * 32}))
    r.side.before_model(r.cache, ECP2PMetadata(saves_resident={"a": b"A" * 32}))
    assert r.saver.saved == {}


def test_what_is_resident_is_published_if_it_still_is(rig):
    r = rig()
    r.cache = {"a": torch.ones(2, 2)}
    r.side.before_model(r.cache, ECP2PMetadata(saves_resident={"a": b"A" * 32, "gone": b"G" * 32}))
    assert list(r.saver.saved) == [b"A" * 32]


def test_a_save_that_fails_is_told_and_harms_nobody(rig):
    r = rig()
    r.saver.error = AttributeError("a list has no dim")
    r.side.save({"a": [1]}, "a", ECP2PMetadata(encodes={"a": b"A" * 32}))
    assert r.client.said == [SaveSkipped("error", b"A" * 32)]
    assert r.errors == [("save", "a list has no dim")]


def test_an_idle_worker_stays_attached(rig, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 0.01)
    r = rig(reader=1)
    r.side.start(0.0)
    r.client.attached.clear()
    assert r.client.attached.wait(60)


def test_the_keeper_survives_an_error(rig, monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.worker.KEEP_S", 0.01)
    r = rig()
    r.saver.prepare = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        r.side.start(0.0)
    r.saver.prepare = lambda: None
    r.side.start(0.0)
    calls = threading.Semaphore(0)

    def fail():
        calls.release()
        raise ValueError("once more")

    r.saver.prepare = fail
    assert calls.acquire(timeout=60)
    assert calls.acquire(timeout=60)


def test_closing_twice(rig):
    r = rig()
    r.side.start(0.0)
    r.side.close()
    r.side.close()
    assert not [t for t in threading.enumerate() if t.name == "ec-p2p-keeper"]


def test_metadata_travels():
    import pickle

    step = ECP2PMetadata([("a", place())], {"b": b"B" * 32}, {"c": b"C" * 32})
    assert pickle.loads(pickle.dumps(step)) == step


def test_a_node_client_that_fails_ends_no_step(rig, monkeypatch):
    r = rig()

    def fails():
        raise OSError("too many open files")

    monkeypatch.setattr(r.saver, "prepare", fails)
    monkeypatch.setattr(r.client, "attach", fails)
    r.side.before_model({}, ECP2PMetadata(encodes={"a": b"A" * 32}))
    assert r.errors == [("prepare", "too many open files")]
