"""Saving and loading tensors through a real node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ec_p2p.node.client import Detached
from ec_p2p.node.messages import Landed, Missing, OpenWindow, Pending, Saved, SaveSkipped, WantItem, Window
from ec_p2p.node.tensors import Loader, Place, Saver

from .conftest import PATIENCE_S, until

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A step of a model waits for no node as long as a test does for one on a busy machine."""
    monkeypatch.setattr("ec_p2p.node.tensors._WINDOW_WAIT_S", PATIENCE_S)


@pytest.fixture
def host(zmq_fleet):
    """A node with a worker and the scheduler of its instance."""
    node = zmq_fleet.node("a", window_size="1MiB")
    worker = zmq_fleet.client(node, "worker", "engine/dp0", 0)
    scheduler = zmq_fleet.client(node, "scheduler", "engine/dp0")
    return worker, scheduler


def save(saver, scheduler, identity, tensor):
    """Save, and wait until the node has it: a worker's and a scheduler's messages are not ordered among each other."""
    assert saver.save(identity, tensor) == "saved"
    assert scheduler.expect(Saved, lambda m: m.identity == identity).nbytes == tensor.nbytes


def load(worker, place):
    tensor, copied = Loader(worker.node).load(place, "cpu")
    assert copied.passed()
    return tensor


def place(scheduler, landed):
    return Place.of(scheduler.node.incarnation, landed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (320, 128), (0, 16), (7, 3)])
def test_a_saved_tensor_is_loaded_bit_for_bit(host, dtype, shape):
    worker, scheduler = host
    tensor = torch.randn(shape).to(dtype)
    save(Saver(worker.node), scheduler, A, tensor)
    [answer] = scheduler.want(A, rows=shape[0], readers=1)
    assert isinstance(answer, Landed)
    loaded = load(worker, place(scheduler, answer))
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)


def test_the_source_may_be_overwritten_as_soon_as_save_returns(host):
    worker, scheduler = host
    batch = torch.randn(2, 8, 16).to(torch.bfloat16)  # outputs of one encode batch are views of one storage
    expected = batch[1].clone()
    assert Saver(worker.node).save(A, batch[1]) == "saved"
    batch.zero_()
    scheduler.expect(Saved)
    [answer] = scheduler.want(A, readers=1)
    assert torch.equal(load(worker, place(scheduler, answer)), expected)


def test_what_is_loaded_does_not_alias_the_arena(host):
    worker, scheduler = host
    save(Saver(worker.node), scheduler, A, torch.ones(8, 16))
    [answer] = scheduler.want(A, readers=1)
    load(worker, place(scheduler, answer)).zero_()
    assert torch.equal(load(worker, place(scheduler, answer)), torch.ones(8, 16))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 8).t(),
        torch.randn(8, 12)[:, ::2],
        torch.randn(4, 4, requires_grad=True),
    ],
    ids=["transposed", "strided", "requires-grad"],
)
def test_any_two_dimensional_tensor_can_be_saved(host, tensor):
    worker, scheduler = host
    save(Saver(worker.node), scheduler, A, tensor)
    [answer] = scheduler.want(A, readers=1)
    assert torch.equal(load(worker, place(scheduler, answer)), tensor.detach())


@pytest.mark.parametrize("tensor", [torch.randn(4), torch.randn(2, 3, 4)], ids=["one-dim", "three-dim"])
def test_other_shapes_are_skipped_and_the_scheduler_is_told(host, tensor):
    worker, scheduler = host
    assert Saver(worker.node).save(A, tensor) == "layout"
    assert scheduler.expect(SaveSkipped).reason == "layout"


def test_an_item_without_rows_that_finds_its_window_full_gets_room_in_another(host):
    worker, scheduler = host
    saver = Saver(worker.node)
    save(saver, scheduler, A, torch.ones(1024, 256))  # 1 MiB, which is a window
    until(lambda: saver.save(B, torch.ones(0, 16)) == "saved", "another window")
    scheduler.expect(Saved, lambda m: m.identity == B)
    assert scheduler.inspect().counters.get("bad_commits", 0) == 0
    [answer] = scheduler.want(B, readers=1)
    assert load(worker, place(scheduler, answer)).shape == (0, 16)


def test_an_item_larger_than_a_window_gets_one_of_its_own(host):
    worker, scheduler = host
    saver = Saver(worker.node)
    saver.prepare()
    tensor = torch.randn(2048, 1024).to(torch.bfloat16)  # 4 MiB, windows are 1 MiB
    save(saver, scheduler, A, tensor)
    [answer] = scheduler.want(A, readers=1)
    assert torch.equal(load(worker, place(scheduler, answer)), tensor)


def test_an_item_larger_than_the_arena_is_skipped_and_nothing_is_lost(host):
    worker, scheduler = host
    saver = Saver(worker.node)
    save(saver, scheduler, A, torch.ones(8, 16))
    assert saver.save(B, torch.empty(17 << 20, 1, dtype=torch.uint8)) == "too_large"
    assert scheduler.expect(SaveSkipped).reason == "too_large"
    assert isinstance(scheduler.want(A, readers=1)[0], Landed)


def test_more_saves_than_the_arena_holds_keep_the_newest(host):
    worker, scheduler = host
    saver = Saver(worker.node)
    names = [number.to_bytes(32, "big") for number in range(1, 101)]
    for number, name in enumerate(names):
        assert saver.save(name, torch.full((1024, 256), number, dtype=torch.float32)) == "saved"  # 1 MiB each
    scheduler.expect(Saved, lambda m: m.identity == names[-1])
    [answer] = scheduler.want(names[-1], readers=1)
    loaded = load(worker, place(scheduler, answer))
    assert torch.equal(loaded, torch.full((1024, 256), 99, dtype=torch.float32))
    assert scheduler.want(names[0], readers=1)[0].reason == "no_source"


def test_nothing_is_promised_before_the_workers_are_attached(zmq_fleet):
    node = zmq_fleet.node("a")
    scheduler = zmq_fleet.client(node, "scheduler", "engine/dp0")
    zmq_fleet.client(node).store(A, b"x" * 128)
    assert scheduler.want(A, readers=2)[0].reason == "no_readers"
    workers = [zmq_fleet.client(node, "worker", "engine/dp0", rank) for rank in range(2)]
    [answer] = scheduler.want(A, readers=2)
    scheduler.node.dispatched(answer.lease)
    scheduler.sync()

    def leases():
        return scheduler.inspect().gauges["leases"]

    assert leases() == 1
    for left, worker in zip((1, 0), workers, strict=True):
        worker.node.release(answer.lease, worker.node._hello.rank)
        worker.sync()
        assert leases() == left


def test_a_worker_outlives_its_node_and_saves_into_the_next(zmq_fleet):
    node = zmq_fleet.node("a")
    worker = zmq_fleet.client(node, "worker", "engine/dp0", 0)
    scheduler = zmq_fleet.client(node, "scheduler", "engine/dp0")
    saver = Saver(worker.node)
    tensor = torch.randn(8, 16)
    save(saver, scheduler, A, tensor)
    [answer] = scheduler.want(A, readers=1)
    promised = place(scheduler, answer)
    node.kill()
    until(lambda: saver.save(B, tensor) == "detached", "the worker to notice")
    assert torch.equal(load(worker, promised), tensor)  # promised before the node died
    zmq_fleet.node("a")
    until(scheduler.node.attach, "the next node")
    until(lambda: saver.save(C, tensor) == "saved", "a window of the next node")
    scheduler.expect(Saved, lambda m: m.identity == C)
    [answer] = scheduler.want(C, readers=1)
    assert torch.equal(load(worker, place(scheduler, answer)), tensor)
    assert torch.equal(load(worker, promised), tensor)  # its arena is still mapped


def test_an_arena_never_mapped_cannot_be_loaded_from(host):
    worker, _ = host
    with pytest.raises(LookupError, match="not mapped"):
        Loader(worker.node).load(Place(b"?" * 16, 1, 0, 128, 1, 64, "bfloat16"), "cpu")


def test_a_worker_that_ends_lets_go_of_what_it_was_to_copy(zmq_fleet):
    node = zmq_fleet.node("a")
    zmq_fleet.client(node).store(A, b"x" * 128)
    workers = [zmq_fleet.client(node, "worker", "engine/dp0", rank) for rank in range(2)]
    scheduler = zmq_fleet.client(node, "scheduler", "engine/dp0")
    [answer] = scheduler.want(A, readers=2)
    scheduler.node.dispatched(answer.lease)
    scheduler.sync()
    for left, worker in zip((1, 0), workers, strict=True):
        worker.close()
        until(lambda n=left: scheduler.inspect().gauges["leases"] == n, f"{left} leases")
    zmq_fleet.clients[:] = [scheduler, zmq_fleet.clients[0]]


def test_a_save_that_fails_ends_the_wait_for_it(zmq_fleet):
    (producer, _), (_, reader) = zmq_fleet.connected("a", "b")
    scheduler = zmq_fleet.client(producer, "scheduler", "engine/dp0")
    worker = zmq_fleet.client(producer, "worker", "engine/dp0", 0)
    scheduler.node.encoding([A])
    scheduler.sync()

    def waits():
        want = reader.node.want([WantItem(A, 0)], readers=0, wait_s=10, expect_s=0)
        answer = reader.expect((Pending, Missing), lambda m: m.want == want)
        return answer if isinstance(answer, Pending) else None

    waiting = until(waits, "the pending advert")
    assert Saver(worker.node).save(A, torch.ones(4)) == "layout"
    answer = reader.expect(Missing, lambda m: m.want == waiting.want)
    assert answer.reason == "no_source"


def test_a_local_want_does_not_wait_for_another_host(zmq_fleet):
    (producer, _), (_, reader) = zmq_fleet.connected("a", "b")
    scheduler = zmq_fleet.client(producer, "scheduler", "engine/dp0")
    scheduler.node.encoding([A])
    scheduler.sync()
    until(lambda: reader.want(A, wait_s=0.05)[0].reason == "deadline", "the pending advert")
    assert reader.want(A, local_only=True)[0].reason == "no_source"
    other = zmq_fleet.client(producer, "tool", "other")
    want = other.node.want([WantItem(A, 0)], readers=0, wait_s=10, expect_s=0, local_only=True)
    assert other.expect(Pending, lambda m: m.want == want).why == "encoding"
    scheduler.close()  # its engine is gone, and with it the hope
    zmq_fleet.clients.remove(scheduler)
    assert other.expect(Missing, lambda m: m.want == want).reason == "no_source"


def test_a_window_never_exceeds_what_the_arena_takes(zmq_fleet):
    node = zmq_fleet.node("a", window_size="64MiB", slab_size="1MiB", max_local_cpu_size="8MiB")
    worker = zmq_fleet.client(node, "worker", "engine/dp0", 0)
    scheduler = zmq_fleet.client(node, "scheduler", "engine/dp0")
    save(Saver(worker.node), scheduler, A, torch.ones(8, 16))


class PlayedClient:
    """Attached to a second node, while it has not been read yet that the first is gone. Grants each window that it is
    asked for."""

    config = SimpleNamespace(window_size=1 << 20)
    attached = SimpleNamespace(arena_bytes=1 << 30, largest_entry=1 << 30)
    incarnation = b"second"

    def __init__(self):
        self.sent = []
        self._heard = []
        self._lost = [Detached(b"first")]

    def attach(self):
        return True

    def next_id(self):
        return 1 + len(self.sent)

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, OpenWindow):
            self._heard.append(Window(message.request, 1, 0, message.nbytes))
        return True

    def poll(self, timeout_s=0.0):
        """As of a real one: what was heard, then what was lost."""
        found, self._heard, self._lost = self._heard + self._lost, [], []
        return found


def test_a_window_of_the_next_node_is_not_lost_with_those_of_the_last():
    client = PlayedClient()
    saver = Saver(client)
    assert saver.save(A, torch.ones(4)) == "layout"
    saver.prepare()
    assert [type(message) for message in client.sent] == [SaveSkipped, OpenWindow]
