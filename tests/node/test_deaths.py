"""Clients and nodes that die, freeze or restart: nobody else is disturbed, nothing leaks."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from ec_p2p.node.client import Detached, NodeClient
from ec_p2p.node.messages import Landed, Missing, Sync, Synced, WantItem

from .conftest import DOUBTS_SOON, PATIENCE_S, Client, until

A, B = (bytes([number]) * 32 for number in (1, 2))


def gauges(client):
    return client.inspect().gauges


def _hold(config, identity, pipe):
    """A client that holds a window and a lease, and says so."""
    client = Client(config, "tool", "victim")
    client.window(1 << 20)
    [answer] = client.want(identity)
    pipe.send(answer.lease)
    pipe.recv()


def test_a_client_killed_with_leases_and_windows_leaves_nothing_held(zmq_fleet):
    ((node, client),) = zmq_fleet.connected("a")
    client.store(A, b"x" * 4096)
    before = gauges(client)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    victim = spawn.Process(target=_hold, args=(node.config, A, there))
    victim.start()
    assert here.recv() > 0
    held = gauges(client)
    assert held["leases"] == before["leases"] + 1
    assert held["arena_bytes{kind=reserved}"] == before["arena_bytes{kind=reserved}"] + (1 << 20)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    until(lambda: gauges(client)["sessions"] == before["sessions"], "the session to end")
    after = gauges(client)
    assert after["leases"] == before["leases"]
    assert after["arena_bytes{kind=reserved}"] == before["arena_bytes{kind=reserved}"]
    assert after["entries"] == 1
    here.close()


def _fork_and_hold(config, pipe):
    """A client with a child that outlives it and inherits its socket, as a fork without exec does."""
    client = Client(config, "tool", "victim")
    client.window(1 << 20)
    child = os.fork()
    if child == 0:
        signal.pause()
    pipe.send(child)
    pipe.recv()


def test_a_client_is_gone_when_it_is_dead_although_its_child_lives(zmq_fleet):
    ((node, client),) = zmq_fleet.connected("a")
    before = gauges(client)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    victim = spawn.Process(target=_fork_and_hold, args=(node.config, there))
    victim.start()
    child = here.recv()
    try:
        victim.kill()
        victim.join()
        until(lambda: gauges(client)["sessions"] == before["sessions"], "the session to end")
        assert gauges(client)["arena_bytes{kind=reserved}"] == before["arena_bytes{kind=reserved}"]
    finally:
        os.kill(child, signal.SIGKILL)
        here.close()


def test_a_holder_killed_between_advert_and_fetch(fleet):
    (holder_node, holder), (_, reader) = fleet.connected("a", "b", **DOUBTS_SOON)
    holder.store(A, os.urandom(1 << 20))
    holder.store(B, os.urandom(1 << 20))
    reader.has_landed(A)
    holder_node.kill()
    [answer] = reader.want(B, wait_s=3.0)
    assert isinstance(answer, Missing)
    assert answer.reason in ("failed", "no_source", "deadline")
    assert gauges(reader)["arena_bytes{kind=pinned}"] == 0
    until(lambda: not reader.inspect().peers, "the dead node to leave the replica")
    until(lambda: gauges(reader)["quarantined_bytes"] == 0, "landing memory to come back")
    assert reader.want(B, wait_s=0.5)[0].reason == "no_source"
    assert isinstance(reader.want(A)[0], Landed)


def test_another_holder_serves_when_one_is_dead(fleet):
    (first_node, first), (_, second), (_, reader) = fleet.connected("a", "b", "c", **DOUBTS_SOON)
    payload = os.urandom(1 << 20)
    first.store(A, payload)
    second.has_landed(A)  # and advertises it in turn
    until(lambda: second.inspect().counters.get("adverts"), "the second advert")
    first_node.kill()

    def landed():
        [answer] = reader.want(A, wait_s=5.0)
        return answer if isinstance(answer, Landed) else None

    assert reader.bytes_of(until(landed, "the entry from the other holder")) == payload


def test_a_frozen_holder_costs_a_deadline_not_the_reader(zmq_fleet):
    """Over ZMQ the holder must help, so a stopped one answers nothing; NIXL reads shared memory without it."""
    (holder_node, holder), (_, reader) = zmq_fleet.connected("a", "b", **DOUBTS_SOON)
    holder.store(A, os.urandom(1 << 20))
    holder.store(B, os.urandom(1 << 20))
    reader.has_landed(A)
    holder_node.freeze()
    [answer] = reader.want(B, wait_s=4.0)
    assert isinstance(answer, Missing)
    until(lambda: gauges(reader)["quarantined_bytes"] == 0, "landing memory to come back")
    holder_node.thaw()

    def landed():
        return isinstance(reader.want(B, wait_s=2.0, expect_s=0.5)[0], Landed)

    until(landed, "the thawed holder to be readable again")


def test_a_frozen_node_loses_nothing_of_what_it_was_told(zmq_fleet):
    """More than its socket holds: releases that were lost would pin memory for good."""
    ((node, client),) = zmq_fleet.connected("a")
    client.store(A, b"x" * 128)
    answers = [client.want(A)[0] for _ in range(2000)]
    node.freeze()
    client.release(*answers)
    node.thaw()
    until(lambda: gauges(client)["leases"] == 0, "every release to arrive")


def test_a_node_that_restarts_is_a_new_incarnation(fleet):
    (old, holder), (_, reader) = fleet.connected("a", "b", **DOUBTS_SOON)
    holder.store(A, os.urandom(4096))
    holder.store(B, os.urandom(4096))
    reader.has_landed(A)
    old.kill()
    until(lambda: not holder.node.attach(), "the client to notice")
    again = fleet.client(fleet.node("a", **DOUBTS_SOON))
    payload = os.urandom(8192)
    again.store(B, payload)

    def landed():
        [answer] = reader.want(B, wait_s=5.0, expect_s=1.0)
        return answer if isinstance(answer, Landed) else None

    assert reader.bytes_of(until(landed, "the new incarnation's entry")) == payload


def test_the_directory_host_dies_and_comes_back_empty(zmq_fleet):
    """The first node hosts the directory. When it dies another node takes over, and everybody says everything again."""
    (host, _), (_, holder), (_, reader) = zmq_fleet.connected("a", "b", "c", **DOUBTS_SOON)
    holder.store(A, os.urandom(4096))
    holder.store(B, os.urandom(4096))
    reader.has_landed(A)
    host.kill()
    late = zmq_fleet.client(zmq_fleet.node("d", **DOUBTS_SOON))
    late.has_landed(B)


def test_a_client_survives_its_node_and_attaches_to_the_next(zmq_fleet):
    node = zmq_fleet.node("a")
    client = zmq_fleet.client(node)
    client.store(A, b"x" * 128)
    old = client.node.incarnation
    [answer] = client.want(A)
    node.kill()
    until(lambda: not client.node.attach(), "the client to notice")
    assert client.node.poll() == [Detached(old)]
    assert client.node.want([WantItem(A, 0)], readers=0, wait_s=1, expect_s=0) == 0
    assert client.bytes_of_old(old, answer) == b"x" * 128  # what was promised can still be loaded
    zmq_fleet.node("a")
    until(client.node.attach, "the next node")
    assert client.node.incarnation not in (old, b"")
    assert client.want(A)[0].reason == "no_source"


def test_a_second_node_of_the_same_name_does_not_start(zmq_fleet):
    node = zmq_fleet.node("a")
    zmq_fleet.client(node)
    second = zmq_fleet.node("a")
    assert second.process.wait(PATIENCE_S) == 1


def test_the_first_client_starts_the_node_and_it_leaves_after_the_last(zmq_fleet):
    config = zmq_fleet.config("spawned", spawn_node=True, grace_s=0.5)
    clients = [NodeClient(config, "tool", "x") for _ in range(3)]
    try:
        until(lambda: [c.attach() for c in clients] == [True] * 3, "the node to be started")
        assert len({client.incarnation for client in clients}) == 1
        first = Client(config)
        pid = int(first.inspect().node["pid"])
        first.close()
        assert os.getpgid(pid) != os.getpgid(0)
    finally:
        for client in clients:
            client.close()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the node to leave")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_node_told_to_stop_leaves_at_once_and_cleanly(zmq_fleet, how):
    (node, client), (_, other) = zmq_fleet.connected("a", "b")
    client.store(A, b"x" * 128)
    until(lambda: other.inspect().peers, "the peer")
    node.process.send_signal(how)
    assert node.process.wait(PATIENCE_S) == 0
    until(lambda: not other.inspect().peers, "the goodbye to arrive")


def test_what_ends_a_want_is_not_lost_on_a_node_that_stands_still(zmq_fleet):
    """It takes no more questions then; what it has heard already it answers when it goes on, with a lease."""
    [(node, client)] = zmq_fleet.connected("a")
    client.store(A, b"x" * 256)
    node.freeze()
    want = client.node.want([WantItem(A, 0)], readers=0, wait_s=PATIENCE_S, expect_s=0.0)
    while client.node.send(Sync(0)):
        pass
    client.node.forget(want)
    node.thaw()
    token = client.node.next_id()

    def takes_questions():
        client.heard += client.node.poll(0.1)
        return client.node.send(Sync(token))

    until(takes_questions, "the node to read again")
    client.expect(Synced, lambda m: m.token == token)
    assert client.expect(Landed).want == want
    assert client.inspect().gauges["leases"] == 0
