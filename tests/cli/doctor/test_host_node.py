"""The host's node: one that runs, one that is stopped, none."""

from __future__ import annotations

import pytest

from ec_p2p.cli.doctor import host_node
from ec_p2p.cli.doctor.finding import Level
from tests.node.conftest import Fleet


def test_a_node_that_runs_and_one_that_is_stopped(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fleet.node("a")
    fleet.client(node)
    host = host_node.look(node.config)
    assert host.answer is not None
    assert host.answer.node["name"] == node.config.name
    assert host.arena_held < node.config.max_local_cpu_size
    assert host_node.node(node.config, host).level is Level.OK

    node.freeze()
    monkeypatch.setattr(host_node, "_ANSWER_S", 1.0)
    try:
        finding = host_node.node(node.config, host_node.look(node.config))
    finally:
        node.thaw()
    assert finding.level is Level.PROBLEM
    assert "is there, but has not answered" in finding.says


def test_what_an_arena_holds_is_what_was_put_into_it(fleet: Fleet) -> None:
    node = fleet.node("a")
    fleet.client(node).store(b"an entry".ljust(16, b"."), bytes(4 << 20))
    assert host_node.look(node.config).arena_held >= 4 << 20


def test_no_node(fleet: Fleet) -> None:
    config = fleet.config("none")
    host = host_node.look(config)
    assert (host.answer, host.trouble) == (None, "")
    assert host_node.node(config, host).level is Level.NOTE, "spawn_node is off"


def test_a_socket_that_cannot_be_there(fleet: Fleet, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    config = fleet.config("a", node_socket=f"{tmp_path}/file/socket")
    finding = host_node.node(config, host_node.look(config))
    assert finding.level is Level.PROBLEM
    assert "cannot be asked: [Errno 20] Not a directory" in finding.says
