"""Who takes part in a simulated fleet: the product's own directories, announcers and views, each in a process.

What a node really holds, and held when, is written down beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ec_p2p.control import announcing, directory, replica, snapshots
from ec_p2p.control.announcer import Announcer
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import Advert, InstanceInfo, NodeInfo
from ec_p2p.control.state import chunks
from ec_p2p.control.view import View

from .sim_network import Process
from .sim_sockets import VirtualContext

if TYPE_CHECKING:
    from .sim_fleet import Fleet

HEARTBEAT_S, TIMEOUT_S = 1.0, 4.0
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
READ_AT_ONCE = (400, 256 << 10)
"""Bytes: two or three messages, or all there are."""


@contextmanager
def small_pieces(seed: int) -> Iterator[None]:
    """Little is told at a time, and in every other world little of it read in a turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "_BATCH", 2)
        patch.setattr(directory, "_BYTES_PER_TURN", READ_AT_ONCE[seed % 2])
        patch.setattr(replica, "_BYTES_PER_TURN", READ_AT_ONCE[seed % 2])
        patch.setattr(snapshots, "chunks", partial(chunks, adverts_per_chunk=24))
        yield


class Life:
    """One incarnation of a node: what it holds, what it held until when."""

    def __init__(self, info: NodeInfo, now: float) -> None:
        self.info = info
        self.born = now
        self.died = float("inf")
        self.left_cleanly: set[str] = set()
        """Names of the directories that a goodbye must have reached."""
        self.held: dict[bytes, tuple[Advert, float]] = {}
        self.instances: tuple[list[InstanceInfo], float] = ([], now)
        self.since: dict[bytes, float] = {}
        """When it began to hold each entry, in whatever state."""
        self.past: dict[bytes, list[tuple[Advert, float]]] = {}
        self.past_instances: list[tuple[list[InstanceInfo], float]] = []

    def put(self, advert: Advert | None, identity: bytes, now: float) -> None:
        if identity in self.held:
            self.past.setdefault(identity, []).append((self.held.pop(identity)[0], now))
        if advert is None:
            self.since.pop(identity, None)
        else:
            self.held[identity] = (advert, now)
            self.since.setdefault(identity, now)

    def held_after(self, advert: Advert, when: float) -> bool:
        """Whether it held just this at that time or later."""
        now = self.held.get(advert.identity)
        past = self.past.get(advert.identity, [])
        return bool(now and now[0] == advert) or any(old == advert and until >= when for old, until in past)


class Follower:
    """A process with a view, and what the view's callbacks told."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.started = fleet.network.now
        self.process = Process(fleet.network, name)
        self.process.turn = self._turn
        self.context: Any = VirtualContext(self.process)
        self.told: dict[bytes, dict[bytes, Advert]] = {key: {} for key in KEYS}
        self.told_nodes: dict[bytes, NodeInfo] = {}
        self.touched = False
        """Something was told since whoever reads this has looked last."""
        self.view = View(
            self.context,
            fleet.endpoints,
            on_change=self._on_change,
            on_node=self._on_node,
            node_timeout_s=TIMEOUT_S,
        )
        self.process.wake()

    def _on_change(self, identity: bytes) -> None:
        self.touched = True
        self.told[identity] = {node.incarnation: advert for node, advert in self.view.lookup(identity)}

    def _on_node(self, node: NodeInfo, up: bool) -> None:
        self.touched = True
        if up:
            self.told_nodes[node.incarnation] = node
        else:
            assert self.told_nodes.pop(node.incarnation) == node

    def _turn(self) -> float:
        now = self.fleet.network.now
        for socket in self.view.sockets:
            if socket.readable:
                self.view.on_readable(socket)
        wait_s = min(self.view.tick(now), self.drive(now))
        self.fleet.followed(self)
        return wait_s

    def drive(self, now: float) -> float:
        """Whatever else the process does in a turn."""
        return float("inf")


class Node(Follower):
    """A node: it announces to every directory and follows every directory."""

    def __init__(self, fleet: Fleet, name: str, info: NodeInfo) -> None:
        super().__init__(fleet, name)
        self.life = Life(info, fleet.network.now)
        self.announcers = [
            Announcer(self.context, endpoint, info, heartbeat_s=HEARTBEAT_S, timeout_s=TIMEOUT_S)
            for endpoint in fleet.endpoints
        ]

    def drive(self, now: float) -> float:
        for announcer in self.announcers:
            if announcer.socket.readable:
                announcer.on_readable()
        return min(announcer.tick(now) for announcer in self.announcers)

    def put(self, identity: bytes, advert: Advert | None) -> None:
        """Hold the entry so; None: hold it no more."""
        self.life.put(advert, identity, self.fleet.network.now)
        for announcer in self.announcers:
            if advert is None:
                announcer.withdraw(identity)
            else:
                announcer.store(advert)
        self.process.wake()

    def describe(self, instances: list[InstanceInfo]) -> None:
        self.life.past_instances.append((self.life.instances[0], self.fleet.network.now))
        self.life.instances = (instances, self.fleet.network.now)
        for announcer in self.announcers:
            announcer.describe(instances)
        self.process.wake()

    def leave(self) -> None:
        for announcer in self.announcers:
            announcer.goodbye()
            announcer.close()
        self.view.close()
        self.process.kill()


class Host:
    """Where a directory is, or was and will be."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.network = fleet.network
        self.name = f"directory-{number}"
        self.address = f"tcp://{self.name}:14579"
        self.pub_port = 14580
        self.directory: Directory | None = None
        self.process = Process(self.network, self.name)
        self.start()

    @property
    def pub_endpoint(self) -> str:
        return f"tcp://{self.name}:{self.pub_port}"

    def start(self) -> None:
        self.process = Process(self.network, self.name)
        context: Any = VirtualContext(self.process)
        self.directory = Directory(
            self.address, self.pub_port, node_timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S, context=context
        )
        self.process.turn = partial(self._turn, self.directory)
        self.process.wake()

    def kill(self) -> None:
        if self.directory:
            self.process.kill()
            self.directory.close()
            self.directory = None

    def _turn(self, directory: Directory) -> float:
        ready = [socket for socket in directory.sockets if socket.readable]
        return directory.turn(ready, self.network.now)
