"""Junk on every door of a node, and clients that lie: counted, refused, and the next good message works."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys

import msgpack
import pytest
import zmq

from ec_p2p.control.codec import decode, encode
from ec_p2p.control.messages import Card, CardRequest, FromPeer, Refused
from ec_p2p.node.address import attach_address
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import (
    Attach,
    Attached,
    AttachRefused,
    CloseWindow,
    Commit,
    Inspect,
    Inspection,
    Landed,
    NoWindow,
    OpenWindow,
    Release,
)

from .conftest import PATIENCE_S, until

A = b"\x01" * 32
JUNK = [
    b"",
    b"\xc1",
    b"\x00" * 100,
    os.urandom(1000),
    msgpack.packb(["want"]),
    msgpack.packb([[]] * 50),
    b"\x91" * 5000,
]


def works(client):
    client.store(A, b"x" * 128)
    [answer] = client.want(A)
    client.release(answer)
    return isinstance(answer, Landed)


def next_descriptor(node):
    """The number that the next file would get which the node opens."""
    taken = {int(name) for name in os.listdir(f"/proc/{node.process.pid}/fd")}
    return min(set(range(len(taken) + 1)) - taken)


def test_a_node_without_descriptors_lets_nobody_in_until_it_has_some_again(zmq_fleet):
    """And does not turn in circles meanwhile: each attempt is counted, and there is one a tick."""
    node = zmq_fleet.node("a")
    client = zmq_fleet.client(node)
    limit = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (next_descriptor(node), limit[1]))
    newcomer = NodeClient(node.config, "tool", "newcomer")
    try:
        assert not newcomer.attach()
        until(lambda: client.inspect().counters.get("errors", 0) >= 2, "two attempts")
        assert works(client)
        resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, limit)
        assert newcomer.attach(PATIENCE_S)
    finally:
        newcomer.close()


@pytest.fixture
def host(zmq_fleet):
    node = zmq_fleet.node("a")
    return node, zmq_fleet.client(node)


def bad_frames(client, door):
    return client.inspect().counters.get(f"bad_frames{{socket={door}}}", 0)


def test_junk_from_an_attached_client(host):
    _, client = host
    for junk in (*JUNK[1:], b"x" * (1 << 17)):
        client.node._link.sock.send(junk)
    assert works(client)
    assert bad_frames(client, "client") == len(JUNK)


def test_a_client_that_does_not_read_loses_messages_and_harms_nobody(host, zmq_fleet):
    node, client = host
    deaf = zmq_fleet.client(node, instance="deaf")
    for token in range(20_000):
        while not deaf.node.send(Inspect(token)):
            client.sync()  # the node is behind: let it catch up
    assert works(client)
    assert isinstance(deaf.expect(Inspection, lambda m: m.token == 0), Inspection)


@pytest.mark.parametrize("junk", JUNK[1:], ids=range(len(JUNK) - 1))
def test_junk_instead_of_an_attach(host, junk):
    node, client = host
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(attach_address(node.config))
        sock.send(junk)
        assert sock.recv(100) == b""
    assert bad_frames(client, "attach") == 1
    assert works(client)


@pytest.mark.parametrize(
    ("attach", "accepted"),
    [(Attach(99, "tool", "x", 0), "speaks 1"), (Attach(1, "router", "x", 0), "scheduler, worker, lander, tool")],
)
def test_an_attach_that_cannot_be_is_refused_with_the_reason(host, attach, accepted):
    node, _ = host
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(attach_address(node.config))
        sock.send(encode(attach))
        answer = decode(sock.recv(65536), Attached | AttachRefused)
    assert isinstance(answer, AttachRefused)
    assert accepted in answer.reason


def test_junk_on_the_peer_port(host):
    _, client = host
    address = client.inspect().node["address"]
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(address)
    for junk in JUNK:
        peer.send(junk)
    peer.send(encode(CardRequest(1, b"r" * 16)))
    assert peer.poll(1000 * PATIENCE_S)
    assert isinstance(decode(peer.recv(), FromPeer), Card)
    assert bad_frames(client, "peer") == len(JUNK)
    peer.send(encode(CardRequest(2, b"r" * 16)))
    assert peer.poll(1000 * PATIENCE_S)
    assert isinstance(decode(peer.recv(), FromPeer), Refused)
    peer.send(b"x" * (2 << 20))  # over the limit: ends the connection, not the node
    context.destroy()
    host_name, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host_name, int(port)), PATIENCE_S) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert works(client)


def test_commits_that_cannot_be_true_change_nothing(host, zmq_fleet):
    node, client = host
    window = client.window(1 << 20)
    lies = [  # those that no message can even say come last
        Commit(999, A, window.offset, 128, 1, 64, "bfloat16"),
        Commit(window.window, A, window.offset - 4096, 128, 1, 64, "bfloat16"),
        Commit(window.window, A, window.offset + window.nbytes, 128, 1, 64, "bfloat16"),
        Commit(window.window, A, window.offset + 1, 128, 1, 64, "bfloat16"),
        Commit(window.window, A, window.offset, 128, 1, 65, "bfloat16"),
        Commit(window.window, A, window.offset, 128, 1, 64, "float8_nonsense"),
        Commit(window.window, A, 1 << 60, 128, 1, 64, "bfloat16"),
        Commit(window.window, A, window.offset, -128, -1, 64, "bfloat16"),
        Commit(window.window, A[:8], window.offset, 128, 1, 64, "bfloat16"),
    ]
    for lie in lies:
        client.node.send(lie)
    other = zmq_fleet.client(node, instance="other")
    other.node.send(Commit(window.window, A, window.offset, 128, 1, 64, "bfloat16"))  # somebody else's window
    other.node.send(CloseWindow(window.window))
    other.sync()
    client.sync()
    seen = client.inspect()
    assert seen.counters["bad_commits"] == len(lies) - 2 + 1
    assert seen.counters["bad_frames{socket=client}"] == 2
    assert seen.gauges["entries"] == 0
    assert seen.gauges["arena_bytes{kind=reserved}"] == window.nbytes
    assert works(client)


def test_leases_of_others_cannot_be_released(host, zmq_fleet):
    node, client = host
    client.store(A, b"x" * 128)
    [answer] = client.want(A)
    other = zmq_fleet.client(node, instance="other")
    other.node.send(Release(answer.lease, -1))
    other.node.send(Release(answer.lease, 0))
    other.node.dispatched(answer.lease)
    other.sync()
    assert client.inspect().gauges["leases"] == 1


@pytest.mark.parametrize("nbytes", [-1, 0, 17 << 20, 1 << 62])
def test_windows_that_cannot_be_are_refused(host, nbytes):
    _, client = host
    client.node.send(OpenWindow(7, nbytes))
    if nbytes == 0:
        client.window(1)  # a page, like any small one
        return
    assert client.expect(NoWindow).request == 7
    assert works(client)


def test_a_node_on_a_socket_file(zmq_fleet, tmp_path):
    path = tmp_path / "node.sock"
    node = zmq_fleet.node("a", node_socket=str(path))
    client = zmq_fleet.client(node)
    assert works(client)
    assert path.stat().st_mode & 0o007 == 0
    client.close()
    zmq_fleet.clients.clear()
    node.kill()
    assert path.exists()  # killed: the file stays, and is stale
    again = zmq_fleet.node("a", node_socket=str(path))
    assert works(zmq_fleet.client(again))
    again.process.terminate()
    assert again.process.wait(PATIENCE_S) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "node.sock.lock"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "max_local_cpu_sze=1"], "max_local_cpu_size"),
        (["--set", "transport=rdma"], "accepted: auto, nixl, zmq"),
        (["--set", "novalue"], "accepted: KEY=VALUE"),
        (["--settings", "[1]"], "accepted: a JSON object"),
        (["--settings", "{"], "not JSON"),
        (["--set", "ec_ip=host.invalid"], "host.invalid"),
    ],
)
def test_bad_settings_end_in_one_line_that_says_what_is_accepted(arguments, said):
    result = subprocess.run(
        [sys.executable, "-m", "ec_p2p.cli", "node", "--name", "bad", *arguments], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
