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


def test_a_child_of_who_starts_the_node_does_not_keep_others_from_starting_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork has every descriptor, and may live as long as the host."""
    monkeypatch.setattr(spawn, "node_command", lambda config: [sys.executable, "-c", "pass"])
    config = make_config({"node_name": f"forked-{os.getpid()}"})
    attempt = Spawning.begin(config)
    assert attempt is not None
    heard, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        os.read(heard, 1)  # until the parent is done
        os._exit(0)
    os.close(heard)
    try:
        assert not takes_lock(config)
        attempt.close()
        until(lambda: takes_lock(config), "the lock to be free, although the child lives")
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.close(told)
        os.waitpid(child, 0)
