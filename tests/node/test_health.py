"""A node's /metrics and /healthz, over real HTTP."""

from __future__ import annotations

from tests.control.test_exposition import figures, get
from tests.node.conftest import Fleet, free_ports, until


def test_a_node_that_turns_is_healthy_and_says_whether_a_directory_answers(zmq_fleet: Fleet) -> None:
    [(_, client)] = zmq_fleet.connected("a")
    port = int(client.inspect().node["metrics_port"])
    until(lambda: get(port, "/healthz")[2].endswith("directories that answer: 1 of 1\n"), "the directory to answer")
    assert get(port, "/healthz") == (200, "text/plain; charset=utf-8", "ok\ndirectories that answer: 1 of 1\n")
    client.store(b"1" * 32, b"x" * 12_800)
    shown = figures(port)
    assert (shown["ec_p2p_node_entries"], shown["ec_p2p_node_saves_total"]) == (1, 1)
    assert shown["ec_p2p_node_sessions"] == 1


def test_a_node_without_a_directory_is_healthy_too(zmq_fleet: Fleet) -> None:
    node = zmq_fleet.node("a", directory=[f"tcp://127.0.0.1:{free_ports()}"])
    port = int(zmq_fleet.client(node).inspect().node["metrics_port"])
    assert get(port, "/healthz")[::2] == (200, "ok\ndirectories that answer: 0 of 1\n")
