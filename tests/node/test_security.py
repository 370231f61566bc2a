"""A fleet with keys: it works, and who has none of its keys gets nothing out of any port, and nothing in."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import msgpack
import pytest
import zmq

from ec_p2p.config import make_config
from ec_p2p.control.codec import decode, encode
from ec_p2p.control.messages import PROTOCOL_VERSION, Card, CardRequest, FromPeer, SnapshotRequest, StageRequest
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import Landed, Missing
from ec_p2p.node.network import say_who_gets_in
from ec_p2p.node.spawn import node_command
from ec_p2p.transport import nixl_available
from ec_p2p.wire.curve import key_text
from tests.control.keys import Pair, dial, say_while_open, strangers
from tests.field.junk import CURVE
from tests.node.conftest import PATIENCE_S, Client, Fleet, free_ports, until

SERVER, ALICE, BOB = Pair(), Pair(), Pair()
LARGE = 3 << 20
"""Bytes of an entry that the ZMQ transport reads in several full chunks."""


def identity(number):
    return number.to_bytes(32, "big")


def payload(number, nbytes=LARGE):
    return number.to_bytes(2, "big") * (nbytes // 2)


class Town:
    """A directory's process, and nodes that are told of it."""

    def __init__(self, fleet, security):
        self.port = free_ports()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "ec_p2p.cli", "directory", "--bind", self.endpoint]
        self._command += ["--node-timeout", "20", "--security"]
        self.process = subprocess.Popen([*self._command, security])
        fleet.common |= {"directory": [self.endpoint], "require_encryption": True, "node_timeout_s": 4.0}

    def restart(self, security):
        self.close()
        self.process = subprocess.Popen([*self._command, security])

    def close(self):
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture
def town(zmq_fleet, tmp_path):
    """A fleet of two nodes with one pair of keys for all."""
    security = SERVER.file(tmp_path / "fleet.key")
    zmq_fleet.common["security"] = security
    with contextlib.closing(Town(zmq_fleet, security)) as town:
        (_, town.holder), (_, town.reader) = zmq_fleet.connected("a", "b")
        yield town


def fetched(town, number):
    """Whether an entry that one node has just got is read by the other."""
    town.holder.store(identity(number), payload(number))
    town.reader.has_landed(identity(number))
    [answer] = town.reader.want(identity(number))
    whole = isinstance(answer, Landed) and town.reader.bytes_of(answer) == payload(number)
    town.reader.release(answer)
    return whole


@pytest.mark.parametrize("pairs", ["one", "each"])
def test_a_fleet_with_keys_shares(fleet, tmp_path, pairs):
    if pairs == "one":
        of_directory = of_a = of_b = SERVER.file(tmp_path / "fleet.key")
    else:
        of_directory = SERVER.file(tmp_path / "directory.key", ALICE, BOB)
        of_a = ALICE.file(tmp_path / "a.key", BOB, directory=SERVER)
        of_b = BOB.file(tmp_path / "b.key", ALICE, directory=SERVER)
    with contextlib.closing(Town(fleet, of_directory)) as town:
        (_, town.holder), (_, town.reader) = fleet.connected("a", "b", a={"security": of_a}, b={"security": of_b})
        assert fetched(town, 1)
        seen = town.reader.inspect()
        assert seen.counters["keys_refused"] == 0


def card_of(context, address):
    """A node's card, as another member gets it."""
    with dial(context, zmq.DEALER, address, SERVER.security()) as member:
        assert member.poll(1000 * PATIENCE_S, zmq.POLLOUT)
        member.send(encode(CardRequest(PROTOCOL_VERSION, b"r" * 16)))
        assert member.poll(1000 * PATIENCE_S)
        card = decode(member.recv(), FromPeer)
    assert isinstance(card, Card)
    return card


@pytest.fixture
def doors(town):
    """Every port that the fleet has: what a member would say there to get something, and by which socket."""
    context = zmq.Context()
    doors = {
        "directory": (zmq.DEALER, town.endpoint, [encode(SnapshotRequest(PROTOCOL_VERSION, 1))]),
        "published": (zmq.SUB, f"tcp://127.0.0.1:{town.port + 1}", []),
    }
    for name, client in (("holder", town.holder), ("reader", town.reader)):
        address = client.inspect().node["address"]
        card = card_of(context, address)
        _, _, holder, endpoint, _, key = msgpack.unpackb(card.blob[16:])
        assert key == SERVER.public
        asked = [
            encode(CardRequest(PROTOCOL_VERSION, b"r" * 16)),
            encode(StageRequest(PROTOCOL_VERSION, [identity(1)])),
        ]
        doors[f"{name}'s card"] = (zmq.DEALER, address, asked)
        doors[f"{name}'s bytes"] = (zmq.DEALER, endpoint, [msgpack.packb([1, holder, 1, 0, 4096])])
    yield doors
    context.term()


def port_of(endpoint):
    return int(endpoint.rpartition(":")[2])


def test_a_member_gets_an_answer_at_every_door(doors):
    """Else the next tests would prove nothing."""
    with zmq.Context() as context:
        for kind, endpoint, questions in doors.values():
            with dial(context, kind, endpoint, SERVER.security()) as member:
                for question in questions:
                    member.send(question)
                assert member.poll(1000 * PATIENCE_S), endpoint


def test_strangers_get_nothing_at_any_door(town, doors):
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        outside = []
        for number in range(1, 4):
            for security, server_key in strangers(SERVER, SERVER).values():
                for kind, endpoint, questions in doors.values():
                    stranger = stack.enter_context(dial(context, kind, endpoint, security, server_key, immediate=0))
                    say_while_open(stranger, questions)
                    outside.append(stranger)
            assert fetched(town, number)
        for client in (town.holder, town.reader):
            until(lambda c=client: c.inspect().counters["keys_refused"], "the strangers to be refused")
        assert not any(stranger.poll(0) for stranger in outside)
    for client in (town.holder, town.reader):
        counters = client.inspect().counters
        assert not any(name.startswith("bad_frames") for name in counters), "nothing of it got as far as that"


def open_files(client):
    return len(os.listdir(f"/proc/{client.inspect().node['pid']}/fd"))


def test_half_open_handshakes_by_the_hundred_hold_nobody_up_and_are_forgotten(town, doors):
    clients = [town.holder, town.reader]
    # Each has read from the other: no connection of theirs is still to come.
    assert fetched(town, 8)
    town.reader.store(identity(7), payload(7))
    town.holder.has_landed(identity(7))
    before = [open_files(client) for client in clients]
    with contextlib.ExitStack() as stack:
        for _ in range(25):
            for _, endpoint, _ in doors.values():
                for opening in (b"", CURVE[:11], CURVE):
                    raw = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(endpoint))))
                    raw.sendall(opening)
        for number in range(1, 4):
            assert fetched(town, number)
        until(
            lambda: all(open_files(client) <= had for client, had in zip(clients, before, strict=True)),
            "the strangers to be hung up on",
        )
    assert fetched(town, 9)


def test_junk_at_every_door_is_hung_up_on(town, doors):
    junk = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 3_000, CURVE + b"\xff" * 3_000, os.urandom(3_000)]
    for _, endpoint, _ in doors.values():
        for opening in junk:
            with socket.create_connection(("127.0.0.1", port_of(endpoint))) as raw:
                raw.settimeout(PATIENCE_S)
                with contextlib.suppress(ConnectionError):
                    raw.sendall(opening)
                    while raw.recv(4096):
                        pass
    assert fetched(town, 1)


@pytest.mark.parametrize("keys", ["none", "others", "not allowed"])
def test_who_has_not_the_keys_shares_with_nobody(town, tmp_path, keys):
    """A node that is sent to the directory of a fleet that is not its own."""
    stranger = Fleet("zmq")
    stranger.common["directory"] = [town.endpoint]
    if keys != "none":
        directory = SERVER if keys == "not allowed" else None
        stranger.common["security"] = ALICE.file(tmp_path / "other.key", directory=directory)
    with contextlib.closing(stranger):
        client = stranger.client(stranger.node("c"))
        client.store(identity(7), payload(7))
        assert fetched(town, 1)
        seen = client.inspect()
        assert (seen.gauges["directory_connected"], seen.gauges["peers_ready"], seen.peers) == (0, 0, [])
        [answer] = client.want(identity(1))
        assert isinstance(answer, Missing)
        [answer] = town.reader.want(identity(7))
        assert isinstance(answer, Missing)
        assert len(town.reader.inspect().peers) == 1


def test_two_fleets_on_one_machine_do_not_mix(town, tmp_path):
    others = Fleet("zmq")
    security = others.common["security"] = ALICE.file(tmp_path / "others.key")
    with contextlib.closing(others), contextlib.closing(Town(others, security)) as other:
        (_, other.holder), (_, other.reader) = others.connected("a", "b")
        assert fetched(town, 1)
        assert fetched(other, 2)
        for fleet, foreign in ((town, 2), (other, 1)):
            [answer] = fleet.reader.want(identity(foreign))
            assert isinstance(answer, Missing)
            until(lambda reader=fleet.reader: reader.inspect().gauges["peers_ready"] == 1, "its own peer, and no other")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["127.0.0.1", "localhost", "127.0.1.1", "::1"], None),
        (["127.0.0.1", "0.0.0.0", "10.0.0.9", "0.0.0.0"], "at 0.0.0.0, 10.0.0.9 can read entries"),
        (["directory.example"], "at directory.example can read entries"),
    ],
)
def test_who_is_open_to_others_says_so_once(caplog, hosts, said):
    say_who_gets_in(None, hosts)
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])
    caplog.clear()
    caplog.set_level("INFO")
    say_who_gets_in(SERVER.security(ALICE), hosts)
    [record] = caplog.records
    assert (key_text(SERVER.public) in record.getMessage(), record.levelname) == (True, "INFO")


@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_a_directory_says_at_its_start_whether_it_is_open_to_others(host, warnings):
    command = [sys.executable, "-m", "ec_p2p.cli", "directory", "--bind", f"tcp://{host}:0", "--metrics-port", "-1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said = ""
        while "directory listens" not in said:
            said += process.stderr.readline()
        process.terminate()
    assert said.count("no `security` is set") == warnings


def test_a_node_says_at_its_start_whether_it_is_open_to_others_and_what_is_not_encrypted(tmp_path):
    def said(**settings):
        name = f"says-{os.getpid()}"
        small = {"max_local_cpu_size": "1MiB", "slab_size": "1MiB"}
        config = make_config({"node_name": name, "ec_port": free_ports(), **small, **settings})
        with subprocess.Popen(node_command(config), stderr=subprocess.PIPE, text=True) as process:
            text = ""
            while f"node {name}: incarnation" not in text:
                text += (line := process.stderr.readline())
                assert line, text
            process.terminate()
        return text

    keys = SERVER.file(tmp_path / "fleet.key")
    assert "WARNING" not in said(transport="zmq")
    assert said(transport="zmq", bind_host="0.0.0.0").count("no `security` is set") == 1
    assert "WARNING" not in said(transport="zmq", bind_host="0.0.0.0", security=keys, require_encryption=True)
    if nixl_available():
        assert "WARNING what NIXL moves" in said(transport="nixl", security=keys, require_encryption=True)
        assert "INFO what NIXL moves" in said(transport="nixl", security=keys)


def test_a_fleet_goes_from_one_pair_to_another(zmq_fleet, tmp_path):
    """As docs/operations.md says: one process after the other, and every one shares with those before and after it."""
    old, new = ALICE, BOB
    before = old.file(tmp_path / "1", new)
    between = new.file(tmp_path / "2", old, directory=old)
    after = new.file(tmp_path / "3", old)
    with contextlib.closing(Town(zmq_fleet, before)) as town:
        clients = {name: zmq_fleet.client(zmq_fleet.node(name, security=before)) for name in ("a", "b")}

        def restart(name, security):
            clients.pop(name).close()
            [node] = [
                node
                for node in zmq_fleet.nodes
                if node.config.name.endswith(f"-{name}") and node.process.poll() is None
            ]
            node.process.terminate()
            node.process.wait(PATIENCE_S)
            clients[name] = zmq_fleet.client(zmq_fleet.node(name, security=security))

        def shares(number):
            town.holder, town.reader = clients["a"], clients["b"]
            until(lambda: all(client.inspect().gauges["peers_ready"] == 1 for client in clients.values()), "the peers")
            return fetched(town, number)

        assert shares(1)
        restart("b", between)
        assert shares(2)
        restart("a", between)
        assert shares(3)
        clients["a"].store(identity(4), payload(4))
        assert shares(5), "so what was told before it is known, too"
        town.restart(after)
        until(lambda: not clients["b"].inspect().gauges["directory_connected"], "no directory")
        clients["b"].has_landed(identity(4))  # what they knew is enough
        for name in ("a", "b"):
            restart(name, after)
        assert shares(6)


def test_keys_in_the_settings_reach_a_spawned_node_but_no_process_list(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    settings = {"node_name": f"spawned-{os.getpid()}", "transport": "zmq", "ec_port": free_ports(), "grace_s": 0.5}
    small = {"max_local_cpu_size": "32MiB", "slab_size": "16MiB"}
    config = make_config({**settings, **small, "security": SERVER.settings(ALICE)})
    with contextlib.closing(NodeClient(config, "tool", "x")) as starter:
        until(starter.attach, "the node to be started")
        with contextlib.closing(Client(config)) as tool:
            seen = tool.inspect().node
            context = zmq.Context()
            assert msgpack.unpackb(card_of(context, seen["address"]).blob[16:])[-1] == SERVER.public
            context.term()
        for file in ("cmdline", "environ"):
            with open(f"/proc/{seen['pid']}/{file}", "rb") as said:
                assert key_text(SERVER.secret).encode() not in said.read()
    until(lambda: not os.path.exists(f"/proc/{seen['pid']}"), "the node to leave")
