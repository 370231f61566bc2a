"""Holders that die, stop, or vanish behind a wire, at every step of a transfer and over every link.

Whatever they do: each item of a want is answered once; what another has comes from there; what was detained is seen,
bounded and comes back; the arena is whole; the next fetch works; and who comes back is read from again.
"""

from __future__ import annotations

import os

import pytest

from ec_p2p.node.messages import WantItem
from ec_p2p.transport import nixl_available

from .conftest import until
from .gated_node import CARD, PAYLOADS, PAYLOADS_POSTED, RECORDS, RECORDS_POSTED, STAGE, UP
from .misbehaving import IMPATIENT, SHARED_MEMORY, TCP, ZMQ, kept_open, payload_of
from .wires import EVERYTHING, HOLDER_DROPS, HOLDER_LOST_ROUTE, LINK_DOWN, READER_DROPS, Wires, why_no_wires

KILLED, RESUMED, FROZEN_THEN_KILLED = WAYS = "killed", "frozen, then resumed", "frozen, then killed"
STEPS = (UP, CARD, PAYLOADS, PAYLOADS_POSTED, RECORDS, RECORDS_POSTED, STAGE)


def over(link, *values):
    """A case, for those who have what its link needs."""
    needs_nixl = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]
    return pytest.param(link, *values, marks=[] if link == ZMQ else needs_nixl)


@pytest.fixture(scope="module")
def plays():
    """A reader and a steady holder for all cases of a link; each case has a victim of its own."""
    with kept_open() as over:
        yield over


# Each link meets each step, and each of them meets each way: steps and ways take turns.
@pytest.mark.parametrize(
    ("link", "step", "way"),
    [
        over(link, step, WAYS[(shift + place) % len(WAYS)])
        for shift, link in enumerate((SHARED_MEMORY, TCP, ZMQ))
        for place, step in enumerate(STEPS)
    ],
)
def test_a_holder_that_is_killed_or_frozen(plays, link, step, way):
    play = plays(link)
    with play.victim(step) as (victim, want):
        if way == KILLED:
            victim.node.kill()
        else:
            victim.node.freeze()
        play.reader_node.go_on()
        landed = play.what_landed(want, victim.wanted)
        assert victim.shared in landed, "another holder has it"
        detained = play.accounts_for_its_memory()
        if link == ZMQ:
            assert detained == 0
        elif way == KILLED:
            # The library may hear of its death only after the READ was late.
            until(lambda: play.accounts_for_its_memory() == 0, "nothing to be detained by who is dead")
        elif link == TCP:
            assert (detained > 0) is (step not in (UP, STAGE)), (
                "where a READ was on its way to a process that stands still"
            )
        elif step in (PAYLOADS, PAYLOADS_POSTED, RECORDS, RECORDS_POSTED):
            assert (detained, landed) == (0, victim.wanted), "its memory can be read although it stands still"
        if way == RESUMED:
            victim.node.thaw()
            play.has_landed(victim.later)
            assert victim.node.process.poll() is None
        else:
            victim.node.kill()
        play.is_whole()
        next_one = os.urandom(32)
        play.steady.store(next_one, payload_of(next_one))
        play.has_landed(next_one)


@pytest.mark.parametrize("step", [PAYLOADS_POSTED, RECORDS_POSTED])
@pytest.mark.parametrize("link", [over(SHARED_MEMORY), over(TCP), over(ZMQ)])
def test_a_reader_that_is_killed_leaves_its_holder_alone(plays, link, step):
    play = plays(link)
    victim = play.start(f"reader{len(play.nodes)}", gated=True)
    client = play.client(victim)
    identities = [os.urandom(32) for _ in range(6)]
    for identity in identities:
        play.steady.store(identity, payload_of(identity))
    client.has_landed(identities[-1])  # which was stored last: the others are known
    victim.stop_at(step)
    for identity in identities[:-1]:
        client.node.want([WantItem(identity, 0)], readers=0, wait_s=20.0, expect_s=1.0)
    victim.await_stop()
    victim.kill()
    for identity in identities:
        play.has_landed(identity)
    assert play.nodes[0].process.poll() is None
    play.is_whole()


# ---------------------------------------------------------------- wires


@pytest.fixture(scope="module")
def wires():
    why_not = why_no_wires()
    if why_not:
        pytest.skip(why_not)
    wires = Wires()
    yield wires
    wires.close()


@pytest.fixture(scope="module")
def wired(wires):
    """As `plays`, with the victims on a host of their own."""
    with kept_open(wires) as over:
        yield over


@pytest.mark.parametrize(
    ("link", "step", "cut"),
    [
        over(SHARED_MEMORY, PAYLOADS_POSTED, LINK_DOWN),
        over(TCP, CARD, HOLDER_LOST_ROUTE),
        over(TCP, PAYLOADS, READER_DROPS),
        over(TCP, PAYLOADS_POSTED, LINK_DOWN),
        over(TCP, RECORDS, HOLDER_DROPS),
        over(ZMQ, UP, HOLDER_LOST_ROUTE),
        over(ZMQ, PAYLOADS_POSTED, READER_DROPS),
        over(ZMQ, RECORDS, LINK_DOWN),
        over(ZMQ, STAGE, HOLDER_DROPS),
    ],
)
def test_a_wire_that_is_cut_for_a_while(wired, wires, link, step, cut):
    play = wired(link)
    with play.victim(step) as (victim, want):
        with wires.cut(cut):
            play.reader_node.go_on()
            landed = play.what_landed(want, victim.wanted)
            detained = play.accounts_for_its_memory()
        assert victim.shared in landed, "another holder has it"
        if link == SHARED_MEMORY:
            assert (detained, landed) == (0, victim.wanted), "no wire is needed to read it"
        else:
            assert (detained > 0) is (link == TCP)
        play.has_landed(victim.later)
        assert victim.node.process.poll() is None
        play.is_whole()


@pytest.fixture(scope="module")
def impatient(wires):
    """As `wired`, where the kernel gives up connections within seconds."""
    with kept_open(wires, IMPATIENT) as over:
        yield over


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
@pytest.mark.parametrize("cut", [HOLDER_DROPS, EVERYTHING])
def test_a_wire_that_stays_cut(impatient, wires, cut):
    """What it detains comes back all the same, and nobody stands still while a new connection is tried in vain."""
    play = impatient(TCP)
    with play.victim(PAYLOADS) as (victim, want):
        with wires.cut(cut):
            play.reader_node.go_on()
            play.what_landed(want, victim.wanted)
            assert play.accounts_for_its_memory() > 0
            until(lambda: play.gauge("quarantined_bytes") == 0, "the kernel to give the connection up")
            until(lambda: not wires.doubted(), "the end of every other")
            play.reader_is_awake_until_answered(play.want([victim.later]))
        play.has_landed(victim.later)
        assert victim.node.process.poll() is None
        play.is_whole()
