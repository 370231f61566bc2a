"""Ports that a node would bind: free ones, taken ones, and those that the node which runs has itself."""

from __future__ import annotations

import socket

import pytest
from processes import free_port

from ec_p2p.cli.doctor import ports
from ec_p2p.cli.doctor.finding import Finding, Level
from ec_p2p.cli.doctor.host_node import HostNode, look
from ec_p2p.config import Config
from ec_p2p.control.exposition import Exposition
from tests.node.conftest import Fleet


def found(config: Config) -> dict[str, Finding]:
    host = look(config)
    bound = ports.bind(config, host)
    findings = [ports.peer_port(config, host, bound), ports.metrics_port(config, host, bound)]
    return {finding.thing: finding for finding in findings}


def levels(config: Config) -> list[Level]:
    return [finding.level for finding in found(config).values()]


def test_ports_that_are_free_stay_free(fleet: Fleet) -> None:
    port, another = free_port(), free_port()
    config = fleet.config("a", peer_port=port, metrics_port=another)
    for _ in range(2):
        assert levels(config) == [Level.OK, Level.OK]
    for one in (port, another):
        socket.create_server(("127.0.0.1", one)).close()
    assert levels(fleet.config("a", metrics_port=-1)) == [Level.OK, Level.OK]


def test_ports_that_others_have(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        peer = found(fleet.config("a", peer_port=port))["peer_port"]
        metrics = found(fleet.config("a", metrics_port=port))["metrics_port"]
    for finding in (peer, metrics):
        assert finding.level is Level.PROBLEM
        assert finding.says.startswith(f"{port} cannot be bound at 127.0.0.1 (Address already in use): the node ")
        assert f":{port}" in finding.mend


def test_ports_that_are_in_each_others_way(fleet: Fleet) -> None:
    port = free_port()
    assert levels(fleet.config("a", peer_port=port, metrics_port=port)) == [Level.OK, Level.PROBLEM]
    publications = fleet.common["ec_port"] + 1
    assert levels(fleet.config("a", metrics_port=publications)) == [Level.OK, Level.PROBLEM]


def test_an_address_that_this_host_has_not(fleet: Fleet) -> None:
    settings = {"metrics_host": "192.0.2.1", "bind_host": "192.0.2.1"}
    config = fleet.config("a", metrics_port=free_port(), peer_port=free_port(), **settings)
    assert levels(config) == [Level.PROBLEM, Level.PROBLEM]


def test_the_node_that_runs_has_its_ports_and_no_others(fleet: Fleet) -> None:
    ours = {"peer_port": free_port(), "metrics_port": free_port()}
    node = fleet.node("a", **ours)
    fleet.client(node)
    assert levels(node.config) == [Level.OK, Level.OK]
    assert levels(fleet.config("another", **ours)) == [Level.PROBLEM, Level.PROBLEM]
    swapped = {"peer_port": ours["metrics_port"], "metrics_port": ours["peer_port"]}
    assert levels(fleet.config("a", **swapped)) == [Level.PROBLEM, Level.PROBLEM]


def test_a_node_that_does_not_answer_may_have_them(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = fleet.config("a", peer_port=other.getsockname()[1])
        silent = HostNode(None, "is there, but has not answered", 0)
        finding = ports.peer_port(config, silent, ports.bind(config, silent))
    assert finding.level is Level.NOTE


def test_what_the_node_itself_says_of_such_a_port(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Exposition("127.0.0.1", port, sources=list, health=lambda: (True, "")):
            pass
    assert f"cannot listen on 127.0.0.1:{port} " in caplog.text
    assert "accepted as port for metrics: a free one, 0 for any, -1 for none" in caplog.text
