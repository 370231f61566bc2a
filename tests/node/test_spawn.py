"""Starting a node: the attempt of one client, and what others may do meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from ec_p2p.config import Config, make_config
from ec_p2p.node import spawn
from ec_p2p.node.address import spawn_lock_address
from ec_p2p.node.spawn import Spawning
from tests.node.conftest import until


def takes_lock(config: Config) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lock:
        try:
            lock.bind(spawn_lock_address(config))
        except OSError:
            return False
        return True


def test_an_attempt_that_is_given_up_waits_for_nothing_and_lets_others_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports hang: whoever gives it up is a scheduler in the middle of a step."""
    monkeypatch.setattr(spawn, "node_command", lambda config: [sys.executable, "-c", "import time; time.sleep(600)"])
    config = make_config({"node_name": f"spawned-{os.getpid()}"})
    attempt = Spawning.begin(config)
    assert attempt is not None
    launcher: subprocess.Popen[bytes] = attempt._process
    try:
        assert not takes_lock(config)
        attempt.close()
        assert launcher.returncode is None
        assert takes_lock(config)
    finally:
        launcher.kill()
    until(lambda: launcher.returncode is not None, "it to be reaped")
