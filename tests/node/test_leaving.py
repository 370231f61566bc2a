"""A node that is told to leave: who waits for it is told first, and its name is free last."""

from __future__ import annotations

import socket

import pytest

from ec_p2p.node import wiring
from ec_p2p.node.address import attach_address
from ec_p2p.node.client import Detached
from ec_p2p.node.listening import AlreadyRunning
from ec_p2p.node.messages import Landed
from ec_p2p.node.service import Node
from tests.engine.disks import Gate, Sick

from .conftest import PATIENCE_S, until
from .here import NodeHere

A = b"\x01" * 32


def answers(config):
    """Whether something listens at the node's address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(attach_address(config)) == 0


@pytest.mark.parametrize("address", ["abstract", "file"])
def test_clients_and_fleet_are_told_before_the_disk_gets_what_waits(zmq_fleet, tmp_path, monkeypatch, address):
    gate = Gate("pwritev")
    monkeypatch.setattr("ec_p2p.engine.disk.Files", lambda: Sick(gate))
    monkeypatch.setattr(wiring, "_DRAIN_S", 600.0)
    folder = tmp_path / "disk"
    other = zmq_fleet.client(zmq_fleet.node("b"))
    settings = {"node_socket": str(tmp_path / "node")} if address == "file" else {}
    config = zmq_fleet.config("a", local_disk=str(folder), embedded_directory=False, **settings)
    with NodeHere(config) as here:
        client = zmq_fleet.client(config)
        client.store(A, b"x" * 4096)
        assert isinstance(other.want(A, expect_s=PATIENCE_S)[0], Landed)
        [lease] = client.want(A)
        assert isinstance(lease, Landed)
        assert gate.reached.wait(PATIENCE_S)
        here.node.stop()
        until(lambda: Detached(here.node.wiring.incarnation) in client.node.poll(), "the client to be told")
        until(lambda: not other.inspect().peers, "the fleet to be told")
        assert here.thread.is_alive(), "it waits for the disk"
        assert not list(folder.rglob("*.safetensors"))
        with pytest.raises(AlreadyRunning):
            Node(config)
        assert not client.node.attach()
        assert answers(config), "who finds nobody there starts another node"
        gate.opened.set()
        here.join()
    assert len(list(folder.rglob("*.safetensors"))) == 1
    assert not answers(config)
    with NodeHere(config):
        until(client.node.attach, "the next node")
        # It looks through the folder behind its clients' backs, and the other host has the entry, too.
        until(lambda: client.inspect().gauges["disk_entries"] == 1, "the file to be found")
        assert client.want(A)[0].source == "disk"


def test_a_defect_of_one_part_is_counted_and_ends_nothing(zmq_fleet, monkeypatch, caplog):
    def tick(self, now):
        raise RuntimeError("a defect")

    monkeypatch.setattr("ec_p2p.node.saving.Saving.tick", tick)
    with NodeHere(zmq_fleet.config("a")) as here:
        client = zmq_fleet.client(here.config)
        until(lambda: client.inspect().counters.get("errors", 0) >= 2, "two errors")
        client.store(A, b"x" * 4096)
        assert isinstance(client.want(A)[0], Landed)
    [line] = [record for record in caplog.records if record.name == "ec_p2p.node.loop"]
    assert line.exc_info[0] is RuntimeError
