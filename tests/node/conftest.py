"""Real nodes in processes of their own, and clients of them in this one."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time

import pytest
from processes import free_port

from ec_p2p.config import make_config
from ec_p2p.node.address import attach_address
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import (
    Commit,
    Inspect,
    Inspection,
    Landed,
    Missing,
    OpenWindow,
    Sync,
    Synced,
    WantItem,
    Window,
)
from ec_p2p.node.spawn import node_command
from ec_p2p.transport import nixl_available
from tests.transport.ends import stop_process

PATIENCE_S = 60.0
"""For what takes a moment, on a machine that is busy with other things."""
DOUBTS_SOON = {"node_timeout_s": 1.5, "read_timeout_s": 1.0}
"""Of nodes that are to find out that another is dead, or stands still. On a busy machine one that lives may be taken
for dead, too, until it is heard again: such a test asks again until it has what it waits for."""
_numbers = itertools.count()
_next_ones: set[int] = set()


def free_ports() -> int:
    """A port that is free together with the next one, and that the system gives to nobody who asks for any."""
    while True:
        port = free_port()
        if not {port, port + 1}.isdisjoint(_next_ones):
            continue  # it may not be listened on yet
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            _next_ones.add(port + 1)
            return port


def until(condition, what="the condition", patience_s=PATIENCE_S):
    """Poll until `condition()` is true; returns its value."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(0.005)
    return value


class Client:
    """A NodeClient with calls that wait for their answers."""

    def __init__(self, config, kind="tool", instance="test", rank=-1):
        self.node = NodeClient(config, kind, instance, rank)
        self.heard = []
        assert self.node.attach(PATIENCE_S)

    def expect(self, kind, match=lambda message: True, patience_s=PATIENCE_S):
        deadline = time.monotonic() + patience_s
        while True:
            for message in self.heard:
                if isinstance(message, kind) and match(message):
                    self.heard.remove(message)
                    return message
            assert time.monotonic() < deadline, f"no {kind} in {patience_s} s; heard {self.heard}"
            self.heard += self.node.poll(0.2)

    def sync(self):
        token = self.node.next_id()
        self.node.send(Sync(token))
        self.expect(Synced, lambda m: m.token == token)

    def inspect(self):
        token = self.node.next_id()
        self.node.send(Inspect(token))
        return self.expect(Inspection, lambda m: m.token == token)

    def window(self, nbytes):
        request = self.node.next_id()
        self.node.send(OpenWindow(request, nbytes))
        return self.expect(Window, lambda m: m.request == request)

    def store(self, identity, payload, dim=64, window=None):
        """Put `payload` (bytes; a multiple of 2*dim) into the arena as bfloat16 rows."""
        rows = len(payload) // (2 * dim)
        window = window or self.window(len(payload))
        arena = self.node.arena(self.node.incarnation)
        arena.buffer[window.offset : window.offset + len(payload)] = payload
        self.node.send(Commit(window.window, identity, window.offset, len(payload), rows, dim, "bfloat16"))
        self.sync()

    def has_written(self, files):
        """Wait until the node has written so many, and nothing waits to be written: it may all be evicted, and there is
        room in the queue. A file stands, and counts, before that."""

        def written():
            seen = self.inspect()
            return seen.counters.get("disk_writes", 0) >= files and not seen.gauges["disk_bytes{kind=queued}"]

        until(written, f"{files} files")

    def want(self, *identities, rows=0, readers=0, wait_s=PATIENCE_S, expect_s=0.0, local_only=False):
        """The answers, in the order of the items."""
        want = self.node.want(
            [WantItem(identity, rows) for identity in identities],
            readers=readers,
            wait_s=wait_s,
            expect_s=expect_s,
            local_only=local_only,
        )
        return [
            self.expect((Landed, Missing), lambda m, i=index: (m.want, m.index) == (want, i))
            for index in range(len(identities))
        ]

    def release(self, *answers):
        for answer in answers:
            if isinstance(answer, Landed):
                self.node.release(answer.lease)

    def has_landed(self, identity):
        """Wait until the entry can be had here, and hold no lease on it."""

        def landed():
            answers = self.want(identity)
            self.release(*answers)
            return isinstance(answers[0], Landed)

        until(landed, f"entry {identity.hex()[:8]} to land")

    def bytes_of(self, landed):
        return self.bytes_of_old(self.node.incarnation, landed)

    def bytes_of_old(self, incarnation, landed):
        arena = self.node.arena(incarnation)
        return bytes(arena.buffer[landed.offset : landed.offset + landed.nbytes])

    def close(self):
        self.node.close()


class RunningNode:
    """A node process and what it was started with."""

    def __init__(self, config, process):
        self.config = config
        self.process = process

    def listens(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(attach_address(self.config)) == 0

    def kill(self):
        self.process.kill()
        self.process.wait()

    def freeze(self):
        """It has stopped when this returns: what is asked of it then it has not heard."""
        stop_process(self.process.pid)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)


class Fleet:
    """Nodes that share a directory, and their clients. Everything ends with `close`."""

    def __init__(self, transport):
        self.tag = f"t{os.getpid()}-{next(_numbers)}"
        self.common = {
            "transport": transport,
            "ec_port": free_ports(),
            "spawn_node": False,
            "max_local_cpu_size": "32MiB",
            "slab_size": "16MiB",
            "heartbeat_s": 0.2,
            # Nobody who lives is doubted, however busy the machine is: see DOUBTS_SOON.
            "node_timeout_s": 20.0,
            "read_timeout_s": 20.0,
        }
        self.nodes = []
        self.clients = []

    def config(self, name, **settings):
        return make_config({**self.common, "node_name": f"{self.tag}-{name}", **settings})

    def node(self, name, **settings):
        config = self.config(name, **settings)
        process = subprocess.Popen(node_command(config))
        node = RunningNode(config, process)
        self.nodes.append(node)
        return node

    def client(self, node, kind="tool", instance="test", rank=-1):
        if isinstance(node, RunningNode):
            until(lambda: node.process.poll() is not None or node.listens(), "the node to listen")
            assert node.process.poll() is None, "the node did not start"
            node = node.config
        client = Client(node, kind, instance, rank)
        self.clients.append(client)
        return client

    def connected(self, *names, **settings):
        """Nodes that all know and have connected to each other, each with a client: [(node, client), ...].

        A setting holds for all; one in a dict named after the node holds for that node."""
        common = {key: value for key, value in settings.items() if key not in names}
        nodes = [self.node(name, **common, **settings.get(name, {})) for name in names]
        clients = [self.client(node) for node in nodes]
        for client in clients:
            until(lambda c=client: c.inspect().gauges["peers_ready"] == len(names) - 1, f"{len(names) - 1} peers")
        return list(zip(nodes, clients, strict=True))

    def close(self):
        for client in self.clients:
            client.close()
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
                node.process.terminate()
        for node in self.nodes:
            try:
                node.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                node.kill()
                raise


@pytest.fixture(params=[pytest.param("nixl", marks=pytest.mark.nixl), "zmq"])
def fleet(request):
    """A fleet over each transport."""
    if request.param == "nixl" and not nixl_available():
        pytest.skip("NIXL is not installed")
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


@pytest.fixture
def zmq_fleet():
    """For what does not depend on the transport: it starts fastest."""
    fleet = Fleet("zmq")
    yield fleet
    fleet.close()
