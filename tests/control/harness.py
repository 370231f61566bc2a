"""A loop that drives announcers, replicas and views as a node's loop does, directories of each kind, sample data."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
import zmq
from processes import free_port, until

from ec_p2p.control.directories import announce_to, replicate
from ec_p2p.control.directory import Directory
from ec_p2p.control.interface import Announces, Pollable, Replicates
from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.control.sockets import Context
from ec_p2p.control.view import View
from tests.control.valkey_process import ValkeyProcess

PATIENCE_S = 60.0
NEVER_S = 3600.0
"""A time that does not pass in a test, on the busiest machine: for whoever must not be taken for silent."""


class Served(Protocol):
    """A directory of any kind, as a test has it."""

    endpoint: str

    def stands(self) -> tuple[bytes, int]:
        """Epoch and number of the last change."""

    def entries(self) -> int: ...

    def close(self) -> None:
        """As if it were killed: what it knew is gone. It may come back at its endpoint."""


class ZmqDirectory:
    """A directory over ZMQ."""

    def __init__(self, endpoint: str = "", node_timeout_s: float = 1.0) -> None:
        # A port that the system gives to nobody else before this directory has come back.
        endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.directory = Directory(endpoint, node_timeout_s=node_timeout_s, heartbeat_s=0.1)
        self.directory.start()
        self.endpoint = self.directory.endpoint

    def stands(self) -> tuple[bytes, int]:
        return self.directory.epoch, self.directory.stats()["seq"]

    def entries(self) -> int:
        return self.directory.stats()["entries"]

    def close(self) -> None:
        self.directory.close()


KINDS: dict[str, Callable[[str, float], Served]] = {
    "zmq": ZmqDirectory,
    # How long a node may be silent its announcer says there.
    "valkey": lambda endpoint, node_timeout_s: ValkeyProcess(endpoint),
}


class Loop:
    """Everything made by it is driven while it waits for a condition, and closed at the end of the test."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context()
        self.driven: list[Announces | Replicates | View] = []
        self._exit = ExitStack()
        self._exit.callback(self.context.term)

    def directory(self, bind: str = "tcp://127.0.0.1:0", **options: Any) -> Directory:
        directory = self._exit.enter_context(Directory(bind, **{"node_timeout_s": NEVER_S, **options}))
        directory.start()
        return directory

    def serve(self, kind: str, endpoint: str = "", *, node_timeout_s: float = 1.0) -> Served:
        """A directory of one of KINDS."""
        served = KINDS[kind](endpoint, node_timeout_s)
        self._exit.callback(served.close)
        return served

    def announcer(self, endpoint: str, node: NodeInfo, **options: Any) -> Any:
        return self._add(announce_to(self.context, endpoint, node, **{"heartbeat_s": 0.1, "timeout_s": 1.0, **options}))

    def replica(self, endpoint: str, **options: Any) -> Any:
        return self._add(replicate(self.context, endpoint, **{"node_timeout_s": 1.0, **options}))

    def view(self, endpoints: list[str], **options: Any) -> View:
        return self._add(View(self.context, endpoints, **{"node_timeout_s": 1.0, **options}))

    def _add(self, driven: Any) -> Any:
        self.driven.append(driven)
        self._exit.callback(driven.close)
        return driven

    def forget(self, driven: Announces | Replicates | View) -> None:
        """Stop driving it, as if its process had been killed."""
        self.driven.remove(driven)
        driven.close()

    def turn(self, longest_s: float = 0.02) -> None:
        now = time.monotonic()
        wait_s = min([longest_s, *(driven.tick(now) for driven in self.driven)])
        owners: dict[Pollable, Any] = {socket: driven for driven in self.driven for socket in driven.sockets}
        poller = zmq.Poller()
        for socket in owners:
            poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(max(0.0, wait_s) * 1000):
            owner = owners[socket]
            if hasattr(owner, "lookup"):
                owner.on_readable(socket)
            else:
                owner.on_readable()

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Drive until the condition holds; fail after a generous while."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"never came true: {what or condition}")
            self.turn()

    def close(self) -> None:
        self._exit.close()


def opened() -> set[object]:
    """The threads of this process, and its sockets and other files without a path."""
    found: set[object] = set(threading.enumerate())
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that the folder was listed with
            link = os.readlink(path)
            found |= set() if link.startswith("/") else {(path.name, link)}
    return found


def await_closed(before: set[object]) -> None:
    """Wait until of what is `opened` nothing is left but what was before. Of that, some may be gone, too."""
    until(lambda: not opened() - before, "what was opened to be closed", PATIENCE_S)


def node(number: int, *, life: int = 0, address: str = "") -> NodeInfo:
    """A node by number; another `life` is another incarnation of it at the same address."""
    return NodeInfo(bytes([number] * 15 + [life]), f"host-{number}", address or f"tcp://10.0.0.{number}:5000")


def advert(number: int, generation: int = 1) -> Advert:
    return Advert(
        identity=number.to_bytes(32, "big"),
        state=EntryState.RESIDENT,
        nbytes=4096,
        rows=16,
        dim=128,
        dtype="bfloat16",
        offset=4096 * number,
        record=64 * number,
        generation=generation,
    )
