"""READs on devices as the node orders them: who is promised what, whatever its landers, peers and clients do.

Wants, leases, fetches and the arena are real; what is played are the landers, and the other end of the wire.
"""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ec_p2p.engine.generation import RECORD_BYTES, Record, pack
from ec_p2p.node.device_reads import DeviceReads
from ec_p2p.node.messages import (
    DropEntry,
    Landed,
    Missing,
    PeerCard,
    PeerGone,
    Pending,
    ReadEnded,
    ReadEntry,
    Want,
    WantItem,
)
from ec_p2p.transport.interface import State

from . import played
from .played import A, B, C, D, holder

WAIT_S = 8.0
READ_TIMEOUT_S = 2.0


class Client:
    """A session of the node: keeps what it hears."""

    def __init__(self, sid, kind, instance, rank=-1):
        self.sid = sid
        self.attach = SimpleNamespace(kind=kind, instance=instance, rank=rank)
        self.heard = []

    def __repr__(self):
        return f"<{self.attach.kind} {self.sid} of {self.attach.instance}, rank {self.attach.rank}>"


class Lander(Client):
    """Does what it is told, when the test says so. Speaks up where it is told nonsense."""

    def __init__(self, *who):
        super().__init__(*who)
        self.cards = {}
        self.reading = {}
        self.landed = set()

    def hear(self, message):
        match message:
            case PeerCard():
                self.cards[message.peer] = message.blob
            case PeerGone():
                self.cards.pop(message.peer, None)
            case ReadEntry():
                assert message.peer in self.cards
                assert message.read not in {*self.reading, *self.landed}
                self.reading[message.read] = message
            case DropEntry():
                self.reading.pop(message.read, None)
                self.landed.discard(message.read)


def advert(identity, **changes):
    """Each entry has a record of its own at its holders."""
    return msgspec.structs.replace(played.advert(identity, **changes), record=RECORD_BYTES * identity[0])


class Wire(played.Wire):
    def read(self, peer, spans):
        reading = super().read(peer, spans)
        for span in spans:
            if span.remote < played.PAYLOAD:
                first = span.remote // RECORD_BYTES
                identities = [bytes([first + index]) * 32 for index in range(span.nbytes // RECORD_BYTES)]
                records = b"".join(pack(Record(7, each, 128, 1, 64, "bfloat16")) for each in identities)
                self.arena.buffer[span.local : span.local + span.nbytes] = records
        return reading


class Peers(played.Peers):
    def __init__(self, wire):
        super().__init__(wire)
        self.gone = set()
        self.revision = 1

    def get(self, incarnation):
        peer = None if incarnation in self.gone else super().get(incarnation)
        if peer is not None:
            peer.revision, peer.blob = self.revision, b"card %d" % self.revision
        return peer


class Host(played.WantingRig):
    """A node's wants with their fetches and device reads, and the sessions of its clients."""

    def __init__(self):
        super().__init__()
        self.wire.__class__ = Wire
        self.clients = []
        self.peers = Peers(self.wire)
        self.holders_of = {A: [holder(1, advert(A)), holder(2, advert(A))], B: [holder(1, advert(B))]}
        self.next_sid = 0
        self.next_want = 0
        self.device_reads = DeviceReads(
            self,
            self.peers,
            self.rates,
            self.counters,
            READ_TIMEOUT_S,
            lambda read: self.wants.landed_on_device(read),
            lambda instance, identity: self.wants.not_on_device(instance, identity, self.now),
        )
        self.serve(self.device_reads, self.send)

    def holders(self, identity):
        return [each for each in self.holders_of[identity] if each[0].incarnation not in self.peers.gone]

    # sessions

    def landers_of(self, instance):
        return {c.attach.rank: c for c in self.clients if isinstance(c, Lander) and c.attach.instance == instance}

    def send(self, session, message):
        session.heard.append(message)
        if isinstance(session, Lander):
            session.hear(message)

    def attach(self, kind, instance, rank=-1):
        self.next_sid += 1
        self.clients.append((Lander if kind == "lander" else Client)(self.next_sid, kind, instance, rank))
        return self.clients[-1]

    def leave(self, client):
        self.clients.remove(client)
        self.wants.forget_session(client)
        if client.attach.kind == "lander":
            self.device_reads.lander_gone(client)

    # what clients say

    def want(self, client, *identities, readers=1, wait_s=WAIT_S, landing="device"):
        self.next_want += 1
        items = [WantItem(identity, 0) for identity in identities]
        want = Want(self.next_want, items, readers, round(wait_s * 1000), 0, False, landing)
        self.wants.start(client, want, self.now)
        return self.next_want

    def ended(self, lander, read=None, reason=""):
        """A lander says how a READ has ended: the last one that it was told of, unless said otherwise."""
        read = max(lander.reading) if read is None else read
        if lander.reading.pop(read, None) is not None and not reason:
            lander.landed.add(read)
        self.device_reads.answered(lander, ReadEnded(read, reason), self.now)

    def peer_gone(self, incarnation):
        self.peers.gone.add(incarnation)
        self.device_reads.peer_gone(incarnation)
        self.fetches.peer_gone(incarnation, self.now)

    def pass_time(self, seconds):
        self.now += seconds
        self.device_reads.tick(self.now)
        self.turn(self.now)
        self.wants.tick(self.now)
        self.wants.turn(self.now)


def answers(client):
    return [message for message in client.heard if isinstance(message, Landed | Missing)]


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


def outcome(host, word):
    return host.counters.get("device_reads", outcome=word)


def test_what_has_landed_for_one_reader_is_not_promised_to_two(host):
    engine = host.attach("scheduler", "x")
    first, second = host.attach("lander", "x", 0), host.attach("lander", "x", 1)
    host.want(engine, A, readers=1)
    host.want(engine, A, readers=2)
    assert (len(first.reading), len(second.reading)) == (2, 1)
    host.ended(first, min(first.reading))
    [alone] = answers(engine)
    assert second.landed == set()
    host.ended(second)
    assert answers(engine) == [alone]
    host.ended(first)
    together = answers(engine)[-1]
    assert {together.read} == second.landed
    host.want(engine, A, readers=2)
    host.want(engine, A, readers=1)
    assert [answer.read for answer in answers(engine)[-2:]] == [together.read, alone.read]


def test_reads_in_flight_together_are_measured_together(host):
    engine, lander = host.attach("scheduler", "x"), host.attach("lander", "x", 0)
    large = {identity: advert(identity, rows=2400) for identity in (A, B)}
    host.holders_of = {identity: [holder(1, what)] for identity, what in large.items()}
    host.want(engine, A, B)
    for read in sorted(lander.reading):
        host.pass_time(0.1)
        host.ended(lander, read)
    nbytes = sum(what.nbytes for what in large.values())
    assert host.rates.expected_s((1).to_bytes(16, "big"), nbytes) == pytest.approx(0.2)


def test_what_lands_too_late_for_those_who_wanted_it_tells_of_its_holder_all_the_same(host):
    engine, lander = host.attach("scheduler", "x"), host.attach("lander", "x", 0)
    host.holders_of = {A: [holder(1, advert(A, rows=1 << 16))]}
    host.wire.state = State.POSTED
    host.want(engine, A, wait_s=1.0)
    host.pass_time(0.6)
    host.ended(lander)
    assert outcome(host, "deadline") == 1
    assert host.rates.expected_s((1).to_bytes(16, "big"), (1 << 16) * 128) == pytest.approx(0.6)


def test_who_joins_a_hurried_read_may_wait_longer(host):
    engine, lander = host.attach("scheduler", "x"), host.attach("lander", "x", 0)
    host.wire.state = State.POSTED
    host.want(engine, A, wait_s=0.5)
    host.want(engine, A, wait_s=4.0)
    host.pass_time(1.0)
    host.ended(lander)
    [late, landed] = sorted(answers(engine), key=lambda answer: answer.want)
    assert (type(late), type(landed), landed.read in lander.landed) == (Missing, Landed, True)


def test_what_has_landed_is_not_promised_to_those_who_came_after(host):
    """An instance that starts again beside what is left of it."""
    old, new = host.attach("scheduler", "x"), host.attach("scheduler", "x")
    before = host.attach("lander", "x", 0)
    host.want(old, A)
    host.ended(before)
    [landed] = answers(old)
    after = host.attach("lander", "x", 0)
    host.want(new, A)
    assert answers(new) == []
    host.ended(after)
    assert {answers(new)[0].read} == after.landed
    assert before.landed == {landed.read}, "it is leased still"
    host.leave(old)
    assert before.landed == set()
    assert len(after.landed) == 1


def test_what_lands_after_its_lander_was_replaced_is_fetched_into_the_arena(host):
    engine = host.attach("scheduler", "x")
    before = host.attach("lander", "x", 0)
    host.want(engine, A)
    host.attach("lander", "x", 0)
    host.ended(before)
    assert (answers(engine), before.landed) == ([], set())
    host.pass_time(0.0)
    [landed] = answers(engine)
    assert (landed.read, landed.source) == (0, "remote")
    assert (outcome(host, "gone"), outcome(host, "landed")) == (1, 0)


def test_what_has_landed_is_not_promised_when_one_of_its_landers_is_gone(host):
    engine = host.attach("scheduler", "x")
    first, second = host.attach("lander", "x", 0), host.attach("lander", "x", 1)
    host.want(engine, A, readers=2)
    host.ended(first)
    host.leave(first)  # it has landed there, and is needed there
    assert second.reading == {}, "nobody waits for the other one any more"
    host.ended(second, 1)
    assert answers(engine) == []
    host.pass_time(0.0)
    assert [answer.read for answer in answers(engine)] == [0]


def test_a_lease_keeps_what_has_landed_whatever_becomes_of_a_lander(host):
    engine = host.attach("scheduler", "x")
    first, second = host.attach("lander", "x", 0), host.attach("lander", "x", 1)
    host.want(engine, A, readers=2)
    host.ended(first)
    host.ended(second)
    host.leave(first)
    assert second.landed
    [landed] = answers(engine)
    host.leases.drop(landed.lease, engine.sid)
    assert (second.landed, len(host.device_reads)) == (set(), 0)


def test_a_lander_that_does_not_answer_leaves_time_for_the_arena(host):
    engine = host.attach("scheduler", "x")
    silent = host.attach("lander", "x", 0)
    host.want(engine, A, wait_s=3.0)
    host.pass_time(1.4)
    assert answers(engine) == []
    host.pass_time(0.2)
    host.pass_time(0.0)
    assert [answer.read for answer in answers(engine)] == [0]
    assert (outcome(host, "silent"), len(silent.reading)) == (0, 1)
    host.pass_time(2 * READ_TIMEOUT_S - 1.6)
    assert (outcome(host, "silent"), silent.reading) == (1, {})
    host.want(engine, B)
    assert silent.reading == {}


@pytest.mark.parametrize("ends", ["lands", "stays", "fails"])
def test_a_want_in_a_hurry_turns_nothing_off(host, ends):
    """Its time is over before the lander, which is well, could have answered."""
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    host.want(engine, A, wait_s=0.06)
    host.pass_time(0.04)
    host.pass_time(0.0)
    assert [answer.read for answer in answers(engine)] == [0]
    host.want(engine, B)
    first, second = sorted(lander.reading)
    if ends != "stays":
        host.ended(lander, first, "" if ends == "lands" else "changed")
        assert outcome(host, "deadline" if ends == "lands" else "changed") == 1
        assert lander.landed == set(), "nobody needs it"
    host.ended(lander, second)
    assert [answer.read for answer in answers(engine)] == [0, second]
    host.pass_time(2 * READ_TIMEOUT_S)
    assert (outcome(host, "silent"), lander.reading) == (0, {})


def test_what_somebody_in_a_hurry_has_given_up_can_be_read_again(host):
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    host.want(engine, A, wait_s=0.06)
    host.pass_time(0.04)
    host.pass_time(0.0)
    [in_the_arena] = answers(engine)
    host.leases.drop(in_the_arena.lease, engine.sid)
    host.backend.remove(A)
    host.want(engine, A)
    first, second = sorted(lander.reading)
    host.ended(lander, first)
    host.ended(lander, second)
    assert lander.landed == {second}


def test_a_lander_that_goes_takes_what_was_given_up_with_it(host):
    engine = host.attach("scheduler", "x")
    first, second = host.attach("lander", "x", 0), host.attach("lander", "x", 1)
    host.want(engine, A, readers=2, wait_s=0.06)
    host.ended(first)
    host.pass_time(0.04)
    host.leave(second)
    assert (first.landed, outcome(host, "gone")) == (set(), 1)
    assert list(host.device_reads.deadlines()) == []


def test_a_lander_that_does_not_answer_is_left_alone_for_a_while_and_no_holder_is_blamed(host):
    engine, other = host.attach("scheduler", "x"), host.attach("scheduler", "y")
    silent, awake = host.attach("lander", "x", 0), host.attach("lander", "y", 0)
    host.want(engine, A)
    host.pass_time(2 * READ_TIMEOUT_S)
    host.want(other, B)
    host.want(engine, B)
    assert (silent.reading, len(awake.reading)) == ({}, 1)
    assert not any(host.rates.distrusted(info.incarnation) for info, _ in host.holders_of[A])
    host.pass_time(10.0)
    host.holders_of[C] = [holder(2, advert(C))]
    host.want(engine, C)
    assert len(silent.reading) == 1


def test_a_lander_that_answers_others_meanwhile_is_late_and_not_silent(host):
    engine = host.attach("scheduler", "x")
    slow = host.attach("lander", "x", 0)
    host.want(engine, A, B)
    host.pass_time(1.0)
    host.ended(slow)
    host.pass_time(2 * READ_TIMEOUT_S)
    assert (outcome(host, "silent"), outcome(host, "late")) == (0, 1)


def test_what_one_device_cannot_read_others_can(host):
    engine, other = host.attach("scheduler", "x"), host.attach("scheduler", "y")
    unable, able = host.attach("lander", "x", 0), host.attach("lander", "y", 0)
    host.want(engine, A)
    host.ended(unable, reason="refused")
    host.want(other, B)
    host.want(engine, B)
    assert (unable.reading, len(able.reading)) == ({}, 1)
    assert not host.rates.distrusted(holder(1, None)[0].incarnation)


@pytest.mark.parametrize("reason", ["late", "disconnected"])
def test_a_read_that_broke_is_not_tried_again_at_the_same_holder_first(host, reason):
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    host.want(engine, A)
    host.ended(lander, reason=reason)
    assert host.rates.distrusted(holder(1, None)[0].incarnation)


def test_what_has_changed_at_the_holder_is_nobodys_fault(host):
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    host.want(engine, A)
    host.ended(lander, reason="changed")
    host.want(engine, B)
    assert len(lander.reading) == 1
    assert not host.rates.distrusted(holder(1, None)[0].incarnation)


def test_a_lander_may_say_anything(host):
    engine = host.attach("scheduler", "x")
    first, second = host.attach("lander", "x", 0), host.attach("lander", "x", 1)
    stranger, third = host.attach("lander", "y", 0), host.attach("lander", "x", 7)
    host.want(engine, A, readers=2)
    for liar in (stranger, third, engine):
        for reason in ("", "late"):
            host.device_reads.answered(liar, ReadEnded(1, reason), 0.0)
    host.ended(first)
    host.ended(first, 1)
    host.ended(first, 1, "late")
    host.ended(first, 99)
    assert answers(engine) == []
    host.ended(second, reason="it is " * 100)
    host.ended(second, 1)
    host.pass_time(0.0)
    assert [answer.read for answer in answers(engine)] == [0]
    words = {labels[0][1] for (name, labels), _ in host.counters.values().items() if name == "device_reads"}
    assert words == {"error"}, "what a client says is no label"


@pytest.mark.parametrize("way", ["fetch", "disk"])
def test_who_waits_for_a_device_is_not_concerned_by_what_finds_no_room_in_the_arena(host, way):
    """Or by how somebody else's fetch of the same entry fails."""
    engine, other = host.attach("scheduler", "x"), host.attach("scheduler", "y")
    lander = host.attach("lander", "x", 0)
    host.want(engine, A)
    everything = host.everything()
    host.disk.there = way == "disk"
    host.want(other, A, landing="host", wait_s=1.0)
    assert (A in host.fetches, A in host.staging) == (way == "fetch", way == "disk")
    host.pass_time(1.0)
    host.pass_time(0.0)
    assert [type(answer) for answer in answers(other)] == [Missing]
    assert answers(engine) == []
    host.ended(lander)
    assert [answer.read for answer in answers(engine)] == [1]
    host.memory.release(everything)


def test_an_advert_of_which_no_tensor_can_be_made_is_read_by_no_device(host):
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    host.holders_of[A] = [holder(1, advert(A, dtype="")), holder(2, advert(A, nbytes=127))]
    host.want(engine, A)
    assert lander.reading == {}


def test_cards_are_told_once_for_each_revision_and_again_when_a_peer_is_back(host):
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    peer = holder(1, None)[0].incarnation
    host.want(engine, A)
    host.want(engine, B)
    assert [message.blob for message in lander.heard if isinstance(message, PeerCard)] == [b"card 1"]
    for _ in range(2):
        host.ended(lander, reason="no_memory")
    host.peers.revision = 2
    host.holders_of[C] = [holder(1, advert(C))]
    host.want(engine, C)
    assert lander.cards == {peer: b"card 2"}
    host.peer_gone(peer)
    assert lander.cards == {}
    host.peers.gone.clear()
    host.ended(lander, reason="disconnected")
    host.pass_time(10.0)
    host.holders_of[D] = [holder(1, advert(D))]
    host.want(engine, D)
    assert lander.cards == {peer: b"card 2"}


def test_a_lander_that_does_not_know_a_holder_is_told_its_card_again(host):
    engine = host.attach("scheduler", "x")
    lander = host.attach("lander", "x", 0)
    host.want(engine, A)
    lander.cards.clear()
    host.ended(lander, reason="refused")
    host.pass_time(10.0)
    host.want(engine, B)
    assert len(lander.cards) == len(lander.reading) == 1
    host.ended(lander, reason="refused")
    host.peer_gone(holder(1, None)[0].incarnation)
    assert lander.cards == {}


class Machine(RuleBasedStateMachine):
    """Two instances with up to two readers, four entries, two holders, and everybody comes, goes and lies."""

    instances = st.sampled_from("xy")
    ranks = st.integers(0, 1)

    def __init__(self):
        super().__init__()
        self.host = Host()
        for identity in (B, C, D):
            self.host.holders_of[identity] = [holder(2, advert(identity)), holder(1, advert(identity))]
        self.asked = {}
        """want -> (session, items, deadline)"""
        self.leases = {}
        """lease -> (session, read, the landers that must have it)"""
        for instance in "xy":
            self.host.attach("scheduler", instance)
            for rank in range(2):
                self.host.attach("lander", instance, rank)

    @property
    def schedulers(self):
        return [client for client in self.host.clients if client.attach.kind == "scheduler"]

    @property
    def landers(self):
        return [client for client in self.host.clients if isinstance(client, Lander)]

    # clients come and go

    @rule(instance=instances, rank=ranks)
    def lander_comes(self, instance, rank):
        self.host.attach("lander", instance, rank)

    @rule(instance=instances)
    def scheduler_comes(self, instance):
        self.host.attach("scheduler", instance)

    @precondition(lambda self: self.host.clients)
    @rule(data=st.data())
    def somebody_goes(self, data):
        client = data.draw(st.sampled_from(self.host.clients))
        self.hear()
        self.leases = {lease: held for lease, held in self.leases.items() if held[0] is not client}
        self.asked = {want: asked for want, asked in self.asked.items() if asked[0] is not client}
        self.host.leave(client)

    # what they say

    @precondition(lambda self: self.schedulers)
    @rule(
        data=st.data(),
        identities=st.lists(st.sampled_from([A, B, C, D]), min_size=1, max_size=3),
        readers=st.integers(0, 2),
        landing=st.sampled_from(["device", "device", "host"]),
        wait_s=st.sampled_from([WAIT_S, WAIT_S, 0.75]),
    )
    def want(self, data, identities, readers, landing, wait_s):
        scheduler = data.draw(st.sampled_from(self.schedulers))
        want = self.host.next_want + 1
        self.asked[want] = (scheduler, readers, set(range(len(identities))), self.host.now + wait_s)
        assert self.host.want(scheduler, *identities, readers=readers, landing=landing, wait_s=wait_s) == want

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def forget(self, data):
        want = data.draw(st.sampled_from(sorted(self.asked)))
        session, _, _, _ = self.asked.pop(want)
        self.host.wants.forget(session, want)
        self.leases = {lease: held for lease, held in self.leases.items() if held[3] != want}

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.host.leases.drop(lease, self.leases.pop(lease)[0].sid)

    @precondition(lambda self: any(lander.reading for lander in self.landers))
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "no_memory", "late", "refused", "nonsense"]))
    def read_ended(self, data, reason):
        lander = data.draw(st.sampled_from([lander for lander in self.landers if lander.reading]))
        self.host.ended(lander, data.draw(st.sampled_from(sorted(lander.reading))), reason)

    @rule(count=st.integers(1, 4))
    def what_is_read_lands(self, count):
        for lander in self.landers:
            for read in sorted(lander.reading)[:count]:
                self.host.ended(lander, read)

    @precondition(lambda self: self.landers)
    @rule(data=st.data(), read=st.integers(0, 6), reason=st.sampled_from(["", "late", "gone"]))
    def lie(self, data, read, reason):
        lander = data.draw(st.sampled_from(self.landers))
        if read not in lander.reading:
            self.host.device_reads.answered(lander, ReadEnded(read, reason), self.host.now)

    # the fleet, and time

    @rule(number=st.integers(1, 2), back=st.booleans())
    def a_peer_goes(self, number, back):
        self.host.peer_gone(holder(number, None)[0].incarnation)
        if back:
            self.peers_come_back()

    @precondition(lambda self: self.host.peers.gone)
    @rule()
    def peers_come_back(self):
        self.host.peers.gone.clear()
        self.host.peers.revision += 1

    @rule(state=st.sampled_from([State.DONE, State.FAILED, None]))
    def the_wire(self, state):
        """How READs into the arena end from now on. None: they are refused."""
        self.host.wire.state = state

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 9.0, 20.0]))
    def time_passes(self, seconds):
        self.host.pass_time(seconds)
        for _, _, open_items, deadline in self.asked.values():
            self.hear()
            assert not open_items or self.host.now < deadline

    @rule(identity=st.sampled_from([A, B, C, D]))
    def the_arena_lets_go(self, identity):
        self.host.backend.remove(identity)

    # what must hold

    @invariant()
    def hear(self):
        """Each item is answered once, and what is promised has landed on the devices of all who will load it."""
        for client in self.host.clients:
            if client.attach.kind != "scheduler":
                continue
            heard = [message for message in client.heard if not isinstance(message, Pending)]
            client.heard = []
            for message in heard:
                _, readers, open_items, _ = self.asked[message.want]
                open_items.remove(message.index)
                if isinstance(message, Landed):
                    landers = self.host.landers_of(client.attach.instance) if message.read else {}
                    keepers = [landers[rank] for rank in range(readers)] if message.read else []
                    assert not message.read or readers
                    self.leases[message.lease] = (client, message.read, keepers, message.want)

    @invariant()
    def what_is_leased_stays(self):
        for _, read, keepers, _ in self.leases.values():
            for lander in keepers:
                assert lander not in self.host.clients or read in lander.landed
        assert len(self.host.leases) == len(self.leases)

    @invariant()
    def what_nobody_has_leased_does_not(self):
        leased = {read for _, read, _, _ in self.leases.values()}
        ordered = {read for lander in self.landers for read in lander.reading}
        for lander in self.landers:
            assert lander.landed <= leased | ordered

    def teardown(self):
        self.hear()
        for scheduler in self.schedulers:
            self.host.leave(scheduler)
        self.host.pass_time(WAIT_S)
        assert len(self.host.device_reads) == len(self.host.leases) == len(self.host.wants) == 0
        for lander in self.landers:
            assert (lander.landed, lander.reading) == (set(), {})
            self.host.leave(lander)
        for left in ("_told", "_heard_at", "_by_number"):
            assert not getattr(self.host.device_reads, left)
        self.host.pass_time(10.0)
        assert not self.host.device_reads._avoid
        self.host.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=50)
