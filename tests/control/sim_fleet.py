"""A fleet under virtual time, and what can happen to it.

A step is (what, a, b): what happens, to whom, and how. Numbers are taken modulo what there is, so any of them will do.
"""

from __future__ import annotations

from collections.abc import Callable

from ec_p2p.control.messages import Advert, EntryState, InstanceInfo, NodeInfo

from .sim_network import Network, Process
from .sim_parties import KEYS, Follower, Host, Life, Node

WAITS_S = (0.01, 0.1, 0.5, 1.0, 3.0, 7.0)
REST_S = 20.0
SPANS_S = (0.3, 2.0, 4.5, 6.0, 15.0, 60.0)
CONNECTED_S = 5.0 + 2.0 + 1.0
"""A dead connection is noticed, an attempt that is lost runs out, and the next is made."""
FLAPS_S = ((0.1, 0.9), (3.0, 4.5))
PAUSE_S = 6.0
BURST_S = 5.0
LOST_WITHIN_S = 2.0
"""What is to be lost or repeated, and has not been by then, will not be."""

Step = tuple[str, int, int]


class Fleet:
    """Directories, nodes, and an observer that only follows. `followed` is called after each turn of those."""

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
