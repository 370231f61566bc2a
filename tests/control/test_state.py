"""What a directory knows: rule by rule, and as a whole against a plain model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ec_p2p.control.codec import MAX_FRAME, encode
from ec_p2p.control.messages import (
    Advert,
    Announce,
    Changed,
    Event,
    Goodbye,
    Heartbeat,
    Hello,
    NodeDown,
    NodeInfo,
    NodeUp,
    SnapshotChunk,
    SnapshotNode,
)
from ec_p2p.control.state import DirectoryState, chunks
from tests.control.harness import advert, node

A, B = node(1), node(2)


def hello(info: NodeInfo) -> Hello:
    return Hello(1, info)


def announce(info: NodeInfo, seq: int, *adverts: Advert, withdrawn: tuple[bytes, ...] = ()) -> Announce:
    return Announce(info.incarnation, seq, list(adverts), list(withdrawn))


def known(state: DirectoryState) -> dict[NodeInfo, list[Advert]]:
    return {part.node: part.adverts for part in state.snapshot()}


def with_a(*adverts: Advert) -> DirectoryState:
    state = DirectoryState(4.0)
    assert state.apply(hello(A), b"route", 0.0) == [NodeUp(A)]
    if adverts:
        assert state.apply(announce(A, 1, *adverts), b"route", 0.0) == [Changed(A.incarnation, list(adverts), [])]
    return state


def test_announcements_add_replace_and_withdraw() -> None:
    state = with_a(advert(1), advert(2))
    state.apply(
        announce(A, 2, advert(2, generation=7), withdrawn=(advert(1).identity, advert(9).identity)), b"route", 1.0
    )
    assert known(state) == {A: [advert(2, generation=7)]}
    assert state.entries == 1


def test_withdrawals_come_before_adverts_of_the_same_message() -> None:
    state = with_a(advert(1))
    state.apply(announce(A, 2, advert(1, generation=2), withdrawn=(advert(1).identity,)), b"route", 1.0)
    assert known(state) == {A: [advert(1, generation=2)]}


def test_a_stranger_must_say_hello() -> None:
    state = DirectoryState(4.0)
    assert state.apply(announce(A, 1, advert(1)), b"route", 0.0) is None
    assert state.apply(Heartbeat(A.incarnation, 0), b"route", 0.0) is None
    assert state.apply(Goodbye(A.incarnation), b"route", 0.0) == []
    assert known(state) == {}


def test_a_gap_changes_nothing_and_asks_for_hello() -> None:
    state = with_a(advert(1))
    assert state.apply(announce(A, 3, advert(3)), b"route", 0.0) is None
    assert state.apply(Heartbeat(A.incarnation, 2), b"route", 0.0) is None
    assert known(state) == {A: [advert(1)]}


def test_a_number_that_was_heard_before_changes_nothing_and_asks_for_hello() -> None:
    """The node has said hello since, and that was lost: what it announces now is everything, numbered from 1."""
    state = with_a(advert(1), advert(2))
    assert state.apply(announce(A, 1, advert(5)), b"route", 0.0) is None
    assert known(state) == {A: [advert(1), advert(2)]}


def test_what_comes_by_another_connection_than_the_hello_is_not_believed() -> None:
    state = with_a()
    assert state.apply(announce(A, 1, advert(1)), b"older route", 0.0) is None
    assert state.apply(Heartbeat(A.incarnation, 0), b"older route", 0.0) is None
    assert known(state) == {A: []}


def test_a_second_hello_drops_what_was_known() -> None:
    state = with_a(advert(1))
    moved = node(1, address="tcp://10.0.0.99:1")
    assert state.apply(hello(moved), b"new route", 1.0) == [NodeUp(moved)]
    assert known(state) == {moved: []}
    assert (len(state), state.entries) == (1, 0)
    assert state.apply(announce(moved, 1, advert(2)), b"new route", 1.0) is not None


def test_a_restart_at_the_same_address_ends_the_old_incarnation() -> None:
    state = with_a(advert(1))
    reborn = node(1, life=1)
    assert state.apply(hello(reborn), b"new route", 1.0) == [NodeDown(A.incarnation), NodeUp(reborn)]
    assert known(state) == {reborn: []}
    assert state.apply(Heartbeat(A.incarnation, 1), b"route", 1.0) is None


def test_the_same_name_elsewhere_is_another_node() -> None:
    state = with_a(advert(1))
    twin = NodeInfo(b"t" * 16, A.name, "tcp://10.9.9.9:1")
    assert state.apply(hello(twin), b"twin", 1.0) == [NodeUp(twin)]
    assert set(known(state)) == {A, twin}


def test_goodbye_takes_everything_at_once() -> None:
    state = with_a(advert(1))
    assert state.apply(Goodbye(A.incarnation), b"any route", 1.0) == [NodeDown(A.incarnation)]
    assert (known(state), len(state), state.entries) == ({}, 0, 0)


def test_silent_nodes_expire_and_heard_ones_stay() -> None:
    state = with_a(advert(1))
    state.apply(hello(B), b"b", 0.0)
    for now in (0.5, 1.0, 2.0, 3.0, 4.0):
        state.apply(Heartbeat(B.incarnation, 0), b"b", now)
        assert state.expire(now) == []
    assert state.expire(4.5) == [NodeDown(A.incarnation)]
    assert known(state) == {B: []}


def test_a_directory_that_slept_blames_nobody() -> None:
    state = with_a(advert(1))
    assert state.expire(1.0) == []
    assert state.expire(100.0) == []
    for now in (101.0, 102.0, 103.0, 104.0):
        assert state.expire(now) == []
    assert state.expire(104.5) == [NodeDown(A.incarnation)]


def test_a_snapshot_is_not_changed_by_what_comes_later() -> None:
    state = with_a(advert(1))
    snapshot = state.snapshot()
    state.apply(announce(A, 2, advert(2)), b"route", 0.0)
    assert snapshot == [SnapshotNode(A, [advert(1)])]


def test_chunks_hold_everything_once_and_fit_their_frames() -> None:
    largest = (1 << 63) - 1
    wide = NodeInfo(b"w" * 16, "\U0001f600" * 255, "\U0001f600" * 255)
    entry = Advert(b"k" * 32, 2, largest, largest, largest, "\U0001f600" * 16, largest, largest, (1 << 64) - 1)
    nodes = [SnapshotNode(wide, [])] * 500 + [SnapshotNode(wide, [entry] * 5000)] + [SnapshotNode(wide, [entry])] * 300
    parts = list(chunks(nodes))
    assert len(parts) > 5
    assert all(len(encode(SnapshotChunk(0, 0, b"e" * 16, largest, False, part))) < MAX_FRAME for part in parts)
    assert sum(len(piece.adverts) for part in parts for piece in part) == 5300
    assert sum(not piece.adverts for part in parts for piece in part) == 500


def test_nothing_known_is_one_empty_chunk() -> None:
    assert list(chunks([])) == [[]]


class DirectoryMachine(RuleBasedStateMachine):
    """Any order of any messages: the state is the model's, and the events rebuild it."""

    nodes = st.builds(
        node, st.integers(1, 3), life=st.integers(0, 1), address=st.sampled_from(["", "tcp://10.0.0.9:9"])
    )
    routes = st.sampled_from([b"r1", b"r2"])

    @initialize()
    def begin(self) -> None:
        self.state = DirectoryState(4.0)
        self.now = 0.0
        self.model: dict[bytes, tuple[NodeInfo, bytes, int, float]] = {}
        self.entries: dict[bytes, dict[bytes, Advert]] = {}
        self.rebuilt: dict[bytes, dict[bytes, Advert]] = {}

    def replay(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, NodeUp):
                self.rebuilt[event.node.incarnation] = {}
            elif isinstance(event, NodeDown):
                del self.rebuilt[event.incarnation]
            else:
                held = self.rebuilt[event.incarnation]
                for identity in event.withdrawn:
                    held.pop(identity, None)
                held.update({advert.identity: advert for advert in event.adverts})

    def forget(self, incarnation: bytes) -> None:
        del self.model[incarnation], self.entries[incarnation]

    @rule(info=nodes, route=routes)
    def hello(self, info: NodeInfo, route: bytes) -> None:
        for incarnation, (other, *_) in list(self.model.items()):
            if (other.name, other.address) == (info.name, info.address) and other != info:
                self.forget(incarnation)
        self.model[info.incarnation] = (info, route, 0, self.now)
        self.entries[info.incarnation] = {}
        events = self.state.apply(hello(info), route, self.now)
        assert events is not None
        self.replay(events)

    @rule(
        info=nodes,
        route=routes,
        step=st.sampled_from([1, 1, 1, 0, 2]),
        numbers=st.lists(st.integers(0, 5), max_size=4),
        gone=st.lists(st.integers(0, 5), max_size=3),
        generation=st.integers(1, 3),
    )
    def announce(
        self, info: NodeInfo, route: bytes, step: int, numbers: list[int], gone: list[int], generation: int
    ) -> None:
        model = self.model.get(info.incarnation)
        seq = (model[2] if model else 0) + step
        adverts = [advert(number, generation) for number in numbers]
        withdrawn = tuple(advert(number).identity for number in gone)
        events = self.state.apply(announce(info, seq, *adverts, withdrawn=withdrawn), route, self.now)
        if model is None or model[1] != route:
            assert events is None
            return
        self.model[info.incarnation] = (model[0], route, model[2], self.now)
        if step != 1:
            assert events is None
        else:
            assert events is not None
            self.model[info.incarnation] = (model[0], route, seq, self.now)
            held = self.entries[info.incarnation]
            for identity in withdrawn:
                held.pop(identity, None)
            held.update({entry.identity: entry for entry in adverts})
            self.replay(events)

    @rule(info=nodes, route=routes, ahead=st.sampled_from([0, 0, 1]))
    def heartbeat(self, info: NodeInfo, route: bytes, ahead: int) -> None:
        model = self.model.get(info.incarnation)
        seq = (model[2] if model else 0) + ahead
        events = self.state.apply(Heartbeat(info.incarnation, seq), route, self.now)
        if model and model[1] == route:
            self.model[info.incarnation] = (*model[:3], self.now)
            assert events == (None if ahead else [])
        else:
            assert events is None

    @rule(info=nodes, route=routes)
    def goodbye(self, info: NodeInfo, route: bytes) -> None:
        events = self.state.apply(Goodbye(info.incarnation), route, self.now)
        assert events is not None
        if info.incarnation in self.model:
            self.forget(info.incarnation)
        self.replay(events)

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for incarnation, (*_, heard) in list(self.model.items()):
            if self.now - heard > 4.0:
                self.forget(incarnation)
        self.replay(self.state.expire(self.now))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        found = {
            part.node.incarnation: (part.node, {entry.identity: entry for entry in part.adverts})
            for part in self.state.snapshot()
        }
        assert found == {key: (info, self.entries[key]) for key, (info, *_) in self.model.items()}
        assert self.rebuilt == self.entries
        assert self.state.entries == sum(map(len, self.entries.values()))
        assert len(self.state) == len(self.model)


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=60, stateful_step_count=40)
