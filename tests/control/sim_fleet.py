"""A fleet under virtual time: the product's own directories, announcers and views, over `sim_network`.

A step is (what, a, b): what happens, to whom, and how. Numbers are taken modulo what there is, so any of them will do.
What the nodes really hold, and held when, is written down beside them, for `sim_checks` to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from ec_p2p.control import announcing, directory, replica, snapshots
from ec_p2p.control.announcer import Announcer
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import Advert, EntryState, InstanceInfo, NodeInfo
from ec_p2p.control.state import chunks
from ec_p2p.control.view import View

from .sim_network import Network, Process, VirtualContext

HEARTBEAT_S, TIMEOUT_S = 1.0, 4.0
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
WAITS_S = (0.01, 0.1, 0.5, 1.0, 3.0, 7.0)
REST_S = 20.0
SPANS_S = (0.3, 2.0, 4.5, 6.0, 15.0, 60.0)
CONNECTED_S = 5.0 + 2.0 + 1.0
"""A dead connection is noticed, an attempt that is lost runs out, and the next is made."""
FLAPS_S = ((0.1, 0.9), (3.0, 4.5))
PAUSE_S = 6.0
READ_AT_ONCE = 400
"""Bytes; two or three messages."""
BURST_S = 5.0
LOST_WITHIN_S = 2.0
"""What is to be lost or repeated, and has not been by then, will not be."""

Step = tuple[str, int, int]


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


class Fleet:
    """Directories, nodes, and an observer that only follows. `followed` is called after every turn of whoever follows,
    `died` when a node is dead or has left."""

    def __init__(self, network: Network, directories: int = 2, nodes: int = 3) -> None:
        self.network = network
        self.followed: Callable[[Follower], None] = lambda follower: None
        self.disturbed: dict[object, float] = {}
        """Until when something was wrong with a process, or with a link of one to a directory, by name."""
        self.unheard: dict[object, float] = {}
        """Since when nothing comes from a process, or from it to a directory, by name; while that is so."""
        self.hosts = [Host(self, number) for number in range(directories)]
        self.endpoints = [host.address for host in self.hosts]
        self.lives: dict[bytes, Life] = {}
        self.places = [f"node-{number}" for number in range(nodes)]
        self.nodes: dict[str, Node] = {}
        self.observer = Follower(self, "observer")
        for place in self.places:
            self._start_node(place, 0)

    def close(self) -> None:
        for host in self.hosts:
            host.kill()

    def do(self, step: Step) -> None:
        what, a, b = step
        getattr(self, what)(a, b)

    def followers(self) -> list[Follower]:
        return [*self.nodes.values(), self.observer]

    # -------------------------------------------------------- what nodes do

    def wait(self, a: int, b: int) -> None:
        self.network.run(WAITS_S[a % len(WAITS_S)])

    def rest(self, a: int, b: int) -> None:
        """Long enough, twice in a row, for everything to be mended."""
        self.network.run(REST_S)

    def change(self, a: int, b: int) -> None:
        """An entry goes one step on its way: absent, pending, resident, disk, resident, absent, or any of the short
        cuts."""
        node = self._node(a)
        if node:
            identity = KEYS[b % len(KEYS)]
            now = node.life.held.get(identity)
            node.put(identity, self._next(identity, now[0].state if now else None))

    def burst(self, a: int, b: int) -> None:
        """Something changes all the time, for longer than anybody is silent."""
        until = self.network.now + BURST_S
        while self.network.now < until:
            self.change(a, self.network.random.randrange(len(KEYS)))
            self.network.run(0.1)

    def describe(self, a: int, b: int) -> None:
        node = self._node(a)
        if node:
            node.describe([InstanceInfo(f"engine-{b}", "both", "ab") for _ in range(b % 3)])

    def start_node(self, a: int, b: int) -> None:
        """Start, or kill and start again; at the address it had, or at another."""
        place = self.places[a % len(self.places)]
        self._end_node(place, self._kill)
        self._start_node(place, b % 2)

    def kill_node(self, a: int, b: int) -> None:
        self._end_node(self.places[a % len(self.places)], self._kill)

    def leave_node(self, a: int, b: int) -> None:
        place = self.places[a % len(self.places)]
        node = self.nodes.get(place)
        if node and not node.process.paused:
            connected = self.network.now - CONNECTED_S
            node.life.left_cleanly = {host.name for host in self.hosts if self.calm_since(node, host) <= connected}
            self._end_node(place, Node.leave)

    # -------------------------------------------------------- what happens to directories and followers

    def start_directory(self, a: int, b: int) -> None:
        """Start, or kill and start again; with the port that it published on, or another."""
        host = self.hosts[a % len(self.hosts)]
        self.kill_directory(a, b)
        host.pub_port += b % 2
        host.start()

    def kill_directory(self, a: int, b: int) -> None:
        host = self.hosts[a % len(self.hosts)]
        host.kill()
        self._disturb(host.name)

    def flap(self, a: int, b: int) -> None:
        """Start, and when some have been heard, or all are about to be forgotten, start once more or stand still."""
        host = self.hosts[a % len(self.hosts)]
        self.start_directory(a, b)
        self.network.run(self.network.random.uniform(*FLAPS_S[b % 2]))
        if b % 3 == 0:
            self._pause(host.process, PAUSE_S)
            self.network.run(PAUSE_S)
        else:
            self.kill_directory(a, b)
            self.network.run(self.network.random.choice([0.0, self.network.random.uniform(2.5, 4.0), PAUSE_S]))
            self.start_directory(a, b)

    def pause_directory(self, a: int, b: int) -> None:
        host = self.hosts[a % len(self.hosts)]
        self._pause(host.process, SPANS_S[b % len(SPANS_S)])

    def pause_follower(self, a: int, b: int) -> None:
        followers = self.followers()
        self._pause(followers[a % len(followers)].process, SPANS_S[b % len(SPANS_S)])

    def restart_observer(self, a: int, b: int) -> None:
        self.observer.process.kill()
        self.observer = Follower(self, "observer")
        self._disturb(self.observer.name)

    # -------------------------------------------------------- what happens to links

    def cut(self, a: int, b: int) -> None:
        name, host, endpoint = self._link(a)
        span_s = SPANS_S[b % len(SPANS_S)]
        if not self.network.is_cut(name, endpoint):
            self.network.cut(name, endpoint)
            if endpoint == host.address:
                self.unheard[name, host.name] = self.network.now
            self._disturb((name, host.name), span_s)
            self.network.at(self.network.now + span_s, lambda: self._mend(name, host, endpoint))

    def reset(self, a: int, b: int) -> None:
        name, host, endpoint = self._link(a)
        self.network.reset(name, endpoint)
        self._disturb((name, host.name))

    def lose(self, a: int, b: int) -> None:
        name, host, endpoint = self._link(a)
        self._disturb((name, host.name), LOST_WITHIN_S)
        if name == self.observer.name:
            self.network.lose(name, endpoint, 1, LOST_WITHIN_S, skip=b % 6)
            self.restart_observer(a, b)
        else:
            self.network.lose(name, endpoint, 1 + b % 2, LOST_WITHIN_S)
            # So that it is something that matters, and nothing that follows gives it away.
            for _ in range(b % 3):
                self.change(self.places.index(name), b)
                self.network.run(0.05)
            if b % 4 == 0:
                self.rest(a, b)
                self.rest(a, b)

    def repeat(self, a: int, b: int) -> None:
        name, host, endpoint = self._link(a)
        self.network.repeat(name, endpoint, 1 + b % 4, LOST_WITHIN_S)
        self._disturb((name, host.name), LOST_WITHIN_S)

    # -------------------------------------------------------- the end of all harm

    def heal(self) -> None:
        """Everything that was paused goes on, all links are whole, every directory is up."""
        self.network.heal()
        self.unheard.clear()
        for number, host in enumerate(self.hosts):
            if not host.directory:
                self.start_directory(number, 0)
        for process in [host.process for host in self.hosts] + [follower.process for follower in self.followers()]:
            if process.paused:
                process.resume()
        self.disturbed = {key: min(until, self.network.now) for key, until in self.disturbed.items()}

    def calm_since(self, follower: Follower, host: Host) -> float:
        """Since when nothing is wrong with either of them or between them; in the future while something is."""
        if not host.directory:
            return float("inf")
        keys = (follower.name, host.name, (follower.name, host.name))
        return max(follower.started, *(self.disturbed.get(key, 0.0) for key in keys))

    def unheard_since(self, life: Life, host: Host) -> float:
        """Since when the directory cannot have heard of the node; infinity while it can."""
        keys = (life.info.name, (life.info.name, host.name))
        return min(life.died, *(self.unheard.get(key, float("inf")) for key in keys))

    # -------------------------------------------------------- details

    def _node(self, number: int) -> Node | None:
        """One that lives and runs."""
        node = self.nodes.get(self.places[number % len(self.places)])
        return node if node and not node.process.paused else None

    def _next(self, identity: bytes, state: int | None) -> Advert | None:
        choices: dict[int | None, list[EntryState | None]] = {
            None: [EntryState.PENDING, EntryState.RESIDENT],
            EntryState.PENDING: [EntryState.RESIDENT, EntryState.RESIDENT, None],
            EntryState.RESIDENT: [EntryState.DISK, EntryState.RESIDENT, None],
            EntryState.DISK: [EntryState.RESIDENT, EntryState.RESIDENT, None],
        }
        then = self.network.random.choice(choices[state])
        if then is None:
            return None
        # Rows tell one version of an entry from every other: only what is resident has a generation.
        version = self.network.number()
        return Advert(identity, then, 1, version, 1, "int8", 0, 0, version if then is EntryState.RESIDENT else 0)

    def _start_node(self, place: str, elsewhere: int) -> None:
        number = self.network.number()
        address = f"tcp://{place}:{number}" if elsewhere else f"tcp://{place}:5000"
        info = NodeInfo(number.to_bytes(16, "big"), place, address)
        self.nodes[place] = Node(self, place, info)
        self.lives[info.incarnation] = self.nodes[place].life
        self.unheard.pop(place, None)
        self._disturb(place)

    def _end_node(self, place: str, end: Callable[[Node], None]) -> None:
        node = self.nodes.pop(place, None)
        if node:
            end(node)
            node.life.died = self.network.now

    def _kill(self, node: Node) -> None:
        node.process.kill()

    def _pause(self, process: Process, span_s: float) -> None:
        if process.alive and not process.paused:
            process.pause()
            self.unheard[process.name] = self.network.now
            self._disturb(process.name, span_s)
            self.network.at(self.network.now + span_s, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        if process.paused and process.alive:
            process.resume()
            self.unheard.pop(process.name, None)

    def _link(self, number: int) -> tuple[str, Host, str]:
        names = [*self.places, self.observer.name]
        name = names[number % len(names)]
        number //= len(names)
        host = self.hosts[number % len(self.hosts)]
        number //= len(self.hosts)
        return name, host, host.pub_endpoint if number % 2 else host.address

    def _mend(self, name: str, host: Host, endpoint: str) -> None:
        self.network.mend(name, endpoint)
        if endpoint == host.address:
            self.unheard.pop((name, host.name), None)

    def _disturb(self, key: object, span_s: float = 0.0) -> None:
        self.disturbed[key] = max(self.disturbed.get(key, 0.0), self.network.now + span_s)


@contextmanager
def small_pieces() -> Iterator[None]:
    """Little is told at a time, and little of it read in a turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "_BATCH", 2)
        patch.setattr(directory, "_BYTES_PER_TURN", READ_AT_ONCE)
        patch.setattr(replica, "_BYTES_PER_TURN", READ_AT_ONCE)
        patch.setattr(snapshots, "chunks", partial(chunks, adverts_per_chunk=24))
        yield
