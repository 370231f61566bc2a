"""A follower ends equal to the directory, whatever was lost, repeated or restarted on the way; with virtual time."""

from __future__ import annotations

import random

import pytest

from ec_p2p.control.follower import Follower
from ec_p2p.control.messages import (
    Advert,
    Announce,
    Changed,
    Event,
    Events,
    Goodbye,
    Heartbeat,
    Hello,
    NodeInfo,
    NodeUp,
    SnapshotChunk,
    SnapshotNode,
)
from ec_p2p.control.state import DirectoryState, chunks
from ec_p2p.control.table import Table
from tests.control.harness import advert, node

TIMEOUT_S = 4.0
E1, E2 = b"1" * 16, b"2" * 16
A, B = node(1), node(2)


def make() -> tuple[Table, Follower]:
    table = Table(lambda identity: None, lambda node, up: None)
    return table, Follower(table, TIMEOUT_S)


def content(table: Table) -> dict[NodeInfo, dict[bytes, Advert]]:
    found: dict[NodeInfo, dict[bytes, Advert]] = {info: {} for info in table.nodes()}
    for identity in table.identities():
        for info, entry in table.lookup(identity):
            found[info][identity] = entry
    return found


def chunk(token: int, epoch: bytes, seq: int, *nodes: SnapshotNode, index: int = 0, last: bool = True) -> SnapshotChunk:
    return SnapshotChunk(token, index, epoch, seq, last, list(nodes))


def synced(epoch: bytes = E1, seq: int = 5) -> tuple[Table, Follower]:
    """A follower that knows A with entry 1, and B without any."""
    table, follower = make()
    assert follower.wants_snapshot(0.0)
    follower.take_chunk(
        chunk(follower.request(0.0), epoch, seq, SnapshotNode(A, [advert(1)]), SnapshotNode(B, [])), 0.0
    )
    follower.take_events(seq, Events(epoch, []), 10, 0.0)
    assert follower.position == (epoch, seq)
    assert follower.fresh(0.0)
    return table, follower


def heard(follower: Follower, epoch: bytes, now: float) -> None:
    """The directory says that it lives, and that nothing has changed."""
    position = follower.position
    assert position
    follower.take_events(position[1], Events(epoch, []), 10, now)
    follower.tick(now)


def change(*adverts: Advert) -> list[Event]:
    return [Changed(B.incarnation, list(adverts), [])]


def test_changes_in_sequence_are_applied() -> None:
    table, follower = synced()
    follower.take_events(6, Events(E1, change(advert(2))), 10, 0.0)
    assert follower.position == (E1, 6)
    assert table.lookup(advert(2).identity) == [(B, advert(2))]


def test_a_repeated_publication_is_ignored() -> None:
    table, follower = synced()
    follower.take_events(5, Events(E1, change(advert(2))), 10, 0.0)
    assert follower.position == (E1, 5)
    assert table.lookup(advert(2).identity) == []


class Owner:
    """Of a table: raises when it is told of what is in `fails`."""

    def __init__(self) -> None:
        self.fails: set[bytes] = set()

    def on_change(self, identity: bytes) -> None:
        if identity in self.fails:
            raise RuntimeError("of the owner")


def owned() -> tuple[Owner, Table, Follower]:
    owner = Owner()
    table = Table(owner.on_change, lambda node, up: None)
    return owner, table, Follower(table, TIMEOUT_S)


def test_an_owner_that_fails_in_the_middle_of_a_publication_gets_a_snapshot() -> None:
    owner, table, follower = owned()
    follower.take_chunk(chunk(follower.request(0.0), E1, 5, SnapshotNode(B, [])), 0.0)
    follower.take_events(5, Events(E1, []), 10, 0.0)
    owner.fails = {advert(1).identity}
    with pytest.raises(RuntimeError, match="of the owner"):
        follower.take_events(6, Events(E1, [*change(advert(1)), *change(advert(2))]), 10, 0.0)
    assert follower.position is None
    assert follower.wants_snapshot(0.0)
    follower.take_events(7, Events(E1, change(advert(3))), 10, 0.0)
    follower.take_chunk(chunk(follower.request(0.0), E1, 6, SnapshotNode(B, [advert(1), advert(2)])), 0.0)
    assert follower.position == (E1, 7)
    assert content(table) == {B: {advert(number).identity: advert(number) for number in (1, 2, 3)}}


def test_an_owner_that_fails_with_what_was_kept_gets_another_snapshot() -> None:
    owner, table, follower = owned()
    token = follower.request(0.0)
    for seq in (6, 7, 8):
        follower.take_events(seq, Events(E1, change(advert(seq))), 10, 0.0)
    owner.fails = {advert(6).identity}
    with pytest.raises(RuntimeError, match="of the owner"):
        follower.take_chunk(chunk(token, E1, 5, SnapshotNode(B, [])), 0.0)
    assert follower.position is None
    follower.take_chunk(chunk(follower.request(1.0), E1, 7, SnapshotNode(B, [advert(6), advert(7)])), 1.0)
    assert follower.position == (E1, 8)
    assert content(table) == {B: {advert(number).identity: advert(number) for number in (6, 7, 8)}}


def test_an_owner_that_fails_in_the_middle_of_a_snapshot_gets_another() -> None:
    owner, table, follower = owned()
    token = follower.request(0.0)
    nodes = SnapshotNode(A, [advert(1)]), SnapshotNode(B, [advert(2)])
    owner.fails = {advert(1).identity}
    with pytest.raises(RuntimeError, match="of the owner"):
        follower.take_chunk(chunk(token, E1, 5, *nodes, last=False), 0.0)
    follower.take_chunk(chunk(token, E1, 5, index=1), 0.0)
    assert follower.position is None
    assert follower.wants_snapshot(0.0)
    owner.fails = set()
    follower.take_chunk(chunk(follower.request(0.0), E1, 5, *nodes), 0.0)
    assert content(table) == {A: {advert(1).identity: advert(1)}, B: {advert(2).identity: advert(2)}}


def test_a_gap_is_mended_by_a_snapshot_and_what_came_meanwhile() -> None:
    table, follower = synced()
    follower.take_events(7, Events(E1, change(advert(3))), 10, 0.0)
    assert follower.position is None
    assert table.lookup(advert(3).identity) == []
    token = follower.request(0.0)
    follower.take_events(8, Events(E1, change(advert(4))), 10, 0.0)
    follower.take_chunk(chunk(token, E1, 7, SnapshotNode(B, [advert(2), advert(3)])), 0.0)
    assert follower.position == (E1, 8)
    assert content(table) == {B: {advert(n).identity: advert(n) for n in (2, 3, 4)}}


def test_a_heartbeat_tells_of_a_lost_tail() -> None:
    _, follower = synced()
    follower.take_events(6, Events(E1, []), 10, 0.0)
    assert follower.position is None
    assert follower.wants_snapshot(0.0)


def test_a_snapshot_older_than_what_was_kept_is_asked_for_again() -> None:
    _, follower = synced()
    follower.take_events(9, Events(E1, change(advert(9))), 10, 0.0)
    follower.take_chunk(chunk(follower.request(0.0), E1, 7, SnapshotNode(B, [])), 0.0)
    assert follower.position is None
    follower.take_chunk(chunk(follower.request(1.0), E1, 8, SnapshotNode(B, [])), 1.0)
    assert follower.position == (E1, 9)


def test_a_gap_inside_what_is_kept_spoils_the_snapshot_under_way() -> None:
    _, follower = synced()
    follower.take_events(7, Events(E1, change(advert(7))), 10, 0.0)
    token = follower.request(0.0)
    follower.take_chunk(chunk(token, E1, 7, last=False), 0.0)
    follower.take_events(9, Events(E1, change(advert(9))), 10, 0.0)
    follower.take_chunk(chunk(token, E1, 7, index=1), 0.0)
    assert follower.position is None
    assert follower.wants_snapshot(20.0)


def test_a_missing_chunk_spoils_the_snapshot() -> None:
    table, follower = make()
    token = follower.request(0.0)
    follower.take_chunk(chunk(token, E1, 5, SnapshotNode(A, [advert(1)]), last=False), 0.0)
    follower.take_chunk(chunk(token, E1, 5, SnapshotNode(A, [advert(3)]), index=2), 0.0)
    assert follower.position is None
    assert table.lookup(advert(3).identity) == []


def test_an_answer_to_an_earlier_request_does_not_count() -> None:
    _, follower = make()
    earlier = follower.request(0.0)
    follower.request(10.0)
    follower.take_chunk(chunk(earlier, E1, 5), 10.0)
    assert follower.position is None


def test_an_unanswered_request_is_repeated_less_and_less_often() -> None:
    _, follower = make()
    waits = []
    now = 0.0
    for _ in range(6):
        follower.request(now)
        waits.append(follower.next_event() - now)
        assert not follower.wants_snapshot(now + waits[-1] - 0.01)
        now += waits[-1]
        assert follower.wants_snapshot(now)
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == 10.0


def test_a_directory_may_be_away_for_days() -> None:
    _, follower = make()
    now = 0.0
    for _ in range(3000):
        follower.request(now)
        now = follower.next_event()
    follower.take_chunk(chunk(follower.request(now), E1, 5, last=False), now)
    follower.spoil(now)
    assert now < follower.next_event() <= now + 10.0


def test_silence_keeps_the_view_but_it_is_not_fresh() -> None:
    table, follower = synced()
    follower.tick(TIMEOUT_S + 0.1)
    assert not follower.fresh(TIMEOUT_S + 0.1)
    assert follower.wants_snapshot(TIMEOUT_S + 0.1)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]


def test_nodes_outlive_a_directory_that_comes_back_empty_until_it_had_time_to_hear_them() -> None:
    table, follower = synced()
    follower.take_events(0, Events(E2, []), 10, 1.0)
    follower.take_chunk(chunk(follower.request(1.0), E2, 0), 1.0)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]
    follower.take_events(1, Events(E2, [NodeUp(B)]), 10, 2.0)
    heard(follower, E2, 1.0 + TIMEOUT_S)
    assert content(table) == {B: {}}


def test_a_second_snapshot_of_the_new_life_does_not_cut_that_time_short() -> None:
    table, follower = synced()
    follower.take_events(0, Events(E2, []), 10, 1.0)
    for now, seq in ((1.0, 0), (2.0, 2)):
        follower.take_events(seq, Events(E2, []), 10, now)
        follower.take_chunk(chunk(follower.request(now), E2, seq), now)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]


def test_each_of_two_lives_in_a_row_has_its_time_to_hear_the_nodes() -> None:
    table, follower = synced()
    for epoch, now in ((E2, 1.0), (b"3" * 16, 1.0 + TIMEOUT_S - 0.1)):
        follower.take_events(0, Events(epoch, []), 10, now)
        follower.take_chunk(chunk(follower.request(now), epoch, 0), now)
    heard(follower, b"3" * 16, 2 * TIMEOUT_S)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]
    heard(follower, b"3" * 16, 1.0 + 2 * TIMEOUT_S)
    assert content(table) == {}


@pytest.mark.parametrize("missed", [0, 1])
def test_a_directory_that_is_silent_after_it_came_back_empty_has_said_nothing_against_a_node(missed: int) -> None:
    table, follower = synced()
    follower.take_events(0, Events(E2, []), 10, 1.0)
    follower.take_chunk(chunk(follower.request(1.0), E2, 0), 1.0)
    follower.take_events(missed, Events(E2, []), 10, 1.0)
    follower.tick(1.0 + TIMEOUT_S)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]
    follower.tick(20.0)
    follower.take_events(missed, Events(E2, []), 10, 20.0)
    follower.take_chunk(chunk(follower.request(20.0), E2, missed), 20.0)
    heard(follower, E2, 19.9 + TIMEOUT_S)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]
    heard(follower, E2, 20.0 + TIMEOUT_S)
    assert content(table) == {}


def test_a_node_that_a_snapshot_puts_another_in_place_of_is_not_doubted_but_gone() -> None:
    table, follower = synced()
    reborn = node(1, life=1)
    follower.take_events(0, Events(E2, []), 10, 1.0)
    follower.take_chunk(chunk(follower.request(1.0), E2, 0), 1.0)
    assert follower.doubts_node(A.incarnation)
    follower.take_events(5, Events(E2, []), 10, 2.0)
    follower.take_chunk(chunk(follower.request(2.0), E2, 5, SnapshotNode(reborn, [])), 2.0)
    assert table.nodes() == [B, reborn]
    assert [follower.doubts_node(info.incarnation) for info in (A, B, reborn)] == [False, True, False]


def test_a_node_that_says_hello_again_is_believed_until_it_had_time_to_repeat_itself() -> None:
    table, follower = synced()
    follower.take_events(6, Events(E1, [NodeUp(A)]), 10, 0.0)
    assert table.lookup(advert(1).identity) == [(A, advert(1))]
    follower.take_events(7, Events(E1, [Changed(A.incarnation, [advert(2)], [])]), 10, 1.0)
    follower.take_events(7, Events(E1, []), 10, TIMEOUT_S)
    follower.tick(TIMEOUT_S)
    assert content(table) == {A: {advert(2).identity: advert(2)}, B: {}}


def test_a_snapshot_in_the_middle_of_that_does_not_cut_it_short() -> None:
    table, follower = synced()
    follower.take_events(6, Events(E1, [NodeUp(A)]), 10, 0.0)
    follower.take_events(9, Events(E1, []), 10, 1.0)
    follower.take_chunk(chunk(follower.request(1.0), E1, 9, SnapshotNode(A, [advert(2)])), 1.0)
    assert len(content(table)[A]) == 2
    follower.take_events(9, Events(E1, []), 10, TIMEOUT_S)
    follower.tick(TIMEOUT_S)
    assert content(table) == {A: {advert(2).identity: advert(2)}}


def test_within_one_life_a_node_that_a_snapshot_does_not_name_is_gone_and_an_advert_doubted() -> None:
    """The advert may have been withdrawn, or its node may be saying everything again just now."""
    table, follower = synced()
    follower.take_events(9, Events(E1, []), 10, 0.0)
    follower.take_chunk(chunk(follower.request(0.0), E1, 9, SnapshotNode(A, [])), 0.0)
    assert content(table) == {A: {advert(1).identity: advert(1)}}
    assert follower.doubted(A.incarnation) == {advert(1).identity}
    heard(follower, E1, TIMEOUT_S)
    assert content(table) == {A: {}}


def test_a_copy_is_settled_when_the_directory_had_time_to_hear_every_node() -> None:
    _, follower = synced()
    follower.take_events(5, Events(E1, []), 10, TIMEOUT_S - 0.1)
    assert not follower.settled(TIMEOUT_S - 0.1)
    follower.take_events(5, Events(E1, []), 10, TIMEOUT_S)
    assert follower.settled(TIMEOUT_S)
    follower.take_events(6, Events(E1, [NodeUp(A)]), 10, TIMEOUT_S)
    assert not follower.settled(TIMEOUT_S)
    follower.take_events(7, Events(E1, [Changed(A.incarnation, [advert(1)], [])]), 10, TIMEOUT_S)
    assert follower.settled(TIMEOUT_S)
    now = 2 * TIMEOUT_S + 0.1
    assert not follower.settled(now)
    follower.tick(now)
    follower.take_events(7, Events(E1, []), 10, now)
    follower.take_chunk(chunk(follower.request(now), E1, 7, SnapshotNode(A, [advert(1)]), SnapshotNode(B, [])), now)
    assert follower.fresh(now)
    assert not follower.settled(now)
    heard(follower, E1, now + TIMEOUT_S)
    assert follower.settled(now + TIMEOUT_S)


class Network:
    """One directory (its real state, a plain publisher around it), three nodes, a follower, lossy links, virtual time.

    After every step, a follower that stands at a position knows exactly what the directory knew there.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.generation = 0
        self.lives = 0
        self.held: dict[NodeInfo, dict[bytes, Advert]] = {}
        self.sent: dict[NodeInfo, int] = {}
        self.published: list[tuple[int, Events]] = []
        self.answers: list[SnapshotChunk] = []
        self.history: dict[tuple[bytes, int], dict[NodeInfo, dict[bytes, Advert]]] = {}
        self.table, self.follower = make()
        self.directory_starts()

    def step(self) -> None:
        actions = {
            self.node_stores: 20,
            self.node_withdraws: 10,
            self.publications_arrive: 20,
            self.publications_are_lost: 2,
            self.answers_arrive: 10,
            self.an_answer_is_lost_or_repeated: 1,
            self.time_passes: 10,
            self.node_starts: 3,
            self.node_greets_again: 1,
            self.node_leaves: 1,
            self.node_dies: 1,
            self.directory_starts: 0.3,
        }
        (action,) = self.random.choices(list(actions), list(actions.values()))
        action()
        self.check()

    def check(self) -> None:
        position = self.follower.position
        if position:
            assert self.undoubted() == {info: held for info, held in self.history[position].items() if held}

    def undoubted(self) -> dict[NodeInfo, dict[bytes, Advert]]:
        """What the table says for sure, nodes without any adverts left out."""
        found = {}
        for info, held in content(self.table).items():
            doubted = self.follower.doubted(info.incarnation)
            found[info] = {identity: entry for identity, entry in held.items() if identity not in doubted}
        return {info: held for info, held in found.items() if held}

    def heal(self) -> None:
        """Nothing is lost any more, until well after every timeout."""
        for _ in range(60):
            self.time_passes()
            while self.published or self.answers:
                self.publications_arrive()
                self.answers_arrive()
        self.check()

    def known(self) -> dict[NodeInfo, dict[bytes, Advert]]:
        return {part.node: {entry.identity: entry for entry in part.adverts} for part in self.state.snapshot()}

    # the directory

    def directory_starts(self) -> None:
        self.state = DirectoryState(TIMEOUT_S)
        self.lives += 1
        self.epoch = self.lives.to_bytes(16, "big")
        self.seq = 0
        self.history[self.epoch, 0] = {}
        self.answers.clear()

    def publish(self, events: list[Event] | None) -> None:
        self.seq += bool(events)
        self.history[self.epoch, self.seq] = self.known()
        self.published.append((self.seq, Events(self.epoch, events or [])))

    def answer(self, token: int) -> None:
        parts = list(chunks(self.state.snapshot(), adverts_per_chunk=22))
        self.answers = [
            SnapshotChunk(token, index, self.epoch, self.seq, index == len(parts) - 1, part)
            for index, part in enumerate(parts)
        ]

    # the nodes: as an announcer does, numbered changes, and everything again when the directory asks for it

    def tell(self, info: NodeInfo, adverts: list[Advert], withdrawn: list[bytes]) -> None:
        self.sent[info] += 1
        events = self.state.apply(Announce(info.incarnation, self.sent[info], adverts, withdrawn), b"r", self.now)
        if events is None:
            self.greet(info)
        else:
            self.publish(events)

    def greet(self, info: NodeInfo) -> None:
        self.publish(self.state.apply(Hello(1, info), b"r", self.now))
        self.sent[info] = 0
        self.tell(info, list(self.held[info].values()), [])

    def some_node(self) -> NodeInfo | None:
        return self.random.choice(list(self.held)) if self.held else None

    def node_starts(self) -> None:
        number = self.random.randint(1, 3)
        self.held = {info: held for info, held in self.held.items() if info.name != node(number).name}
        self.generation += 1
        info = NodeInfo(self.generation.to_bytes(16, "big"), node(number).name, node(number).address)
        self.held[info] = {}
        self.greet(info)

    def node_greets_again(self) -> None:
        if info := self.some_node():
            self.greet(info)

    def node_leaves(self) -> None:
        if info := self.some_node():
            del self.held[info]
            self.publish(self.state.apply(Goodbye(info.incarnation), b"r", self.now))

    def node_dies(self) -> None:
        if info := self.some_node():
            del self.held[info]

    def node_stores(self) -> None:
        if info := self.some_node():
            self.generation += 1
            entry = advert(self.random.randint(0, 5), self.generation)
            self.held[info][entry.identity] = entry
            self.tell(info, [entry], [])

    def node_withdraws(self) -> None:
        info = self.some_node()
        if info and self.held[info]:
            identity = self.random.choice(list(self.held[info]))
            del self.held[info][identity]
            self.tell(info, [], [identity])

    # the links

    def publications_arrive(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            if self.published:
                seq, message = self.published.pop(0)
                self.follower.take_events(seq, message, 10, self.now)
                self.check()

    def publications_are_lost(self) -> None:
        index = self.random.randint(0, 3)
        del self.published[index : index + self.random.randint(1, 4)]

    def answers_arrive(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            if self.answers:
                self.follower.take_chunk(self.answers.pop(0), self.now)
                self.check()

    def an_answer_is_lost_or_repeated(self) -> None:
        index = self.random.randint(0, 2)
        self.answers[index : index + 1] = self.answers[index : index + 1] * self.random.choice([0, 2])

    def time_passes(self) -> None:
        self.now += self.random.choice([0.1, 0.5])
        self.follower.tick(self.now)
        for info in list(self.held):
            if self.state.apply(Heartbeat(info.incarnation, self.sent[info]), b"r", self.now) is None:
                self.greet(info)
        self.publish(self.state.expire(self.now))
        if self.follower.wants_snapshot(self.now):
            self.answer(self.follower.request(self.now))


@pytest.mark.parametrize("seed", range(40))
def test_it_is_right_at_every_position_and_ends_equal_to_the_directory(seed: int) -> None:
    network = Network(seed)
    for _ in range(400):
        network.step()
    network.heal()
    assert network.follower.counters["gaps"] > 0
    assert network.follower.fresh(network.now)
    assert content(network.table) == network.known() == network.held
