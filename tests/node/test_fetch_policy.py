"""Whether to fetch what could also be encoded: by what was measured, and in real nodes by what was configured."""

from __future__ import annotations

import pytest

from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.node.fetch_policy import EncodeTimes, FetchPolicy
from ec_p2p.node.messages import Encoding, Landed, Missing, WantItem
from ec_p2p.node.rates import Rates

from .conftest import PATIENCE_S, until

A, B = bytes([1]) * 32, bytes([2]) * 32
MIB = 1 << 20
ROWS = 100
HOLDER = (
    NodeInfo(bytes(16), "n", "tcp://h:1"),
    Advert(A, EntryState.RESIDENT, 4 * MIB, ROWS, 1, "bfloat16", 0, 0, 1),
)


def rates(seconds):
    found = Rates(lambda: 100.0)
    found.begun(HOLDER[0].incarnation, 100.0 - seconds).done(4 * MIB)
    return found


def times(seconds):
    found = EncodeTimes()
    found.committed("engine", ROWS, 4 * MIB, 10.0, 10.0 + seconds)
    return found


@pytest.mark.parametrize(
    ("policy", "fetch_s", "encode_s", "against"),
    [
        ("always", 9.0, 0.1, ""),
        ("never", 0.1, 9.0, "not_fetched"),
        ("cheaper", 0.1, 0.2, ""),
        ("cheaper", 0.2, 0.1, "encode_is_cheaper"),
    ],
)
def test_what_each_policy_says(policy, fetch_s, encode_s, against):
    assert FetchPolicy(policy, rates(fetch_s), times(encode_s)).against([HOLDER]) == against


def test_what_was_never_measured_is_fetched():
    assert FetchPolicy("cheaper", Rates(), times(0.0001)).against([HOLDER]) == ""
    assert FetchPolicy("cheaper", rates(9.0), EncodeTimes()).against([HOLDER]) == ""


def test_who_has_just_failed_is_not_asked_instead_of_encoding():
    found = Rates(lambda: 100.0)
    found.failed(HOLDER[0].incarnation)
    assert FetchPolicy("cheaper", found, times(9.0)).against([HOLDER]) == "encode_is_cheaper"
    assert FetchPolicy("always", found, times(9.0)).against([HOLDER]) == ""


@pytest.mark.parametrize(
    ("policy", "rows", "against"),
    [
        ("always", ROWS, ""),
        ("never", 0, "not_fetched"),
        ("cheaper", 0, ""),
        ("cheaper", ROWS, "encode_is_cheaper"),
    ],
)
def test_what_would_not_be_fetched_is_not_waited_for(policy, rows, against):
    encoder, stranger = HOLDER[0], NodeInfo(bytes([1]) * 16, "s", "tcp://h:2")
    found = FetchPolicy(policy, rates(0.2), times(0.1))
    assert found.against_waiting([encoder], rows) == against
    if policy == "cheaper":
        assert found.against_waiting([encoder, stranger], rows) == "", "one of them was never measured"
        assert FetchPolicy(policy, rates(0.1), times(0.2)).against_waiting([encoder], rows) == ""


def test_encodes_of_one_step_share_its_time():
    found = EncodeTimes()
    for moment in (11.0, 11.001, 11.002, 11.003):
        found.committed("engine", 25, MIB, 10.0, moment)
    assert found.seconds_per_row == pytest.approx(0.01, rel=0.3)


def test_instances_are_timed_on_their_own():
    found = EncodeTimes()
    found.committed("one", 10, MIB, 0.0, 1.0)
    found.committed("other", 10, MIB, 0.5, 1.5)
    assert found.seconds_per_row == pytest.approx(0.1)
    found.forget("one")
    found.committed("one", 10, MIB, 2.0, 3.0)
    assert found.seconds_per_row == pytest.approx(0.1)


def want(client, identity, *, can_encode):
    number = client.node.want([WantItem(identity, 0, can_encode)], readers=0, wait_s=PATIENCE_S, expect_s=0.0)
    answer = client.expect((Landed, Missing), lambda message: message.want == number)
    client.release(answer)
    return answer


def test_a_node_that_never_fetches_still_does_for_those_who_cannot_encode(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b", b={"fetch_policy": "never"})
    holder.store(A, b"x" * 128)
    reader.has_landed(A)
    holder.store(B, b"y" * 128)
    until(lambda: want(reader, B, can_encode=True).reason == "not_fetched", "the advert to be there, and refused")
    assert isinstance(want(reader, B, can_encode=False), Landed)
    assert isinstance(want(reader, B, can_encode=True), Landed), "what is here needs no fetch"


def test_a_node_that_encodes_faster_than_it_fetches_says_so(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b", b={"fetch_policy": "cheaper"})
    holder.store(A, bytes(MIB))
    reader.has_landed(A)  # measured: one fetch
    reader.node.send(Encoding([B]))
    reader.store(B, bytes(128), dim=1)  # measured: 64 rows in no time
    many_rows = bytes([3]) * 32
    holder.store(many_rows, bytes(MIB))
    outcomes = []

    def decided():
        outcomes.append(getattr(want(reader, many_rows, can_encode=True), "reason", "landed"))
        return outcomes[-1] != "no_source"

    until(decided, "the advert to be there")
    counted = reader.inspect()
    assert counted.gauges["encode_seconds_per_row"] > 0
    assert outcomes[-1] in ("landed", "encode_is_cheaper")  # this machine decides which
    assert ("wants{outcome=encode_is_cheaper}" in counted.counters) == (outcomes[-1] == "encode_is_cheaper")
