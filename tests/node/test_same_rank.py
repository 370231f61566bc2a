"""More clients than one that say that they are the same reader: which lander is told to READ, whose end ends a lease.

The node and its sessions are real. The landers only hear: what they would answer is `test_device_reads`' matter.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

from ec_p2p.node.messages import Landed, ReadEntry, WantItem
from tests.node.conftest import PATIENCE_S, Client, Fleet, until
from tests.transport.ends import start_process

_identities = itertools.count(1)


def attached_elsewhere(pipe, config, kind, rank):
    client = Client(config, kind, "engine", rank)
    pipe.send("attached")
    with contextlib.suppress(EOFError):
        pipe.recv()
    client.close()


@pytest.fixture
def host():
    """A host that is connected to a holder, and the holder's client."""
    fleet = Fleet("zmq")
    (_, holder), (node, tool) = fleet.connected("a", "b")
    processes = []

    def attach(kind, rank=0):
        return fleet.client(node, kind, "engine", rank)

    def attach_elsewhere(kind, rank=0):
        process, pipe = start_process(attached_elsewhere, node.config, kind, rank)
        processes.append((process, pipe))
        assert pipe.recv() == "attached"

    tool.attach, tool.attach_elsewhere, tool.holder = attach, attach_elsewhere, holder
    yield tool
    for process, pipe in processes:
        pipe.close()
        process.wait()
    fleet.close()


def orders(host, *landers):
    """How many READs each is told to do for a want of one reader, whose answer is awaited if nobody is."""
    identity = next(_identities).to_bytes(32, "big")
    host.holder.store(identity, bytes(4096))
    scheduler = host.attach("tool")
    long = {"wait_s": PATIENCE_S, "expect_s": PATIENCE_S}
    want = scheduler.node.want([WantItem(identity, 0)], readers=1, landing="device", **long)
    heard = [[] for _ in landers]

    def settled():
        for said, lander in zip(heard, landers, strict=True):
            said += [message for message in lander.node.poll() if isinstance(message, ReadEntry)]
        scheduler.heard += scheduler.node.poll()
        return any(heard) or any(isinstance(message, Landed) for message in scheduler.heard)

    until(settled, "a lander to be told, or the arena to have it")
    scheduler.node.forget(want)
    return [len(said) for said in heard]


def test_it_is_the_one_in_the_workers_process(host):
    host.attach("worker")
    ours = host.attach("lander")
    host.attach_elsewhere("lander")
    assert orders(host, ours) == [1]


def test_one_without_the_worker_is_none(host):
    host.attach_elsewhere("worker")
    stranger = host.attach("lander")
    assert orders(host, stranger) == [0]


def test_with_workers_of_two_processes_it_is_nobodys(host):
    """What lands for the one engine, the other's scheduler could be promised."""
    host.attach("worker")
    first = host.attach("lander")
    host.attach_elsewhere("worker")
    assert orders(host, first) == [0]
    host.attach("worker")
    newest = host.attach("lander")
    assert orders(host, first, newest) == [0, 0]


def test_of_several_in_one_process_it_is_the_newest(host):
    old, new = host.attach("lander"), host.attach("lander")
    assert orders(host, old, new) == [0, 1]


def test_a_rank_that_is_no_reader_is_told_nothing(host):
    first, odd, negative = host.attach("lander"), host.attach("lander", 1), host.attach("lander", -1)
    assert orders(host, first, odd, negative) == [1, 0, 0]


def test_the_end_of_an_old_worker_ends_no_lease_that_the_new_one_reads(host):
    old, new, scheduler = host.attach("worker"), host.attach("worker"), host.attach("scheduler")
    identity = next(_identities).to_bytes(32, "big")
    host.store(identity, bytes(4096))
    [landed] = scheduler.want(identity, readers=1)
    scheduler.node.dispatched(landed.lease)
    scheduler.sync()
    sessions = host.inspect().gauges["sessions"]
    old.close()
    until(lambda: host.inspect().gauges["sessions"] == sessions - 1, "the old worker to be gone")
    assert host.inspect().gauges["leases"] == 1
    new.close()
    until(lambda: host.inspect().gauges["leases"] == 0, "the lease to end with the last that may read it")
