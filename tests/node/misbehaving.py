"""A reader, a second holder that behaves, and victims; and what has to be true of the reader whatever they do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Pipe
from pathlib import Path

from ec_p2p.config import as_settings
from ec_p2p.node.messages import CloseWindow, Landed, Missing, WantItem
from ec_p2p.node.spawn import node_command

from .conftest import PATIENCE_S, Fleet, RunningNode, until
from .gated_node import CARD, STAGE, UP
from .wires import HERE, THERE

MIB = 1 << 20
QUARTER = 16 * MIB
"""Of the reader's arena."""
_ROOT = Path(__file__).parents[2]

SHARED_MEMORY, TCP, ZMQ = "shared memory", "TCP", "ZMQ"
LINKS = {
    SHARED_MEMORY: {"transport": "nixl"},
    TCP: {"transport": "nixl", "ucx_tls": "tcp"},
    ZMQ: {"transport": "zmq"},
}
IMPATIENT = {"UCX_TCP_USER_TIMEOUT": "3s", "UCX_TCP_KEEPIDLE": "2s", "UCX_TCP_KEEPINTVL": "1s"}
"""How soon the kernel gives up a connection by which nothing comes back: half a minute is long for a test."""


class GatedNode(RunningNode):
    """See `gated_node`."""

    def __init__(self, config, process, pipe):
        super().__init__(config, process)
        self._pipe = pipe

    def stop_at(self, gate, peer=b""):
        """The next time that its loop comes there with this incarnation, or with any."""
        self._pipe.send((gate, peer.hex()))

    def await_stop(self):
        assert self._pipe.poll(PATIENCE_S), "the reader has not come to the gate"
        self._pipe.recv()

    def go_on(self):
        self._pipe.send(None)


class Victim:
    """A holder that is about to misbehave. `shared` the steady holder has, too; the rest it alone: `alone` in several
    READs, `first` to get to know it by, and `later`."""

    def __init__(self, play, node, client):
        self.node = node
        self.client = client
        self.incarnation = client.node.incarnation
        self.alone = [os.urandom(32) for _ in range(6)]
        self.shared, self.first, self.later = (os.urandom(32) for _ in range(3))
        for files, identity in enumerate((*self.alone, self.shared, self.later, self.first), start=1):
            client.store(identity, payload_of(identity))
            if node.config.local_disk:
                client.has_written(files)  # its queue has no room for all of them
        play.steady.store(self.shared, payload_of(self.shared))

    @property
    def wanted(self):
        return [*self.alone, self.shared]

    def leave_on_disk_only(self):
        """What it has on disk leaves its arena."""
        empty_the_arena(self.client)


def empty_the_arena(client):
    """Have every entry evicted, for the largest that there can be to have room in each slab, and nothing kept."""
    attached = client.node.attached
    slabs = attached.arena_bytes // attached.slab_bytes
    windows = [client.window(attached.largest_entry) for _ in range(slabs)]
    gauges = client.inspect().gauges
    assert gauges["entries"] == gauges["arena_bytes{kind=used}"] == 0
    for window in windows:
        client.node.send(CloseWindow(window.window))
    client.sync()
    assert client.inspect().gauges["arena_bytes{kind=reserved}"] == 0


def payload_of(identity):
    """Such that two of them are in flight from one holder, each in a READ of its own, and the rest waits."""
    return identity * (3 * MIB // len(identity))


class Play(Fleet):
    """On one host, or over wires: the reader and the steady holder are HERE then, the victims THERE."""

    def __init__(self, link, wires=None, environment=None):
        super().__init__("")
        self.link = link
        self._wires = wires
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self.common |= LINKS[link]
        self.common |= {
            "max_local_cpu_size": f"{4 * QUARTER}B",
            "slab_size": f"{2 * QUARTER}B",
            "read_timeout_s": 2.0,
            "node_timeout_s": 6.0,
        }
        if wires is not None:
            self.common["ec_ip"] = wires.directory
            self._environment |= {"UCX_NET_DEVICES": "data", **(environment or {})}
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self.steady = self.client(self.start("steady"))  # first, for it hosts the directory
            self.reader_node = self.start("reader", gated=True)
            self.reader = self.client(self.reader_node)
            until(lambda: self.gauge("peers_ready") == 1, "the steady holder")
            stack.pop_all()

    def start(self, name, host=HERE, gated=False, **settings):
        prefix = []
        if self._wires is not None:
            # Abstract names belong to a network namespace, and clients are in none of them.
            settings |= {"node_socket": f"{self._folder}/{name}", "advertise_host": self._wires.addresses[host]}
            prefix = self._wires.on(host)
        config = self.config(name, **settings)
        if gated:
            ours, theirs = Pipe()
            self._stack.callback(ours.close)
            with theirs:
                node = GatedNode(config, self._spawn([*prefix, *gated_command(theirs)], theirs.fileno()), ours)
            ours.send(as_settings(config))
        else:
            node = RunningNode(config, self._spawn([*prefix, *node_command(config)]))
        self.nodes.append(node)
        return node

    def _spawn(self, command, *descriptors):
        return subprocess.Popen(command, env=self._environment, pass_fds=descriptors, cwd=_ROOT)

    @contextlib.contextmanager
    def victim(self, gate):
        """Gives a victim with which the reader has come to `gate`, wanting all that is `wanted`; and that want."""
        name = f"victim{len(self.nodes)}"
        met_before = gate not in (UP, CARD)
        if not met_before:
            self.reader_node.stop_at(gate)
        on_disk = {"local_disk": f"{self._folder}/{name}-disk"} if gate == STAGE else {}
        node = self.start(name, THERE, **on_disk)
        try:
            victim = Victim(self, node, self.client(node))
            if on_disk:
                victim.leave_on_disk_only()
            if met_before:
                self.has_landed(victim.first)
                self.reader_node.stop_at(gate, victim.incarnation)
            want = self.want(victim.wanted)
            self.reader_node.await_stop()
            yield victim, want
        finally:
            node.kill()

    def gauge(self, name):
        return self.reader.inspect().gauges[name]

    # -------------------------------------------------------- wants

    def want(self, identities, wait_s=20.0):
        """Ask the reader for entries, in one want; `what_landed` waits for what becomes of it."""
        items = [WantItem(identity, 0) for identity in identities]
        return self.reader.node.want(items, readers=0, wait_s=wait_s, expect_s=1.0)

    def what_landed(self, want, identities):
        """Those of the want's items that have landed, each with the bytes that it should have. Every item is answered,
        and once."""
        landed = []
        for index, identity in enumerate(identities):
            answer = self.reader.expect((Landed, Missing), lambda m, i=index: (m.want, m.index) == (want, i))
            if isinstance(answer, Landed):
                assert self.reader.bytes_of(answer) == payload_of(identity)
                self.reader.release(answer)
                landed.append(identity)
        self.reader.sync()
        again = [heard for heard in self.reader.heard if isinstance(heard, Landed | Missing) and heard.want == want]
        assert again == [], "an item was answered twice"
        return landed

    def reader_is_awake_until_answered(self, want):
        """Were its loop to stand still, the directory would not hear of it, and nobody would know it."""
        name = self.reader_node.config.name

        def answered():
            assert name in self.steady.inspect().peers
            self.reader.heard += self.reader.node.poll(0.05)
            return any(isinstance(heard, Landed | Missing) and heard.want == want for heard in self.reader.heard)

        until(answered, "the want to be answered")
        self.reader.heard.clear()

    def has_landed(self, identity):
        """It can be had, soon or late."""
        until(lambda: self.what_landed(self.want([identity], wait_s=5.0), [identity]), f"{identity.hex()[:8]} to land")

    # -------------------------------------------------------- what has to be true

    def accounts_for_its_memory(self):
        """While nothing is in flight, what is reserved is what is in quarantine, and that has a bound."""
        until(lambda: self.gauge("fetches_in_flight") == 0, "the end of every fetch")
        gauges = self.reader.inspect().gauges
        assert gauges["arena_bytes{kind=reserved}"] == gauges["quarantined_bytes"] <= QUARTER
        assert gauges["arena_bytes{kind=used}"] + gauges["quarantined_bytes"] <= gauges["arena_bytes{kind=capacity}"]
        return gauges["quarantined_bytes"]

    def is_whole(self):
        """Nothing is held."""
        until(lambda: self.gauge("quarantined_bytes") == 0, "quarantined memory to come back")
        until(lambda: self.gauge("leases") == 0, "every lease to end")
        assert self.accounts_for_its_memory() == 0
        empty_the_arena(self.reader)

    def close(self):
        for node in self.nodes:
            if isinstance(node, GatedNode) and node.process.poll() is None:
                with contextlib.suppress(OSError):
                    node.go_on()  # should a test have failed while it stood at a gate
        try:
            super().close()
        finally:
            self._stack.close()


@contextlib.contextmanager
def kept_open(*args):
    """Gives a function that opens a play over a link at first, and then gives it again: cases of a link share it."""
    with contextlib.ExitStack() as stack:
        opened = {}

        def over(link):
            if link not in opened:
                opened[link] = Play(link, *args)
                stack.callback(opened[link].close)
            return opened[link]

        yield over


def gated_command(pipe):
    return [sys.executable, "-m", "tests.node.gated_node", str(pipe.fileno())]
