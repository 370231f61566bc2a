"""Processes that have a connection for each node of a fleet are not held to a soft limit of 1024 files."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ec_p2p.config import make_config
from ec_p2p.node.spawn import node_command

NODE = make_config(
    {
        "node_name": "many-files",
        "transport": "zmq",
        "ec_port": 1,
        "embedded_directory": False,
        "spawn_node": False,
        "max_local_cpu_size": "64MiB",
        "slab_size": "64MiB",
        "metrics_port": -1,
    }
)
COMMANDS = {
    "directory": [
        sys.executable,
        "-m",
        "ec_p2p.cli",
        "directory",
        "--bind",
        "tcp://127.0.0.1:0",
        "--metrics-port",
        "-1",
    ],
    "node": node_command(NODE),
}


@pytest.fixture
def low_limit() -> Iterator[int]:
    """A soft limit below the hard one, as it usually is. The hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard - 1), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_it_allows_itself_as_many_files_as_it_may_have(low_limit: int, command: list[str]) -> None:
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30.0
        while resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] < low_limit and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None
    finally:
        process.kill()
        _, said = process.communicate()
    assert "Traceback" not in said
