"""The socket file of a node, and the lock beside it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from ec_p2p.config import make_config
from ec_p2p.node import listening
from ec_p2p.node.listening import AlreadyRunning, Listening

from .conftest import PATIENCE_S


@pytest.fixture
def config(tmp_path):
    return make_config({"node_name": f"listening-{os.getpid()}", "node_socket": str(tmp_path / "node")})


def leave_remains(config):
    """What a node that was killed leaves: a file at which nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(config.node_socket)


def reaches(config, listener):
    """Whether it is the one whom a client reaches."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(config.node_socket)
        with contextlib.suppress(BlockingIOError):
            listener.socket.accept()[0].close()
            return True
    return False


def test_what_a_killed_node_left_is_taken_over(config):
    leave_remains(config)
    with contextlib.closing(Listening(config)) as node:
        assert reaches(config, node)
        with pytest.raises(AlreadyRunning):
            Listening(config)
        assert reaches(config, node)
    assert not os.path.exists(config.node_socket)
    with contextlib.closing(Listening(config)) as next_node:
        assert reaches(config, next_node)


def test_of_two_that_find_the_same_remains_one_has_the_name(config, monkeypatch):
    """The first is held up when it has seen that nobody listens there, and before it makes the place free."""
    leave_remains(config)
    looked, go_on = threading.Event(), threading.Event()
    unlink, first = os.unlink, threading.Thread(target=lambda: nodes.append(Listening(config)))
    nodes = []

    def held_up(path):
        if threading.current_thread() is first:
            looked.set()
            assert go_on.wait(PATIENCE_S)
        unlink(path)

    monkeypatch.setattr(listening.os, "unlink", held_up)
    first.start()
    assert looked.wait(PATIENCE_S)
    with pytest.raises(AlreadyRunning):
        Listening(config)
    go_on.set()
    first.join()
    [node] = nodes
    assert reaches(config, node)
    node.close()


def test_a_socket_without_a_lock_is_a_nodes_all_the_same(config):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(config.node_socket)
        other.listen()
        with pytest.raises(AlreadyRunning):
            Listening(config)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(config.node_socket)


def test_a_file_that_is_no_socket_stays(config):
    with open(config.node_socket, "w") as file:
        file.write("notes")
    with pytest.raises(OSError, match=r"cannot listen on '.*node': a file is there that is no socket"):
        Listening(config)
    with open(config.node_socket) as file:
        assert file.read() == "notes"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    config = make_config({"node_socket": str(tmp_path / "nowhere" / "node")})
    with pytest.raises(OSError, match=r"cannot listen on '.*nowhere/node': .*No such file"):
        Listening(config)
