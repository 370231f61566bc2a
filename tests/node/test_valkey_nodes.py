"""Nodes whose directory is a Valkey or Redis server, and what they do without it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ec_p2p.config import make_config
from ec_p2p.node import network
from ec_p2p.node.messages import Landed, Missing
from tests.control.valkey_process import ValkeyProcess, needs_server
from tests.node.conftest import until

pytestmark = needs_server

ENTRY, LATER, NEVER = (bytes([number]) * 32 for number in (1, 2, 3))
PAYLOAD = os.urandom(64 << 10)


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with contextlib.closing(ValkeyProcess()) as server:
        yield server


def test_nodes_fetch_from_each_other_and_outlive_the_server(zmq_fleet, server) -> None:
    (_, a), (_, b) = zmq_fleet.connected("a", "b", directory=[server.endpoint])
    a.store(ENTRY, PAYLOAD)
    b.store(LATER, PAYLOAD[::-1])
    a.has_landed(LATER)
    b.has_landed(ENTRY)

    server.kill()
    for client in (a, b):
        until(lambda c=client: c.inspect().gauges["directory_connected"] == 0, "the server to be missed")
    # What was known stays known, and what is not known is not waited for.
    [again] = b.want(ENTRY)
    assert isinstance(again, Landed)
    assert b.bytes_of(again) == PAYLOAD
    b.release(again)
    a.store(NEVER, PAYLOAD)
    [missing] = b.want(NEVER, wait_s=5.0)
    assert isinstance(missing, Missing)
    assert missing.reason == "no_source"
    assert [client.inspect().counters.get("errors", 0) for client in (a, b)] == [0, 0]

    server.start()
    b.has_landed(NEVER)
    for client in (a, b):
        until(lambda c=client: c.inspect().gauges["directory_connected"] == 1, "the server to be found again")


def test_what_only_the_lost_server_told_of_is_still_fetched(zmq_fleet, server) -> None:
    """The view outlives the directory: a READ needs no one but the holder."""
    (_, a), (_, b) = zmq_fleet.connected("a", "b", directory=[server.endpoint])
    a.store(ENTRY, PAYLOAD)
    a.store(LATER, PAYLOAD)
    b.has_landed(LATER)  # which came after the other one in the log
    server.kill()
    [landed] = b.want(ENTRY)
    assert isinstance(landed, Landed)
    assert landed.source == "remote"
    b.release(landed)


def test_directories_of_both_kinds_may_be_mixed(zmq_fleet, server) -> None:
    port = zmq_fleet.common["ec_port"]
    host = zmq_fleet.node("host")  # hosts the directory at ec_port
    zmq_fleet.client(host)
    mixed = [server.endpoint, f"tcp://127.0.0.1:{port}"]
    a, b = (zmq_fleet.client(zmq_fleet.node(name, directory=mixed)) for name in ("a", "b"))
    for client in (a, b):
        until(lambda c=client: c.inspect().gauges["directory_connected"] == 2, "both directories")
    a.store(ENTRY, PAYLOAD)
    b.has_landed(ENTRY)
    server.kill()
    a.store(LATER, PAYLOAD)
    b.has_landed(LATER)


def test_who_lists_a_server_hosts_no_directory(zmq_fleet, server) -> None:
    (_, a), _ = zmq_fleet.connected("a", "b", directory=[server.endpoint])
    told = a.inspect().node
    assert told["directory"] == server.endpoint
    assert told["address"].startswith("tcp://127.0.0.1:")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", zmq_fleet.common["ec_port"])) != 0


@pytest.mark.parametrize(
    "endpoint", ["valkey://127.0.0.1:6379/x", "redis://me:p%40ss@127.0.0.1:6379", "valkeys://:a:b@127.0.0.1:1/x"]
)
def test_the_address_that_peers_dial_is_the_one_towards_the_server(endpoint: str) -> None:
    assert network.hosts(make_config({"directory": endpoint})) == ("127.0.0.1", "127.0.0.1")


def test_no_password_is_shown(zmq_fleet, server) -> None:
    endpoint = server.endpoint.replace("://", "://default:hunter2@")
    with server.client() as client:
        client.config_set("requirepass", "hunter2")
    a = zmq_fleet.client(zmq_fleet.node("a", directory=[endpoint]))
    until(lambda: a.inspect().gauges["directory_connected"] == 1, "the server")
    assert a.inspect().node["directory"] == endpoint.replace("default:hunter2", "...")
