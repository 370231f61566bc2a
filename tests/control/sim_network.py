"""A network under virtual time: processes, and connections as ZMQ makes them, over links that can be harmed.

What is true of ZMQ over TCP is true here. One connection is a queue in each direction: what it delivers it delivers in
order, and what was on its way when it ends is lost from some point on. Nothing else is in order: not two connections of
the same socket, of which the older may be read after the younger, and not two sockets. Whoever is not answered for
five seconds is cut off and dialled again.

What can be done to a link: `cut` (nothing passes, nobody is told), `mend`, `reset` (the connections end), and, of
what comes next over it, `lose` and `repeat`, which real connections do not do, or only where they drop.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ec_p2p.control import announcer, directory, replica

if TYPE_CHECKING:
    from .sim_sockets import VirtualSocket

CAPACITY = 1000
"""Messages on their way, and not yet read, at most, of one connection in one direction."""
DEAD_AFTER_S = 5.0
"""HEARTBEAT_IVL and HEARTBEAT_TIMEOUT of the real sockets."""
ATTEMPT_S = 2.0
"""CONNECT_TIMEOUT, and HANDSHAKE_IVL."""
REDIAL_FIRST_S, REDIAL_LAST_S = 0.05, 1.0
LATENCY_S = (0.0002, 0.02)


class Network:
    """Owns the time, and who listens where. `published(frames)` is told of all that is published, before any loss."""

    def __init__(self, seed: int, published: Callable[[list[bytes]], None] = lambda frames: None) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.published = published
        self.listening: dict[str, VirtualSocket] = {}
        self.dials: list[Dial] = []
        self.capacity = CAPACITY
        self.latencies_s: dict[str, tuple[float, float]] = {}
        """By endpoint, where it is not LATENCY_S."""
        self._cut: set[tuple[str, str]] = set()
        self._harm: dict[tuple[str, str], tuple[float, list[int]]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)

    def monotonic(self) -> float:
        return self.now

    @contextmanager
    def time(self) -> Iterator[None]:
        """`time.monotonic()` of the control plane is this network's."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (announcer, directory, replica):
                patch.setattr(module, "time", self)
            yield

    def at(self, when: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), callback))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._events)
            callback()
        self.now = until

    def number(self) -> int:
        return next(self._numbers)

    # -------------------------------------------------------- harm

    def cut(self, process: str, endpoint: str) -> None:
        self._cut.add((process, endpoint))
        for dial in self._between(process, endpoint):
            dial.stall()

    def mend(self, process: str, endpoint: str) -> None:
        self._cut.discard((process, endpoint))
        for dial in self._between(process, endpoint):
            dial.resume()

    def is_cut(self, process: str, endpoint: str) -> bool:
        return (process, endpoint) in self._cut

    def reset(self, process: str, endpoint: str) -> None:
        for dial in self._between(process, endpoint):
            dial.end()

    def lose(self, process: str, endpoint: str, count: int, within_s: float, skip: int = 0) -> None:
        """The next messages between the two but the first `skip`, sent within that time, do not arrive."""
        self._harm[process, endpoint] = (self.now + within_s, [1] * skip + [0] * count)

    def repeat(self, process: str, endpoint: str, count: int, within_s: float) -> None:
        """They arrive twice."""
        self._harm[process, endpoint] = (self.now + within_s, [2] * count)

    def times(self, process: str, endpoint: str) -> int:
        """How often a message that is sent now arrives."""
        until, times = self._harm.get((process, endpoint), (0.0, []))
        return times.pop(0) if times and self.now <= until else 1

    def heal(self) -> None:
        """No link is harmed any more."""
        self._harm.clear()
        for process, endpoint in list(self._cut):
            self.mend(process, endpoint)

    def _between(self, process: str, endpoint: str) -> list[Dial]:
        return [dial for dial in self.dials if (dial.client.process.name, dial.endpoint) == (process, endpoint)]


class Process:
    """Something that runs: `turn()` does what is to be done and says in how many seconds to call it again.

    It is called when a message comes in, too, but never while the process is paused; what comes in meanwhile waits.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.alive = True
        self.paused = False
        self.turn: Callable[[], float] = lambda: float("inf")
        self.sockets: list[VirtualSocket] = []
        self._due = float("inf")

    def wake(self, after_s: float = 0.0) -> None:
        """Let it have a turn after a moment, or earlier."""
        due = self.network.now + after_s + self.network.random.uniform(0.0001, 0.001)
        if due < self._due and self.alive and not self.paused:
            self._due = due
            self.network.at(due, lambda: self._turn(due))

    def pause(self) -> None:
        self.paused = True
        self._due = float("inf")
        for dial in self._dials():
            dial.stall()

    def resume(self) -> None:
        self.paused = False
        for dial in self._dials():
            dial.resume()
        self.wake()

    def kill(self) -> None:
        self.alive = False
        self._due = float("inf")
        for socket in self.sockets:
            socket.close()

    def _dials(self) -> list[Dial]:
        return [dial for dial in self.network.dials if self in (dial.client.process, dial.dialled)]

    def _turn(self, due: float) -> None:
        if due == self._due:
            self._due = float("inf")
            self.wake(max(0.0, self.turn()))
            if any(socket.readable for socket in self.sockets):
                self.wake()


class Channel:
    """One direction of a connection. Keeps what was sent until it was read; the unread outlives the connection."""

    def __init__(self, network: Network, dial: Dial, receiver: VirtualSocket) -> None:
        self.dial = dial
        self.route = dial.route
        self.open = True
        self.inbox: deque[list[bytes]] = deque()
        self._network = network
        self._receiver = receiver
        self._flight: deque[tuple[float, list[bytes]]] = deque()
        self._last = 0.0

    @property
    def full(self) -> bool:
        return len(self._flight) + len(self.inbox) >= self._network.capacity

    def send(self, frames: list[bytes], *, harmed: bool = True) -> None:
        link = (self.dial.client.process.name, self.dial.endpoint)
        for _ in range(self._network.times(*link) if harmed else 1):
            latency_s = self._network.latencies_s.get(self.dial.endpoint, LATENCY_S)
            self._last = max(self._last, self._network.now + self._network.random.uniform(*latency_s))
            self._flight.append((self._last, frames))
            self._network.at(self._last, self.pump)

    def pump(self) -> None:
        """Deliver what is due, unless the link is cut."""
        while self._flight and self._flight[0][0] <= self._network.now and not self.dial.is_cut:
            self.inbox.append(self._flight.popleft()[1])
            self._receiver.arrived(self)

    def end(self, *, all_arrives: bool) -> None:
        """Of what is on its way the first part still arrives; what had arrived may be lost to the receiver, too."""
        arrives = len(self._flight) if all_arrives else self._network.random.randint(0, len(self._flight))
        if self.dial.is_cut:
            arrives = 0
        self.open = False
        self.inbox.extend(frames for _, frames in itertools.islice(self._flight, arrives))
        self._flight.clear()
        if self._network.random.random() < 0.3 and not all_arrives:
            self.inbox.clear()
        self._receiver.look(self)


class Dial:
    """What a `connect` began: one connection after another, for as long as the client wants it."""

    def __init__(self, client: VirtualSocket, endpoint: str) -> None:
        self.client = client
        self.endpoint = endpoint
        self.server: VirtualSocket | None = None
        self.route = b""
        self._network = client.network
        self._wanted = True
        self._redial_s = REDIAL_FIRST_S
        self._stalled: float | None = None
        self._attempt_until = 0.0
        """A frozen process has been dialled; 0.0: none."""
        self._network.dials.append(self)
        self._later(0.0)

    @property
    def dialled(self) -> Process | None:
        server = self.server or self._network.listening.get(self.endpoint)
        return server.process if server else None

    @property
    def is_cut(self) -> bool:
        return self._network.is_cut(self.client.process.name, self.endpoint)

    def stall(self) -> None:
        """Nobody answers from now on: after a while whoever still lives ends the connection."""
        if self.server and self._stalled is None:
            self._stalled = stalled = self._network.now
            after_s = DEAD_AFTER_S - self._network.random.uniform(0.0, 1.0)
            self._network.at(stalled + after_s, lambda: self._end_if_stalled(stalled))

    def resume(self) -> None:
        if self._attempt_until:
            self._attempt_until = 0.0
            self._attempt()
        both = self.server and not self.is_cut and not self.client.process.paused and not self.server.process.paused
        if both:
            self._stalled = None
            self.to_client.pump()
            self.to_server.pump()

    def end(self, *, all_arrives: bool = False) -> None:
        """The connection is gone, and both sides know."""
        if self.server is None:
            return
        self.server.dropped(self)
        self.server = None
        self._stalled = None
        self.to_client.end(all_arrives=all_arrives)
        self.to_server.end(all_arrives=all_arrives)
        self._redial_s = REDIAL_FIRST_S
        if self._wanted:
            self._later(self._redial_s)

    def give_up(self) -> None:
        """The client does not want it any more. What it has sent is still sent."""
        self._wanted = False
        self.end(all_arrives=self.client.process.alive)
        self._network.dials.remove(self)

    def _end_if_stalled(self, stalled: float) -> None:
        if self._stalled == stalled:
            self.end()

    def _frozen(self, server: VirtualSocket | None) -> bool:
        return not self.is_cut and (self.client.process.paused or (server is not None and server.process.paused))

    def _attempt_is_over(self) -> None:
        if self._attempt_until and self._network.now >= self._attempt_until:
            self._attempt_until = 0.0
            self._redial_s = min(2 * self._redial_s, REDIAL_LAST_S)
            self._later(self._redial_s)

    def _later(self, after_s: float) -> None:
        # Not all who have lost the same at the same time dial in step.
        after_s *= self._network.random.uniform(0.7, 1.0)
        self._network.at(self._network.now + after_s, self._attempt)

    def _attempt(self) -> None:
        if not self._wanted or self.server is not None:
            return
        server = self._network.listening.get(self.endpoint)
        if self._frozen(server):
            # Answered if it runs again before the attempt is given up.
            self._attempt_until = self._network.now + ATTEMPT_S
            self._network.at(self._attempt_until, self._attempt_is_over)
            return
        if self.is_cut or server is None:
            self._later(self._redial_s + (ATTEMPT_S if self.is_cut else 0.0))
            self._redial_s = min(2 * self._redial_s, REDIAL_LAST_S)
            return
        self._attempt_until = 0.0
        self.server = server
        self.route = self._network.number().to_bytes(5, "big")
        self.to_client = Channel(self._network, self, self.client)
        self.to_server = Channel(self._network, self, server)
        server.joined(self)
        self.client.connected(self)
