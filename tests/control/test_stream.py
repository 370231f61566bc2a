"""What other indexers may rely on: the published stream and the snapshots, read with pyzmq and msgpack alone.

The indexer here knows nothing of this project's code. It does what docs/protocol.md says, and no more.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack
import zmq

from ec_p2p.control.messages import PROTOCOL_VERSION, InstanceInfo
from tests.control.harness import Loop, advert, node

VERSION = 1
ONE, TWO = advert(1).identity, advert(2).identity
A = node(1).incarnation


def test_the_version_of_the_stream_is_the_one_that_is_documented() -> None:
    assert PROTOCOL_VERSION == VERSION


class Indexer:
    """Who holds what, by node: {incarnation: {identity: advert}}, and the instances of each."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.holds: dict[bytes, dict[bytes, list[Any]]] = {}
        self.names: dict[bytes, str] = {}
        self.instances: dict[bytes, list[Any]] = {}
        self.epoch, self.seq = b"", -1
        self.gaps = 0
        self.heard: list[Any] = []
        """Every event of the stream, for the test."""
        self._host = endpoint.rpartition(":")[0]
        self._dealer = context.socket(zmq.DEALER)
        self._sub = context.socket(zmq.SUB)
        for socket in (self._dealer, self._sub):
            socket.linger = 0
        self._dealer.connect(endpoint)
        self._subscribed = False
        self._token = 0
        self._building: dict[bytes, tuple[Any, dict[bytes, list[Any]], list[Any]]] | None = None
        self._kept: list[tuple[bytes, int, list[Any]]] = []
        self.subscribe()
        self._ask()

    @property
    def in_step(self) -> bool:
        return self._building is None

    def subscribe(self) -> None:
        self._sub.subscribe(b"ec")

    def unsubscribe(self) -> None:
        self._sub.unsubscribe(b"ec")

    def close(self) -> None:
        self._dealer.close()
        self._sub.close()

    def listen(self) -> None:
        while self._dealer.poll(0):
            tag, *fields = msgpack.unpackb(self._dealer.recv())
            if tag == "welcome":
                version, _, pub_port, *_ = fields
                assert version == VERSION
                if not self._subscribed:
                    self._subscribed = True
                    self._sub.connect(f"{self._host}:{pub_port}")
            elif tag == "snapshot":
                self._take(*fields)
        while self._sub.poll(0):
            topic, number, payload = self._sub.recv_multipart()
            tag, epoch, events, version = msgpack.unpackb(payload)
            assert (topic, len(number), tag, version) == (b"ec", 8, "events", VERSION)
            self._hear(epoch, int.from_bytes(number, "big"), events)

    def _ask(self) -> None:
        self._token += 1
        self._building = {}
        self._dealer.send(msgpack.packb(["snapshot?", VERSION, self._token]))

    def _take(self, token: int, index: int, epoch: bytes, seq: int, last: bool, nodes: list[Any]) -> None:
        if token != self._token or self._building is None:
            return
        for info, adverts, instances in nodes:
            _, known, _ = self._building.setdefault(info[0], (info, {}, instances))
            known.update((one[0], one) for one in adverts)
        if not last:
            return
        built, self._building = self._building, None
        self.holds = {incarnation: known for incarnation, (_, known, _) in built.items()}
        self.names = {incarnation: info[1] for incarnation, (info, _, _) in built.items()}
        self.instances = {incarnation: instances for incarnation, (_, _, instances) in built.items()}
        self.epoch, self.seq = epoch, seq
        kept, self._kept = self._kept, []
        for of, number, events in kept:
            if of == epoch and number > seq:
                self._hear(of, number, events)

    def _hear(self, epoch: bytes, number: int, events: list[Any]) -> None:
        if self._building is not None:
            if events:
                self._kept.append((epoch, number, events))
            return
        if epoch != self.epoch or number > self.seq + bool(events):
            self.gaps += 1
            self._ask()
        elif events and number == self.seq + 1:
            self.seq = number
            for event in events:
                self.heard.append(event)
                self._apply(*event)

    def _apply(self, tag: str, *fields: Any) -> None:
        if tag == "up":
            incarnation, name, *_ = fields[0]
            self.names[incarnation], self.holds[incarnation], self.instances[incarnation] = name, {}, []
        elif tag == "down":
            for known in (self.names, self.holds, self.instances):
                known.pop(fields[0], None)
        elif tag == "changed":
            incarnation, adverts, withdrawn, instances, *_ = fields
            known = self.holds[incarnation]
            for identity in withdrawn:
                known.pop(identity, None)
            known.update((one[0], one) for one in adverts)
            if instances is not None:
                self.instances[incarnation] = instances


def test_the_stream_tells_of_nodes_entries_and_instances(loop: Loop) -> None:
    directory = loop.directory(node_timeout_s=3600.0)
    indexer = Indexer(loop.context, directory.endpoint)
    try:
        loop.until(lambda: indexer.listen() or (indexer.in_step and indexer.epoch == directory.epoch))
        announcer = loop.announcer(directory.endpoint, node(1), timeout_s=3600.0)
        announcer.store(advert(1))
        loop.until(lambda: indexer.listen() or indexer.holds.get(A))
        announcer.store(advert(1, generation=2))
        announcer.store(advert(2))
        loop.until(lambda: indexer.listen() or TWO in indexer.holds[A])
        announcer.withdraw(ONE)
        announcer.describe([InstanceInfo("engine/dp0", "producer", "ab" * 32)])
        loop.until(lambda: indexer.listen() or indexer.instances[A])
        announcer.goodbye()
        loop.until(lambda: indexer.listen() or not indexer.names)
    finally:
        indexer.close()
    first, second = ([ONE, 1, 4096, 16, 128, "bfloat16", 4096, 64, generation] for generation in (1, 2))
    other = [TWO, 1, 4096, 16, 128, "bfloat16", 8192, 128, 1]
    assert indexer.heard == [
        ["up", [A, "host-1", "tcp://10.0.0.1:5000", 0, b""]],
        ["changed", A, [first], [], None],
        ["changed", A, [second, other], [], None],
        ["changed", A, [], [ONE], [["engine/dp0", "producer", "ab" * 32]]],
        ["down", A],
    ]


def test_a_new_subscriber_is_told_the_position_and_the_version_at_once(loop: Loop) -> None:
    directory = loop.directory(heartbeat_s=3600.0)
    with loop.context.socket(zmq.SUB) as sub:
        sub.subscribe(b"ec")
        sub.connect(f"{directory.endpoint.rpartition(':')[0]}:{directory.pub_port}")
        assert sub.poll(10_000)
        topic, number, payload = sub.recv_multipart()
    assert (topic, number) == (b"ec", bytes(8))
    assert msgpack.unpackb(payload) == ["events", directory.epoch, [], VERSION]


def test_what_was_missed_comes_with_a_snapshot(loop: Loop) -> None:
    directory = loop.directory(heartbeat_s=0.1)
    announcer = loop.announcer(directory.endpoint, node(1))
    announcer.store(advert(1))
    indexer = Indexer(loop.context, directory.endpoint)
    try:
        loop.until(lambda: indexer.listen() or (indexer.in_step and indexer.holds.get(A)))
        indexer.unsubscribe()
        announcer.withdraw(ONE)
        announcer.store(advert(2))
        announcer.describe([InstanceInfo("engine/dp0", "both", "n")])
        loop.until(lambda: directory.stats()["withdrawals"] == 1)
        gaps = indexer.gaps
        indexer.subscribe()
        loop.until(lambda: indexer.listen() or (indexer.in_step and list(indexer.holds[A]) == [TWO]))
        assert indexer.gaps > gaps
        assert indexer.instances == {A: [["engine/dp0", "both", "n"]]}
        assert indexer.names == {A: "host-1"}
    finally:
        indexer.close()


def test_another_indexer_ends_up_with_the_same_as_ours(loop: Loop) -> None:
    directory = loop.directory(heartbeat_s=0.1)
    chosen = random.Random(7)
    announcers = [loop.announcer(directory.endpoint, node(number)) for number in range(1, 4)]
    replica = loop.replica(directory.endpoint)
    indexer = Indexer(loop.context, directory.endpoint)
    try:
        for step in range(3000):
            announcer = chosen.choice(announcers)
            if chosen.random() < 0.7:
                announcer.store(advert(chosen.randrange(200), generation=step + 1))
            else:
                announcer.withdraw(advert(chosen.randrange(200)).identity)
            if step % 20 == 0:
                loop.turn(0)
                indexer.listen()
            if step % 1000 == 500:
                indexer.unsubscribe()
            if step % 1000 == 700:
                indexer.subscribe()

        def equal() -> bool:
            indexer.listen()
            at = (directory.epoch, directory.stats()["seq"])
            settled = all(announcer.connected and not announcer.pending for announcer in announcers)
            return settled and indexer.in_step and replica.position == at == (indexer.epoch, indexer.seq)

        loop.until(equal)
        ours = {
            known.incarnation: {one.identity: one.generation for one in replica.held_by(known.incarnation)}
            for known in replica.nodes()
        }
        theirs = {of: {identity: one[8] for identity, one in known.items()} for of, known in indexer.holds.items()}
        assert theirs == ours
        assert sum(map(len, ours.values())) > 100
    finally:
        indexer.close()
