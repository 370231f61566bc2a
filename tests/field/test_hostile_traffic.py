"""Junk to every port of a running fleet, while it works: the work gets done, the junk is counted and forgotten.

The ports are those that the processes listen on, whatever they are for: one that is added later is attacked, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
import zmq

from ec_p2p.control.codec import MAX_FRAME
from ec_p2p.control.sockets import open_socket
from ec_p2p.node.address import attach_address
from ec_p2p.node.messages import CloseWindow, Landed
from tests.field.junk import GREETING, HTTP_REQUEST, JUNK, OPENINGS
from tests.field.test_hostile_bytes import FRAMES
from tests.node.conftest import PATIENCE_S, Fleet, free_ports, until

ROUNDS = 2
FOREIGN = [frame for decoder in FRAMES.values() for frame in decoder.valid]
"""A message of every kind, each to sockets that it is not for, and with numbers that are true of nobody."""


def ports_of(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            mine.add(os.readlink(fd))
    tables = (Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]


class Mob:
    """Attacks the ports in turn, in a thread, until it is stopped; keeps the last connections open as long."""

    def __init__(self, ports: list[int], sockets: list[str]) -> None:
        self.rounds = 0
        self._ports = ports
        self._sockets = sockets
        self._held: list[socket.socket] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for held in self._held:
            held.close()

    def _run(self) -> None:
        with zmq.Context() as context:
            while not self._stopping.is_set():
                for port in self._ports:
                    self._attack_tcp(port)
                    self._attack_zmq(context, port)
                for address in self._sockets:
                    self._attack_unix(address)
                self.rounds += 1

    def _hold(self, connection: socket.socket) -> None:
        self._held.append(connection)
        while len(self._held) > 200:
            self._held.pop(0).close()

    def _attack_tcp(self, port: int) -> None:
        for opening in OPENINGS:
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 10)
                self._hold(connection)
                connection.sendall(opening)

    def _attack_zmq(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        endpoint = f"tcp://127.0.0.1:{port}"
        for kind in (zmq.DEALER, zmq.REQ, zmq.SUB, zmq.PUSH, zmq.PUB, zmq.ROUTER):
            with open_socket(context, kind, endpoint, linger_ms=50) as stranger:
                stranger.connect(endpoint)
                if kind == zmq.SUB:
                    for length in (0, 1, 255, 300):
                        stranger.subscribe(b"s" * length)
                    stranger.poll(20)
                elif kind == zmq.DEALER and stranger.poll(200, zmq.POLLOUT):
                    for frame in (*JUNK, *FOREIGN):
                        stranger.send(frame)
                        stranger.send_multipart([frame, frame])
                    stranger.send(b"x" * (2 * MAX_FRAME))
                elif stranger.poll(20, zmq.POLLOUT) and kind != zmq.ROUTER:
                    stranger.send(JUNK[-1])

    def _attack_unix(self, address: str) -> None:
        for message in (*JUNK, *FOREIGN, b"x" * 100_000, None):
            with suppress(OSError):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._hold(connection)
                connection.connect(address)
                if message is not None:
                    connection.send(message)


class Town:
    """The process of a directory, two nodes that share through it, and a client of each."""

    def __init__(self, fleet: Fleet) -> None:
        port = free_ports()
        endpoint = f"tcp://127.0.0.1:{port}"
        self.metrics_ports = [free_ports()]
        command = [sys.executable, "-m", "ec_p2p.cli", "directory", "--bind", endpoint]
        self.directory = subprocess.Popen([*command, "--metrics-port", str(self.metrics_ports[0])])
        try:
            fleet.common |= {"directory": [endpoint], "node_timeout_s": 4.0, "read_timeout_s": 20.0}
            (a, self.holder), (b, self.reader) = fleet.connected("a", "b", metrics_port=0)
        except BaseException:
            self.close()
            raise
        self.metrics_ports += [int(client.inspect().node["metrics_port"]) for client in (self.holder, self.reader)]
        self.pids = [self.directory.pid, a.process.pid, b.process.pid]
        self.doors = [attach_address(node.config) for node in (a, b)]
        self.ports = {pid: ports_of(pid) for pid in self.pids}
        self._number = 0

    def close(self) -> None:
        self.directory.terminate()
        assert self.directory.wait(PATIENCE_S) == 0

    def work(self) -> None:
        """One entry is stored, found, fetched, read and released."""
        self._number += 1
        identity, payload = self._number.to_bytes(32, "big"), self._number.to_bytes(2, "big") * (1 << 19)
        window = self.holder.window(len(payload))
        self.holder.store(identity, payload, window=window)
        self.holder.node.send(CloseWindow(window.window))
        self.reader.has_landed(identity)
        [answer] = self.reader.want(identity)
        assert isinstance(answer, Landed)
        assert self.reader.bytes_of(answer) == payload
        self.reader.release(answer)

    def held(self, what: str) -> list[int]:
        """How many descriptors ('fd') or threads ('task') each process has."""
        return [len(os.listdir(f"/proc/{pid}/{what}")) for pid in self.pids]

    def shed(self, what: str, before: list[int]) -> bool:
        return all(count <= had for count, had in zip(self.held(what), before, strict=True))

    def figures(self) -> dict[str, float]:
        """Of all three, by process and name."""
        figures = {}
        for pid, port in zip(self.pids, self.metrics_ports, strict=True):
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
                lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
            figures |= {f"{pid} {name}": float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
        return figures

    def bad_frames(self) -> list[float]:
        """By every door that has a count of its own: the directory's, and three of each node."""
        figures = self.figures()
        named = [f"{self.pids[0]} ec_p2p_directory_bad_frames_total"]
        for pid in self.pids[1:]:
            named += [
                f'{pid} ec_p2p_node_bad_frames_total{{socket="{door}"}}' for door in ("peer", "transport", "attach")
            ]
        return [figures.get(name, 0.0) for name in named]


@pytest.fixture
def town() -> Iterator[Town]:
    with contextlib.closing(Fleet("zmq")) as fleet, contextlib.closing(Town(fleet)) as town:
        yield town


def test_work_goes_on_under_junk_at_every_port(town: Town) -> None:
    town.work()
    files, threads = town.held("fd"), town.held("task")
    assert [len(ports) for ports in town.ports.values()] == [3, 3, 3], "one has been added: what is it for?"
    mob = Mob([port for ports in town.ports.values() for port in ports], town.doors)
    try:
        deadline = time.monotonic() + 120
        # A stranger waits for nobody: while the town is slow its junk may not get in.
        while mob.rounds < ROUNDS or not all(town.bad_frames()):
            assert time.monotonic() < deadline, town.bad_frames()
            town.work()
    finally:
        mob.stop()
    town.work()
    for client in (town.holder, town.reader):
        assert client.inspect().counters.get("errors", 0) == 0
    until(lambda: town.shed("fd", files), "the strangers' connections to be closed")
    until(lambda: town.shed("task", threads), "the strangers' threads to end")
    directory = f"{town.directory.pid} ec_p2p_directory_nodes"
    until(lambda: town.figures()[directory] == 2, "the nodes that are none to be forgotten")
    town.work()


def test_clients_of_http_leave_nothing_behind(town: Town) -> None:
    """Their requests could be ZMTP 1.0: a name, the same for all of them, and a few hundred messages."""
    town.work()
    files = town.held("fd")
    for port in (port for ports in town.ports.values() for port in ports):
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                stranger.sendall(HTTP_REQUEST)
        town.work()
    until(lambda: town.shed("fd", files), "the strangers' connections to be closed")
    town.work()


def test_connections_that_say_nothing_are_closed_by_every_port(town: Town) -> None:
    """By the hundred, and although who holds them goes on to."""
    town.work()
    files = town.held("fd")
    with contextlib.ExitStack() as strangers:
        for port in (port for ports in town.ports.values() for port in ports):
            for opening in (b"", b"G", GREETING):
                for _ in range(30):
                    raw = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
                    raw.sendall(opening)
        for address in town.doors:
            for _ in range(90):
                raw = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                raw.connect(address)
        town.work()
        until(lambda: town.shed("fd", files), "the silent to be hung up on")
    town.work()
