"""Wants whose sources fail, one after the other: each item is answered, once, and by the last way that there is.

The arena, the leases, the fetches and the stagings are real; what is played is the other end of the wire, and the disk.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ec_p2p.control.messages import EntryState
from ec_p2p.node.messages import Landed, Missing, Pending, Want, WantItem
from ec_p2p.node.peers import PeerState
from ec_p2p.transport.interface import State

from .played import A, B, WantingRig, advert, holder


class NoDevices:
    """The device reads of a host without landers."""

    def find(self, instance, readers, identity):
        return None

    def bring(self, *asked):
        return False


class Answering(WantingRig):
    """Keeps what its clients are told."""

    def __init__(self):
        super().__init__()
        self.said = []
        self.serve(NoDevices(), lambda session, message: self.said.append((session.sid, message)))

    def want(self, *identities, sid=1, want=1, wait_ms=60_000, expect_ms=0, local_only=False):
        session = SimpleNamespace(sid=sid, attach=SimpleNamespace(instance=f"i{sid}", kind="tool"))
        items = [WantItem(identity, 0) for identity in identities]
        self.wants.start(session, Want(want, items, 0, wait_ms, expect_ms, local_only), self.now)

    def answers(self):
        return [(sid, message) for sid, message in self.said if not isinstance(message, Pending)]

    def until_answered(self, count=1):
        self.until(lambda: len(self.answers()) >= count, now=self.now)
        answers = self.answers()
        assert len(answers) == count
        return answers


@pytest.fixture
def rig():
    rig = Answering()
    yield rig
    rig.close()


def test_an_item_that_is_wanted_twice_is_fetched_once_and_answered_twice(rig):
    rig.holders_of = {A: [holder(1, advert())]}
    rig.want(A, A)
    rig.until_answered(2)
    assert [(message.index, type(message)) for _, message in rig.answers()] == [(0, Landed), (1, Landed)]
    assert rig.counters.get("fetches", outcome="landed", peer="node1") == 1
    assert rig.counters.get("wants", outcome="remote") == 2
    assert len(rig.wire.reads) == 2  # the payload, the record


def test_one_want_is_spread_over_holders_that_are_equal_otherwise(rig):
    identities = [bytes([number]) * 32 for number in range(40, 48)]
    adverts = {identity: advert(identity, rows=256) for identity in identities}

    def holders(identity):
        equals = [holder(number, adverts[identity]) for number in (1, 2)]
        return sorted(equals, key=lambda each: rig.fetches.outstanding(each[0].incarnation))

    rig.holders = holders
    rig.wire.state = State.POSTED
    rig.want(*identities)
    rig.fetches.turn(0.0)
    assert [rig.fetches.outstanding(number.to_bytes(16, "big")) for number in (1, 2)] == [4 * 256 * 128] * 2


def test_what_an_advert_says_of_the_size_is_asked_after_this_hosts_disk(rig):
    rig.disk.there = True
    rig.disk.let()
    rig.holders_of = {A: [holder(1, advert(A, nbytes=1 << 40))], B: []}
    rig.want(A, B)
    assert {type(message) for _, message in rig.until_answered(2)} == {Landed}


def test_of_holders_that_disagree_on_the_size_one_that_lies_refuses_nothing(rig):
    rig.disk.let()
    rig.holders_of = {A: [holder(1, advert(A, nbytes=1 << 40)), holder(2, advert(A))], B: []}
    rig.want(A, B)
    answers = {message.index: message for _, message in rig.until_answered(2)}
    assert isinstance(answers[0], Landed)


def test_an_item_that_is_wanted_twice_takes_its_room_once(rig):
    nbytes = rig.backend.largest_entry // 2 + 4096
    rig.holders_of = {
        A: [holder(1, advert(A, rows=nbytes // 2, dim=1))],
        B: [holder(1, advert(B, rows=nbytes // 2, dim=1))],
    }
    rig.wire.state = State.POSTED
    rig.want(A, B, A, B)
    assert [(message.index, message.reason) for _, message in rig.answers()] == [(1, "too_large"), (3, "too_large")]


def test_what_is_here_is_answered_at_once_and_an_entry_of_other_rows_is_no_hit(rig):
    for identity in (A, B):
        rig.memory.publish(rig.memory.reserve(128), identity, 128, 1, 64, "bfloat16")
    items = [WantItem(B, 1), WantItem(A, 2), WantItem(A, 0)]
    session = SimpleNamespace(sid=1, attach=SimpleNamespace(instance="i1", kind="tool"))
    rig.wants.start(session, Want(1, items, 0, 60_000, 0, False), rig.now)
    answers = {message.index: message for _, message in rig.answers()}
    assert answers[1] == Missing(1, 1, "rows")
    entries = {0: rig.backend.peek(B), 2: rig.backend.peek(A)}
    for index, entry in entries.items():
        landed = answers[index]
        assert (landed.offset, landed.nbytes, landed.source, landed.seconds) == (entry.offset, 128, "local", 0.0)
    assert answers[0].lease != answers[2].lease
    assert rig.counters.get("wants", outcome="local") == 2
    assert len(rig.wants) == 0
    assert rig.backend.pinned_bytes == 2 * 4096


def fetches_failed(rig, node="node1"):
    return sum(rig.counters.get("fetches", outcome=why, peer=node) for why in ("disconnected", "unusable"))


def test_after_the_last_failed_fetch_the_folder_is_looked_into(rig):
    """A holder that is gone may have written it there."""
    rig.wire.state = State.FAILED
    rig.holders_of[A] = [holder(1, advert())]
    rig.want(A)
    rig.until(lambda: rig.disk.begun == [A], now=0.0)
    assert fetches_failed(rig) == 2
    assert rig.answers() == []
    rig.disk.there = True
    rig.disk.let()
    [(_, answer)] = rig.until_answered()
    assert (type(answer), answer.source) == (Landed, "disk")
    assert rig.disk.begun == [A, A]  # a look, and a read


def test_what_is_not_in_the_folder_either_has_failed(rig):
    rig.wire.state = State.FAILED
    rig.holders_of[A] = [holder(1, advert())]
    rig.encoding.add(A)  # which is worth no waiting when what comes of it cannot be fetched
    rig.disk.let()
    rig.want(A)
    [(_, answer)] = rig.until_answered()
    assert (type(answer), answer.reason) == (Missing, "failed")
    assert (fetches_failed(rig), rig.disk.begun) == (2, [A])


def test_the_folder_is_looked_into_again_after_what_came_of_waiting_could_not_be_fetched(rig):
    rig.wire.state = State.FAILED
    rig.encoding.add(A)
    rig.disk.let()
    rig.want(A)
    rig.until(lambda: rig.disk.begun == [A] and not rig.staging.looking(A), now=0.0)
    assert rig.answers() == []
    rig.holders_of[A] = [holder(1, advert())]
    rig.wants.changed(A, rig.now)
    [(_, answer)] = rig.until_answered()
    assert (answer.reason, rig.disk.begun) == ("failed", [A, A])


def test_a_disk_that_hangs_is_not_waited_for_after_the_last_failed_fetch(rig):
    rig.staging.look(B)
    rig.turn(0.0)
    rig.turn(2.0)
    assert not rig.staging.can_look
    rig.wire.state = State.FAILED
    rig.holders_of[A] = [holder(1, advert())]
    rig.want(A)
    [(_, answer)] = rig.until_answered()
    assert answer.reason == "failed"


@pytest.mark.parametrize("silent", ["to a READ", "without a card"])
def test_who_was_waited_for_in_vain_is_not_waited_for_again(rig, silent):
    rig.disk.let()
    rig.wire.state = State.POSTED
    rig.wire.peer_state = PeerState.READY if silent == "to a READ" else None
    rig.holders_of[A] = [holder(1, advert())]
    rig.want(A)
    rig.turn(0.0)
    assert rig.answers() == []
    rig.now = 2.1
    [(_, answer)] = rig.until_answered()
    assert (type(answer), answer.reason) == (Missing, "failed")
    assert len(rig.wire.reads) == (1 if silent == "to a READ" else 0)


def test_a_holder_whose_disk_was_slow_is_asked_again(rig):
    rig.disk.let()
    rig.holders_of[A] = [holder(1, advert(state=EntryState.DISK))]
    rig.want(A)
    rig.turn(0.0)
    rig.now = 2.1
    rig.turn(rig.now)
    assert (rig.answers(), len(rig.wire.asked)) == ([], 2)
    rig.fetches.staged((1).to_bytes(16, "big"), A, advert(), rig.now)
    [(_, answer)] = rig.until_answered()
    assert type(answer) is Landed


def test_another_holder_is_tried_after_one_that_was_waited_for_in_vain(rig):
    rig.disk.let()
    rig.wire.state = State.POSTED
    rig.holders_of[A] = [holder(1, advert())]
    rig.want(A)
    rig.turn(0.0)
    rig.holders_of[A] = [holder(2, advert()), holder(1, advert())]
    rig.wire.state, rig.now = State.DONE, 2.1
    [(_, answer)] = rig.until_answered()
    assert type(answer) is Landed
    assert rig.wire.reads[-1][0] == (2).to_bytes(16, "big").hex()


def test_what_another_host_computes_is_not_waited_for_where_to_encode_it_takes_less_time(rig):
    rig.serve(NoDevices(), lambda session, message: rig.said.append((session.sid, message)), "cheaper")
    rig.disk.let()
    rig.encoders_of = {A: [holder(1, None)[0]]}
    rig.encode_times.committed("i1", rows=100, nbytes=100 * 128, announced_at=0.0, now=0.1)
    delivery = rig.rates.begun((1).to_bytes(16, "big"), rig.now)
    rig.now += 0.1
    delivery.done(1 << 20)
    session = SimpleNamespace(sid=1, attach=SimpleNamespace(instance="i1", kind="tool"))

    def ask(want, rows):
        items = [WantItem(A, rows, can_encode=True)]
        rig.wants.start(session, Want(want, items, 0, 60_000, 0, False), rig.now)
        rig.until(lambda: not rig.staging.looking(A), now=rig.now)
        return [message.reason for _, message in rig.answers() if message.want == want]

    assert ask(1, 100) == []
    delivery = rig.rates.begun((1).to_bytes(16, "big"), rig.now)
    rig.now += 20.0
    delivery.done(1 << 20)
    assert ask(2, 100) == ["encode_is_cheaper"]
    assert ask(3, 0) == [], "who does not say how large it is waits"


@pytest.mark.parametrize("policy", ["always", "cheaper", "never"])
def test_what_another_host_computes_is_waited_for_unless_it_would_not_be_fetched(rig, policy):
    rig.serve(NoDevices(), lambda session, message: rig.said.append((session.sid, message)), policy)
    rig.disk.let()
    rig.encoders_of = {A: [holder(1, None)[0]], B: [holder(1, None)[0]]}
    session = SimpleNamespace(sid=1, attach=SimpleNamespace(instance="i1", kind="tool"))
    items = [WantItem(A, 0, can_encode=True), WantItem(B, 0)]
    rig.wants.start(session, Want(1, items, 0, 60_000, 0, False), rig.now)
    rig.until(lambda: not rig.staging.looking(A) and not rig.staging.looking(B), now=0.0)
    answers = [(message.index, message.reason) for _, message in rig.answers()]
    assert answers == ([(0, "not_fetched")] if policy == "never" else [])
    rig.encoders_of.clear()
    rig.wants.changed(A, rig.now)
    rig.wants.changed(B, rig.now)
    assert {(message.index, message.reason) for _, message in rig.answers()} == {
        (0, "not_fetched" if policy == "never" else "no_source"),
        (1, "no_source"),
    }


@pytest.mark.parametrize("ends", ["lands", "fails"])
def test_very_many_who_wait_for_one_entry_are_each_answered_once(rig, ends):
    """More than there are frames on the stack: nobody's answer may be given from within another's."""
    count = 2000
    rig.disk.let()
    rig.wire.peer_state = None
    info, what = holder(1, advert())
    rig.holders_of[A] = [(info, what)]
    for sid in range(count):
        rig.want(A, sid=sid)
    rig.turn(0.0)
    assert rig.answers() == []
    rig.wire.peer_state = PeerState.READY if ends == "lands" else PeerState.UNUSABLE
    rig.fetches.peer_ready(SimpleNamespace(info=info), 0.0)
    answers = rig.until_answered(count)
    assert sorted(sid for sid, _ in answers) == list(range(count))
    assert {type(answer) for _, answer in answers} == {Landed if ends == "lands" else Missing}
    assert len({answer.lease for _, answer in answers if ends == "lands"}) == (count if ends == "lands" else 0)
    assert len(rig.wants) == 0


def test_who_waits_for_memory_to_read_from_disk_is_served_by_what_comes_another_way(rig):
    rig.disk.there = True
    everything = rig.everything()
    rig.want(A)
    rig.turn(1.0)
    assert (A in rig.staging, len(rig.memory)) == (True, 1)
    piece = rig.backend.carve(everything, 0, 4096)
    entry = rig.memory.publish(piece, A, 4096, 1, 2048, "bfloat16")
    rig.wants.changed(A, rig.now)
    [(_, answer)] = rig.until_answered()
    assert (type(answer), answer.offset) == (Landed, entry.offset)
    rig.memory.release(everything)
    rig.turn(1.0)
    assert (len(rig.staging), len(rig.memory), rig.disk.begun) == (0, 0, [])


def test_an_id_that_is_used_twice_is_not_answered_for_what_it_was_before(rig):
    rig.encoding |= {A, B}
    rig.disk.let()
    rig.want(A, want=7)
    rig.want(B, want=7)
    extent = rig.memory.reserve(256)
    rig.memory.publish(extent, A, 256, 1, 128, "bfloat16")
    rig.wants.landed([(rig.backend.peek(A), 0.0)], "remote")
    rig.wants.changed(A, rig.now)
    assert rig.answers() == []
    rig.memory.publish(rig.memory.reserve(128), B, 128, 1, 64, "bfloat16")
    rig.wants.changed(B, rig.now)
    [(_, answer)] = rig.until_answered()
    assert answer.nbytes == 128


def test_what_is_here_is_leased_before_what_is_fetched_makes_room_for_itself(rig):
    nbytes = 350 << 10
    rig.memory.publish(rig.memory.reserve(nbytes), A, nbytes, 1, nbytes, "int8")
    rig.memory.reserve(rig.backend.free_bytes - (100 << 10))
    rig.holders_of[B] = [holder(1, advert(B, rows=nbytes // 2, dim=1))]
    rig.want(B, A)
    [(_, answer)] = rig.until_answered()
    assert (type(answer), answer.index, answer.source) == (Landed, 1, "local")
    assert (B in rig.fetches, len(rig.memory)) == (True, 1)


def test_what_is_answered_at_once_is_not_said_to_be_pending(rig):
    rig.holders_of[A] = [holder(1, advert())]
    rig.want(A)
    rig.turn(0.0)
    rig.wants.turn(0.0)
    assert [type(message) for _, message in rig.said] == [Landed]
    rig.encoding.add(B)
    rig.disk.let()
    rig.want(B)
    assert len(rig.said) == 1
    rig.wants.turn(0.0)
    rig.wants.turn(0.0)
    assert [type(message) for _, message in rig.said[1:]] == [Pending]


def test_who_waits_for_an_encode_here_is_not_out_of_time_with_a_fetch_of_others(rig):
    rig.disk.let()
    rig.encoding.add(A)
    rig.want(A, sid=1, local_only=True)
    rig.holders_of[A] = [holder(1, advert())]
    rig.wire.state = State.POSTED
    rig.want(A, sid=2, wait_ms=100)
    rig.until(lambda: rig.wire.readings, now=rig.now)
    rig.wire.readings[-1].state = State.FAILED
    rig.now += 1.0
    [(sid, answer)] = rig.until_answered()
    assert (sid, answer.reason) == (2, "deadline")
    rig.memory.publish(rig.memory.reserve(128), A, 128, 1, 64, "bfloat16")
    rig.wants.changed(A, rig.now)
    assert [(sid, type(message)) for sid, message in rig.answers()] == [(2, Missing), (1, Landed)]
