"""What a worker says of a copy that a device has not made yet: nothing. Real nodes, a device that copies on demand."""

from __future__ import annotations

import threading

import pytest
import torch

from ec_p2p.node.messages import Commit, Landed, Saved, SaveSkipped
from ec_p2p.node.tensors import Loader, Place, Saver

from .conftest import PATIENCE_S, until
from .slow_device import SlowDevice

A, B, C, D = (bytes([number]) * 32 for number in (1, 2, 3, 4))
TENSOR = torch.arange(128, dtype=torch.float32).view(8, 16)


class Host:
    """A node, with a worker on a slow device and the scheduler of its instance."""

    def __init__(self, fleet, **settings):
        self.fleet = fleet
        self.node = fleet.node("a", window_size="1MiB", **settings)
        self.worker = fleet.client(self.node, "worker", "engine/dp0", 0)
        self.scheduler = fleet.client(self.node, "scheduler", "engine/dp0")
        self.device = SlowDevice()
        self.saver = Saver(self.worker.node, self.device.of)

    def saved(self):
        """Identities of all that the node has stored, in order, once it has handled what the worker has said."""
        self.worker.sync()
        self.scheduler.sync()
        return [message.identity for message in self.scheduler.heard if isinstance(message, Saved)]

    def load(self, identity):
        [answer] = self.scheduler.want(identity, readers=1, local_only=True)
        assert isinstance(answer, Landed)
        at = Place.of(self.scheduler.node.incarnation, answer)
        return Loader(self.worker.node).load(at, "cpu")[0]

    def reserved(self):
        return self.scheduler.inspect().gauges["arena_bytes{kind=reserved}"]


@pytest.fixture
def host(zmq_fleet, monkeypatch):
    # A step of a model waits for no node as long as a test does for one on a busy machine.
    monkeypatch.setattr("ec_p2p.node.tensors._WINDOW_WAIT_S", PATIENCE_S)
    return Host(zmq_fleet)


def test_nothing_is_committed_before_it_has_been_copied(host):
    assert host.saver.save(A, TENSOR) == "saved"
    host.saver.settle()
    host.saver.prepare()
    assert host.saved() == []
    assert host.scheduler.want(A, readers=1, local_only=True)[0].reason == "no_source"
    host.device.work()
    host.saver.settle()
    assert host.saved() == [A]
    assert torch.equal(host.load(A), TENSOR)
    assert host.saver.copying is None


def test_commits_keep_the_order_of_the_saves(host):
    for identity in (A, B, C):
        assert host.saver.save(identity, TENSOR) == "saved"
    first, second, third = host.device.marks
    for mark in (third, second):
        mark.end()
        host.saver.settle()
        assert host.saved() == []
        assert host.saver.copying is first
    first.end()
    host.saver.settle()
    assert host.saved() == [A, B, C]


def test_the_next_save_commits_what_has_been_copied(host):
    host.saver.save(A, TENSOR)
    host.device.work()
    host.saver.save(B, TENSOR)
    assert host.saved() == [A]


def test_a_window_is_not_given_back_while_a_copy_into_it_is_under_way(host):
    quarter = torch.ones(65536)[:, None]  # of a window of 1 MiB
    names = [number.to_bytes(32, "big") for number in range(1, 17)]
    for name in names:
        assert host.saver.save(name, quarter) == "saved"
        host.worker.sync()
    used_up = host.reserved()
    assert used_up >= 16 * quarter.nbytes
    assert host.saved() == []
    host.device.work()
    host.saver.settle()
    assert host.saved() == names
    # The windows that are used up consist of entries now; what is left are the two at most that it goes on with.
    assert host.reserved() <= 2 << 20
    assert torch.equal(host.load(names[0]), quarter)


def test_what_was_being_copied_when_the_node_ended_is_not_told_to_the_next(host):
    assert host.saver.save(A, TENSOR) == "saved"
    host.node.kill()
    host.fleet.node("a")
    until(host.scheduler.node.attach, "the next node")
    until(host.worker.node.attach, "the next node")
    host.device.work()  # into the old arena, which is still mapped
    host.saver.settle()
    assert host.saver.copying is None
    until(lambda: host.saver.save(B, TENSOR) == "saved", "a window of the next node")
    host.device.work()
    host.saver.settle()
    assert host.saved() == [B]
    assert host.scheduler.inspect().counters.get("bad_commits", 0) == 0
    assert torch.equal(host.load(B), TENSOR)


def test_closing_waits_for_the_copies_and_commits_them(host):
    host.saver.save(A, TENSOR)
    host.saver.save(B, TENSOR)
    closed = []
    closing = threading.Thread(target=lambda: closed.append(host.saver.close(60.0)))
    closing.start()
    assert host.scheduler.want(A, readers=0, local_only=True)[0].reason == "no_source"
    assert host.reserved() > 0
    host.device.work()
    closing.join()
    assert closed == [True]
    assert host.saved() == [A, B]
    assert host.reserved() == 0


def test_closing_does_not_wait_for_ever_and_gives_nothing_back_too_early(host):
    host.saver.save(A, TENSOR)
    held = host.reserved()
    assert not host.saver.close(0.0)
    assert host.saved() == []
    assert host.reserved() == held > 0


def test_a_copy_that_failed_is_no_entry_and_holds_up_no_other(host):
    host.saver.save(A, TENSOR)
    host.saver.save(B, TENSOR)
    host.device.fail()
    host.device.work()
    host.saver.settle()
    assert host.saved() == [B]
    assert host.scheduler.expect(SaveSkipped) == SaveSkipped("error", A)
    assert host.scheduler.want(A, readers=0, local_only=True)[0].reason == "no_source"


def test_who_is_too_far_ahead_of_the_device_waits_for_it(host, monkeypatch):
    monkeypatch.setattr("ec_p2p.node.after_copies.MOST_HELD", 2)
    host.saver.save(A, TENSOR)
    host.saver.save(B, TENSOR)
    outcomes = []
    third = threading.Thread(target=lambda: outcomes.append(host.saver.save(C, TENSOR)))
    third.start()
    oldest = host.device.marks[0]
    assert oldest.waited_for.wait(PATIENCE_S)
    assert len(host.device.marks) == 2  # no copy is made for which there is no room
    host.device.work(1)
    third.join()
    assert outcomes == ["saved"]
    host.device.work()
    host.saver.settle()
    assert host.saved() == [A, B, C]


def test_a_failed_device_is_not_waited_for(host, monkeypatch):
    monkeypatch.setattr("ec_p2p.node.after_copies.MOST_HELD", 1)
    host.saver.save(A, TENSOR)
    host.device.fail()
    assert host.saver.save(B, TENSOR) == "saved"
    host.device.work()
    host.saver.settle()
    assert host.saved() == [B]


def test_on_the_host_a_commit_leaves_with_its_save(host):
    sent = []
    saver = Saver(host.worker.node)
    saver.prepare()
    until(lambda: saver.save(A, TENSOR) == "saved", "a window")
    host.worker.node.send, send = sent.append, host.worker.node.send
    saver.save(B, TENSOR)
    host.worker.node.send = send
    assert [message.identity for message in sent if isinstance(message, Commit)] == [B]
    assert saver.copying is None
    assert saver.close(0.0)
