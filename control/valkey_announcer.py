"""One node's side towards a directory that is a Valkey or Redis server.

Owns the conversation (`announcing`, as over ZMQ) and the thread that turns its messages into scripts on the server. The
loop must never wait for it; at most a few messages are on their way, the rest waits as one change per identity.

The thread keeps a message until the server has taken it, over a new connection if it must. So something may arrive
twice, or late: the session, new with each hello, and the sequence number make that harmless. So may an answer: what
answers an earlier hello, or what followed it, does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from ec_p2p.control.announcing import Announcing, Standing
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Advert,
    Announce,
    FromDirectory,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    InstanceInfo,
    NodeInfo,
    Welcome,
)
from ec_p2p.control.valkey_handover import ToLoop, ToThread
from ec_p2p.control.valkey_server import Connection, Refuses, parse
from ec_p2p.control.valkey_worker import Worker

_ON_THEIR_WAY = 2
_ANSWERS = 64


class _Saying(NamedTuple):
    """What goes to the thread. `hello` counts the hellos so far, itself included."""

    hello: int
    message: Hello | Announce | Heartbeat | Goodbye


class _Answer(NamedTuple):
    """What comes back, with the number of what it answers."""

    hello: int
    message: FromDirectory


class ValkeyAnnouncer:
    """As `interface.Announces` says. Raises BadEndpoint for an endpoint that is none, or without the library for it."""

    def __init__(
        self, endpoint: str, shown: str, node: NodeInfo, *, heartbeat_s: float = 1.0, timeout_s: float = 4.0
    ) -> None:
        server = parse(endpoint)
        self.endpoint = shown
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._announcing = Announcing(shown, node, heartbeat_s, timeout_s)
        self._hellos = 0
        self._sayings: ToThread[_Saying] = ToThread(_ON_THEIR_WAY)
        self._answers: ToLoop[_Answer] = ToLoop(_ANSWERS)
        # The thread's.
        self._said_hello = 0
        self._session = b""
        self._epoch = b""
        self._port = server.port
        self._worker = Worker(server, shown, "announcing", timeout_s, self._serve, self._answers.wake)
        self._worker.start()

    @property
    def sockets(self) -> tuple[int, ...]:
        """The same one for the announcer's whole life."""
        return (self._answers.fd,)

    @property
    def refused(self) -> str:
        """Why the server does not do what it is asked; empty while it does, or is not reached."""
        return self._announcing.refused or self._worker.refused

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._announcing.counters)

    @property
    def connected(self) -> bool:
        """The server does what it is asked, and knows this node."""
        return self._worker.answering and self._announcing.connected(time.monotonic())

    @property
    def pending(self) -> int:
        """Changes not yet in the server; everything, while it does not know this node."""
        waiting = self._announcing.pending
        if self._announcing.standing is Standing.WELCOMED:
            for _, message in self._sayings.unfinished():
                if isinstance(message, Announce):
                    waiting += len(message.adverts) + len(message.withdrawn)
        return waiting

    def store(self, advert: Advert) -> None:
        self._announcing.store(advert)

    def withdraw(self, identity: bytes) -> None:
        self._announcing.withdraw(identity)

    def describe(self, instances: list[InstanceInfo]) -> None:
        self._announcing.describe(instances)

    def goodbye(self) -> None:
        """Leave. Said if the server answers within a second."""
        message = self._announcing.leave()
        if message is not None:
            self._sayings.replace(_Saying(self._hellos, message))

    def close(self) -> None:
        self._sayings.close()
        self._answers.close()
        self._worker.close()

    def on_readable(self) -> None:
        now = time.monotonic()
        for answer in self._answers.take(_ANSWERS):
            if answer.hello == self._hellos and self._announcing.standing is not Standing.UNKNOWN:
                self._announcing.take(answer.message, now)

    def tick(self, now: float) -> float:
        """Pass on what is due, as far as there is room for it. Seconds until the next call is wanted: when there is
        room again, or the server answers again, `sockets` tell."""
        announcing = self._announcing
        announcing.tick(now)
        if not self._worker.answering:
            return self._heartbeat_s
        while (message := announcing.next_message(now)) is not None:
            if isinstance(message, Hello):
                # One that is on its way is said again by the thread, as long as that takes.
                if not any(isinstance(saying.message, Hello) for saying in self._sayings.unfinished()):
                    self._hellos += 1
                    self._sayings.replace(_Saying(self._hellos, message))
            elif not self._sayings.offer(_Saying(self._hellos, message)):
                return self._heartbeat_s
            announcing.sent(message, now)
        return min(max(0.0, announcing.next_event() - now), self._heartbeat_s)

    # -------------------------------------------------------- in the thread

    def _serve(self, connection: Connection, answers: Callable[[], None]) -> None:
        self._epoch = connection.look().epoch
        if self._session:
            self._renew(connection)
        while True:
            if not self._sayings.unfinished():
                answers()
            saying = self._sayings.first()
            if saying is None:
                return
            answer = self._deliver(connection, saying.message)
            self._said_hello = saying.hello
            self._sayings.done(saying)
            answers()
            if answer is None:
                self._answers.wake()
            else:
                self._answers.post(_Answer(saying.hello, answer))

    def _deliver(self, connection: Connection, message: Hello | Announce | Heartbeat | Goodbye) -> FromDirectory | None:
        if isinstance(message, Hello):
            self._session = os.urandom(8)
            epoch = connection.hello(self._node, self._session)
            if epoch is None:
                connection.look()
                epoch = connection.hello(self._node, self._session)
            if epoch is None:
                raise Refuses("it loses what it was just told; is its maxmemory-policy noeviction?")
            return self._welcome(epoch)
        if isinstance(message, Announce):
            return None if connection.announce(message, self._session) else HelloAgain(self._epoch)
        if isinstance(message, Heartbeat):
            epoch = connection.heartbeat(message.incarnation, self._session, message.seq)
            return HelloAgain(self._epoch) if epoch is None else self._welcome(epoch)
        connection.goodbye(message.incarnation)
        return None

    def _renew(self, connection: Connection) -> None:
        """Keep the lease, whatever does not get through: a server that is full is no reason to be taken for dead."""
        epoch = connection.heartbeat(self._node.incarnation, self._session, None)
        self._answers.post(
            _Answer(self._said_hello, HelloAgain(self._epoch) if epoch is None else self._welcome(epoch))
        )

    def _welcome(self, epoch: bytes) -> Welcome:
        self._epoch = epoch
        return Welcome(PROTOCOL_VERSION, epoch, self._port)
