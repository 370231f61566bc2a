"""A node's /metrics and /healthz, over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ec_p2p.node.service import Node
from tests.control.test_exposition import figures, get
from tests.node.conftest import PATIENCE_S, Fleet, free_ports, until


def test_a_node_that_turns_is_healthy_and_says_whether_a_directory_answers(zmq_fleet: Fleet) -> None:
    [(_, client)] = zmq_fleet.connected("a")
    port = int(client.inspect().node["metrics_port"])
    until(lambda: get(port, "/healthz")[2].endswith("directories that answer: 1 of 1\n"), "the directory to answer")
    assert get(port, "/healthz") == (200, "text/plain; charset=utf-8", "ok\ndirectories that answer: 1 of 1\n")
    client.store(b"1" * 32, b"x" * 12_800)
    shown = figures(port)
    assert (shown["ec_p2p_node_entries"], shown["ec_p2p_node_saves_total"]) == (1, 1)
    assert shown["ec_p2p_node_sessions"] == 1
    until(
        lambda: figures(port)["ec_p2p_directory_entries{state=memory}"] == 1, "the directory that it hosts to know it"
    )
    assert figures(port)["ec_p2p_directory_nodes"] == 1


def test_what_reads_from_each_peer_take_is_shown_as_long_as_there_is_the_peer(fleet: Fleet) -> None:
    (_, first), (second, other), (_, reader) = fleet.connected("a", "b", "c", node_timeout_s=4.0)
    port = int(reader.inspect().node["metrics_port"])
    assert not [name for name in figures(port) if name.startswith("ec_p2p_node_peer_")]
    for holder, number, nbytes in ((first, 1, 128), (first, 2, 1 << 20), (other, 3, 1 << 20)):
        holder.store(bytes([number]) * 32, bytes(nbytes))
        reader.has_landed(bytes([number]) * 32)

    def shown() -> set[str]:
        found = {name: value for name, value in figures(port).items() if name.startswith("ec_p2p_node_peer_")}
        assert all(value > 0 for value in found.values()), found
        return set(found)

    one = fleet.nodes[0].config.name
    of_the_first = {f"ec_p2p_node_peer_{what}{{peer={one}}}" for what in ("latency_seconds", "bytes_per_second")}
    assert shown() == of_the_first | {f"ec_p2p_node_peer_bytes_per_second{{peer={second.config.name}}}"}
    assert not [name for name in reader.inspect().gauges if name.startswith("peer_")], "an inspection is one datagram"
    counts = reader.inspect().counters
    assert not [name for name in counts if "peer=" in name], "an inspection is one datagram"
    landed = [value for name, value in figures(port).items() if name.startswith("ec_p2p_node_fetches_total{outcome=la")]
    assert len(landed) == 2
    assert sum(landed) == counts["fetches{outcome=landed}"] == 3
    second.kill()
    until(lambda: shown() == of_the_first, "the figures of the node that died to go")


def test_a_node_without_a_directory_is_healthy_too(zmq_fleet: Fleet) -> None:
    node = zmq_fleet.node("a", directory=[f"tcp://127.0.0.1:{free_ports()}"])
    port = int(zmq_fleet.client(node).inspect().node["metrics_port"])
    assert get(port, "/healthz")[::2] == (200, "ok\ndirectories that answer: 0 of 1\n")
    assert not [name for name in figures(port) if name.startswith("ec_p2p_directory")]


@pytest.fixture
def here(zmq_fleet: Fleet) -> Iterator[Node]:
    """A node in a thread of this process, which can be reached into."""
    node = Node(zmq_fleet.config("here", node_timeout_s=2.5))
    thread = threading.Thread(target=node.run)
    thread.start()
    yield node
    node.stop()
    thread.join()


def test_counts_of_a_peer_that_is_gone_for_long_go_from_the_metrics_and_stay_in_the_sums(
    zmq_fleet: Fleet, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = zmq_fleet.client(here.config)
    port = int(client.inspect().node["metrics_port"])
    here.wiring.counters.add("fetched_bytes", 7.0, peer="gone")
    assert figures(port)["ec_p2p_node_fetched_bytes_total{peer=gone}"] == 7
    monkeypatch.setattr("ec_p2p.node.peer_counts.KEPT_S", 0.0)
    monkeypatch.setattr("ec_p2p.node.peer_counts._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(here.wiring.peer_counts, "_due", 0.0)
    until(lambda: "ec_p2p_node_fetched_bytes_total{peer=gone}" not in figures(port), "it to be forgotten")
    assert client.inspect().counters["fetched_bytes"] == 7


def test_a_node_whose_loop_hangs_is_not_healthy(zmq_fleet: Fleet, here: Node) -> None:
    port = int(zmq_fleet.client(here.config).inspect().node["metrics_port"])
    until(lambda: get(port, "/healthz")[0] == 200, "it to turn")
    goes_on = threading.Event()
    here.wiring.mailbox.post(lambda: goes_on.wait(2 * PATIENCE_S))
    try:
        until(lambda: get(port, "/healthz")[0] == 503, "the hang to be told")
        status, _, body = get(port, "/healthz")
        assert (status, body.startswith("the loop has not turned for ")) == (503, True)
        assert figures(port)["ec_p2p_node_sessions"] == 1, "figures are there all the same"
    finally:
        goes_on.set()
    until(lambda: get(port, "/healthz")[0] == 200, "the loop to turn again")
