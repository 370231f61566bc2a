"""Nodes over the interconnect that is configured, and those that cannot have it."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from ec_p2p.config import make_config
from ec_p2p.node.messages import Landed, Missing
from ec_p2p.node.spawn import node_command
from ec_p2p.transport import nixl_available
from tests.transport.ends import stop_process

from .conftest import PATIENCE_S, Fleet, free_ports, until

A, B = (bytes([number]) * 32 for number in (1, 2))
MIB = 1 << 20


def needs_nixl(test):
    skipped = pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
    return pytest.mark.nixl(skipped(test))


@pytest.fixture
def nixl_fleet(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    fleet = Fleet("nixl")
    yield fleet
    fleet.close()


def fetched(client, outcome):
    """How often this outcome of a READ was counted."""
    return client.inspect().counters.get(f"fetches{{outcome={outcome}}}", 0)


@needs_nixl
@pytest.mark.parametrize(("settings", "without_help"), [({}, True), ({"ucx_tls": "tcp"}, False)])
def test_a_node_fetches_over_what_is_configured(nixl_fleet, settings, without_help):
    """Through shared memory a holder that is frozen is read all the same; over TCP it would have to answer."""
    patient = {"node_timeout_s": 60.0, "read_timeout_s": 4.0, "nixl_params": {"num_workers": 2}}
    (frozen, holder), (_, reader) = nixl_fleet.connected("a", "b", **patient, **settings)
    payloads = {identity: os.urandom(MIB) for identity in (A, B)}
    for identity, payload in payloads.items():
        holder.store(identity, payload)
    until(lambda: isinstance(reader.want(A, expect_s=5.0)[0], Landed), "the first entry to land")
    [answer] = reader.want(A)
    assert reader.bytes_of(answer) == payloads[A]
    assert fetched(reader, "landed") == 1
    late_before = fetched(reader, "late")
    # Known, but for its rows it would be fetched: what would tell of it is about to be frozen, too.
    until(lambda: reader.want(B, rows=1)[0].reason == "rows", "the other entry to be told of")
    stop_process(frozen.process.pid)
    [answer] = reader.want(B)
    if without_help:
        assert reader.bytes_of(answer) == payloads[B]
    else:
        assert isinstance(answer, Missing)
        assert fetched(reader, "late") == late_before + 1


@needs_nixl
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"nixl_backend": "NO_SUCH"},
            "nixl_backend='NO_SUCH': the installed NIXL has no plugin of this name; accepted: ",
        ),
        ({"nixl_params": {"num_workers": "many"}}, "cannot make a NIXL agent with backend UCX: "),
        ({"ucx_tls": "pigeon"}, "UCX_TLS='pigeon' in this process"),
    ],
)
def test_a_node_that_cannot_have_what_is_configured_says_why_and_ends(settings, said):
    config = make_config({"node_name": f"bad-{os.getpid()}", "ec_port": free_ports(), "transport": "nixl", **settings})
    done = subprocess.run(node_command(config), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ec-p2p node: cannot start: ")
    assert said in last


def test_a_node_whose_port_is_taken_says_which_and_ends():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"node_name": f"bad-{os.getpid()}", "ec_port": free_ports(), "transport": "zmq", "peer_port": port}
        done = subprocess.run(node_command(make_config(settings)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"peer_port={port} cannot be bound at 127.0.0.1 (Address already in use" in last
    assert last.endswith("; accepted: a free port, or 0 for any")


def test_what_means_nothing_to_zmq_is_told_and_does_no_harm(zmq_fleet, tmp_path):
    config = zmq_fleet.config("a", nixl_backend="NO_SUCH", ucx_tls="pigeon", nixl_params={"a": 1})
    with (tmp_path / "log").open("w") as log, subprocess.Popen(node_command(config), stderr=log) as process:
        told = "nixl_backend='NO_SUCH', nixl_params={'a': '1'}, ucx_tls='pigeon': no effect, since the transport is zmq"
        until(lambda: f"node {config.name}: incarnation" in (tmp_path / "log").read_text(), "the node to be there")
        assert (tmp_path / "log").read_text().count(told) == 1
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
