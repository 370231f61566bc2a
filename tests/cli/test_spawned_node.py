"""A node that a client starts is what the client says, whatever its environment says by then."""

from __future__ import annotations

import os

import pytest

from ec_p2p.config import make_config
from ec_p2p.node.client import NodeClient
from tests.node.conftest import Client, free_ports, until


def test_a_spawned_node_consults_neither_file_nor_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse to start, had it read any of these."""
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "/is/not/there")
    monkeypatch.setenv("LMCACHE_EC_EXPECT_S", "soon")
    settings = {"node_name": f"exactly-{os.getpid()}", "transport": "zmq", "ec_port": free_ports(), "grace_s": 0.5}
    config = make_config({**settings, "max_local_cpu_size": "32MiB", "slab_size": "16MiB"})
    starter = NodeClient(config, "tool", "x")
    try:
        until(starter.attach, "the node to be started")
        tool = Client(config)
        pid = tool.inspect().node["pid"]
        tool.close()
    finally:
        starter.close()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the node to leave")
