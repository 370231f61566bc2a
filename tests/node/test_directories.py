"""Real nodes and real directories as processes that are killed, stopped, and started again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ec_p2p.control.messages import EntryState
from ec_p2p.node import encodings
from ec_p2p.node.messages import CloseWindow, Commit, Landed, Missing, Pending, SaveSkipped, WantItem
from tests.control.harness import Loop

from .conftest import DOUBTS_SOON, PATIENCE_S, Client, free_ports, until
from .here import NodeHere

A, B = (bytes([number]) * 32 for number in (1, 2))
PAYLOAD = os.urandom(128)
BATCH = 200
FOR_EVER_S = 3600.0
AS_SHIPPED = {"heartbeat_s": 1.0, "node_timeout_s": 4.0}
PATIENT = {"heartbeat_s": 1.0, "node_timeout_s": 8.0}
"""Of a fleet that a busy machine must not make doubt those who live."""
OUTLIVES = {"heartbeat_s": 0.2, "node_timeout_s": FOR_EVER_S}
"""Of a node nobody ever takes for dead because of its silence."""


class DirectoryProcess:
    """`ec-p2p directory` on ports of its own, for as long as it is wanted, and again after that."""

    def __init__(self, node_timeout_s: float = 4.0) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_ports()}"
        self._timeout = str(node_timeout_s)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "ec_p2p.cli", "directory", "--bind", self.endpoint]
        command += ["--node-timeout", self._timeout, "--metrics-port", "-1"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        assert re.search("directory listens on", self.process.stderr.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def directories():
    """Makes directories; they end with the test."""
    with contextlib.ExitStack() as made:

        def make(**options) -> DirectoryProcess:
            directory = DirectoryProcess(**options)
            made.callback(directory.kill)
            return directory

        yield make


@pytest.fixture
def loop():
    """For who looks at the directory."""
    loop = Loop()
    yield loop
    loop.close()


def names(start: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(start, start + BATCH)]


def store_all(client, identities):
    size = 4096
    window = client.window(len(identities) * size)
    arena = client.node.arena(client.node.incarnation)
    for index, identity in enumerate(identities):
        offset = window.offset + index * size
        arena.buffer[offset : offset + len(PAYLOAD)] = PAYLOAD
        client.node.send(Commit(window.window, identity, offset, len(PAYLOAD), 1, 64, "bfloat16"))
    client.node.send(CloseWindow(window.window))
    client.sync()


def finds(client, identity):
    """Whether a lookup finds the entry now: nobody waits for one that nobody is known to hold."""
    [answer] = client.want(identity)
    client.release(answer)
    return isinstance(answer, Landed) or f"{identity.hex()[-4:]}: {answer.reason}"


def knows(client, identity):
    """Whether a lookup would find the entry, without its being fetched: it is not of so many rows."""
    [answer] = client.want(identity, rows=2)
    return answer.reason == "rows"


def peers(client):
    return {name.rpartition("-")[2] for name in client.inspect().peers}


def reached(client):
    return client.inspect().gauges["directory_connected"]


# -------------------------------------------------------- directories that die


def test_with_two_directories_no_lookup_fails_while_they_die_and_come_back_empty(zmq_fleet, directories):
    two = [directories(node_timeout_s=8.0), directories(node_timeout_s=8.0)]
    settings = {"directory": [directory.endpoint for directory in two], **PATIENT}
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b", **settings)
    fresh = iter(names(1) + names(BATCH + 1) + names(2 * BATCH + 1))
    for start in (1, BATCH + 1, 2 * BATCH + 1):
        store_all(holder, names(start))
    until(lambda: reached(holder) == reached(reader) == 2, "both directories")
    reader.has_landed(names(2 * BATCH + 1)[-1])  # which was told last

    def look_until(condition, what):
        def looked():
            assert finds(reader, next(fresh)) is True
            time.sleep(0.2)  # there are so many to look for
            return condition()

        until(looked, what)

    for directory in two:
        directory.kill()
        look_until(lambda: reached(reader) == reached(holder) == 1, "the directory to be missed")
        directory.start()
        look_until(lambda: reached(reader) == reached(holder) == 2, "the directory to be found again")
    for directory in two:
        directory.kill()
    for directory in two:
        directory.start()
    look_until(lambda: reached(reader) == reached(holder) == 2, "both to be found again")
    holder.store(A, PAYLOAD)
    reader.has_landed(A)


def test_the_embedded_directory_moves_on_with_each_death_of_its_host(zmq_fleet):
    """Whoever hosts it, in the end it is the last one that lives."""
    living = {}
    for number, name in enumerate("abcd"):
        node = zmq_fleet.node(name, node_timeout_s=4.0)
        living[name] = (node, zmq_fleet.client(node))
        living[name][1].store(names(1)[number], PAYLOAD)
    _, last = living["d"]

    def all_know_each_other():
        return all(
            peers(client) == set(living) - {name} and reached(client) == 1 for name, (_, client) in living.items()
        )

    until(all_know_each_other, "four nodes to know each other")
    for number, doomed in enumerate("abc"):
        before, after = names(BATCH + 10 * number)[:2]
        last.store(before, PAYLOAD)
        readers = [client for name, (_, client) in living.items() if name > doomed and name != "d"]
        for client in readers:
            until(lambda c=client, b=before: knows(c, b), "the entry to be told of")
        living.pop(doomed)[0].kill()
        assert [finds(client, before) for client in readers] == [True] * len(readers)
        until(all_know_each_other, f"those who are left to know each other without {doomed}")
        last.store(after, PAYLOAD)
        for client in readers:
            client.has_landed(after)
    again = zmq_fleet.client(zmq_fleet.node("a", node_timeout_s=4.0))
    again.has_landed(after)


# -------------------------------------------------------- nodes that die, stand still, or leave


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_dead_or_stands_still_disappears_everywhere(zmq_fleet, directories, loop, how):
    two = [directories(), directories()]
    settings = {"directory": [directory.endpoint for directory in two], **AS_SHIPPED}
    (node, doomed), (_, b), (_, c) = zmq_fleet.connected("a", "b", "c", **settings)
    replicas = [loop.replica(directory.endpoint, node_timeout_s=4.0) for directory in two]
    doomed.store(A, PAYLOAD)
    loop.until(lambda: all(replica.lookup(A) for replica in replicas))
    node.process.send_signal(how)
    loop.until(lambda: not any(replica.lookup(A) for replica in replicas), "its adverts to go")
    loop.until(
        lambda: all(len(replica.nodes()) == 2 and replica.fresh for replica in replicas), "the others to be known"
    )
    until(lambda: "a" not in peers(b) | peers(c), "its peers to forget it")
    if how == signal.SIGSTOP:
        node.thaw()
        loop.until(lambda: all(replica.lookup(A) for replica in replicas), "it to be known again, with what it holds")
        b.has_landed(A)


@pytest.mark.parametrize("embedded", [True, False])
def test_a_node_that_leaves_is_gone_everywhere_although_silence_would_be_waited_for(zmq_fleet, directories, embedded):
    """The directory that the leaving node hosts itself tells of that before it ends."""
    settings = dict(OUTLIVES)
    if not embedded:
        settings["directory"] = directories(node_timeout_s=FOR_EVER_S).endpoint
    node = zmq_fleet.node("a", **settings)
    zmq_fleet.client(node)
    readers = [zmq_fleet.client(zmq_fleet.node(name, **settings)) for name in "bc"]
    for client in readers:
        until(lambda c=client: "a" in peers(c) and len(peers(c)) == 2, "the others")
    node.process.terminate()
    assert node.process.wait(PATIENCE_S) == 0
    until(lambda: not any("a" in peers(client) for client in readers), "the goodbye to arrive")


# -------------------------------------------------------- what is being encoded


def _announce_and_hold(config, pipe):
    """An engine's scheduler that is about to encode A, and never does. It says so again before nobody believes it."""
    client = Client(config, "scheduler", "engine")
    client.node.encoding([A])
    client.sync()
    pipe.send(True)
    while not pipe.poll(1.0):
        client.node.encoding([A])


def wait_for_encode(reader, announce=lambda: None):
    """The id of a want of A, which is waited for because somebody encodes it."""
    wants = []

    def pending():
        announce()
        wants.append(reader.node.want([WantItem(A, 0)], readers=0, wait_s=FOR_EVER_S, expect_s=0))
        return isinstance(reader.expect((Pending, Missing), lambda m: m.want == wants[-1]), Pending)

    until(pending, "the encode to be told of")
    return wants[-1]


def answer_to(reader, want):
    return reader.expect((Landed, Missing), lambda m: m.want == want)


@pytest.mark.parametrize("dies", ["engine", "node"])
def test_what_a_dead_encoder_was_about_to_make_is_not_waited_for(zmq_fleet, dies):
    (_, reader), _ = zmq_fleet.connected("host", "b", **DOUBTS_SOON)
    node = zmq_fleet.node("a", **DOUBTS_SOON)
    zmq_fleet.client(node)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    engine = spawn.Process(target=_announce_and_hold, args=(node.config, there))
    engine.start()
    try:
        assert here.recv()
        want = wait_for_encode(reader)
        if dies == "engine":
            engine.kill()
        else:
            node.kill()
        assert answer_to(reader, want).reason == "no_source"
    finally:
        engine.kill()
        engine.join()
        here.close()


def test_an_output_that_another_host_did_not_save_is_not_waited_for(zmq_fleet):
    (node, _), (_, reader) = zmq_fleet.connected("a", "b")
    scheduler = zmq_fleet.client(node, kind="scheduler", instance="engine")
    worker = zmq_fleet.client(node, kind="worker", instance="engine", rank=0)
    scheduler.node.encoding([A])
    want = wait_for_encode(reader)
    worker.node.send(SaveSkipped("no_window", A))
    assert answer_to(reader, want).reason == "no_source"


def test_an_encode_that_never_happens_on_another_host_is_not_waited_for(zmq_fleet, monkeypatch):
    """The instance lives, and simply does not do what it announced; nothing else ends the promise."""
    monkeypatch.setattr(encodings, "ENCODE_LIFETIME_S", 1.0)
    with NodeHere(zmq_fleet.config("a")) as here:
        encoder = zmq_fleet.client(here.config, kind="scheduler", instance="engine")
        reader = zmq_fleet.client(zmq_fleet.node("b"))
        until(lambda: peers(reader), "the peer")
        # Announced until the reader has heard of it in time.
        want = wait_for_encode(reader, lambda: encoder.node.encoding([A]))
        assert answer_to(reader, want).reason == "no_source"


def test_the_fleet_is_told_of_every_state_of_an_entry(zmq_fleet, loop, tmp_path):
    small = {"max_local_cpu_size": "4MiB", "slab_size": "4MiB", "local_disk": str(tmp_path)}
    node = zmq_fleet.node("a", **small)
    client = zmq_fleet.client(node)
    # Who takes the directory for lost wants a snapshot, which is not to be had from one that leaves.
    replica = loop.replica(f"tcp://127.0.0.1:{node.config.ec_port}", node_timeout_s=FOR_EVER_S)

    def is_told(state):
        def told():
            return [advert.state for _, advert in replica.lookup(A)] == ([] if state is None else [state])

        loop.until(told, f"{state!r} to be told")

    payload = os.urandom(1 << 20)
    client.node.encoding([A])
    is_told(EntryState.PENDING)
    client.store(A, payload)
    is_told(EntryState.RESIDENT)
    client.has_written(1)
    for number in range(4):
        client.store(names(1)[number], payload)
    is_told(EntryState.DISK)
    client.has_landed(A)
    is_told(EntryState.RESIDENT)
    node.process.terminate()
    is_told(None)
