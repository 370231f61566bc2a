"""How READs are cut, and when one has ended. The agent is scripted: what it says here, NIXL says only on bad days."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.transport.interface import Span, State
from ec_p2p.transport.nixl_reading import PIECE_BYTES, Ground, NixlReading, Peer, cut

LOCAL, REMOTE = 1 << 40, 1 << 50

sizes = st.lists(st.integers(1, 3 * PIECE_BYTES), min_size=1, max_size=6)


@given(sizes, sizes, st.data())
def test_pieces_cover_the_spans_in_order_and_cross_no_end(local_sizes, remote_sizes, data):
    local_ends = list(itertools.accumulate(local_sizes))
    remote_ends = list(itertools.accumulate(remote_sizes))
    spans = []
    for _ in range(data.draw(st.integers(1, 4))):
        remote = data.draw(st.integers(0, remote_ends[-1] - 1))
        local = data.draw(st.integers(0, local_ends[-1] - 1))
        most = min(remote_ends[-1] - remote, local_ends[-1] - local)
        spans.append(Span(remote, local, data.draw(st.integers(1, most))))

    pieces = cut(spans, Ground(LOCAL, local_ends, "VRAM", 3), Ground(REMOTE, remote_ends))

    assert all(sum(nbytes for _, nbytes, _ in here) <= PIECE_BYTES for here, _ in pieces)
    stretches = [both for piece in pieces for both in zip(*piece, strict=True)]
    for span in spans:
        done = 0
        while done < span.nbytes:
            (to, nbytes, device), (start, same, host) = stretches.pop(0)
            assert nbytes == same > 0
            assert (device, host) == (3, 0)
            assert (to - LOCAL, start - REMOTE) == (span.local + done, span.remote + done)
            assert not any(to - LOCAL < end < to - LOCAL + nbytes for end in local_ends)
            assert not any(start - REMOTE < end < start - REMOTE + nbytes for end in remote_ends)
            done += nbytes
        assert done == span.nbytes
    assert not stretches


class ScriptedAgent:
    """Posts as told: True is done at once, False is in flight, an exception is raised."""

    def __init__(self, *script):
        self.script = list(script)
        self.in_flight = []
        self.over = set()

    def post(self, peer, local, remote, kind):
        says = self.script.pop(0)
        if isinstance(says, Exception):
            raise says
        if says:
            return None
        self.in_flight.append(len(self.in_flight) + 1)
        return self.in_flight[-1]

    def ended(self, handle):
        if handle in self.over:
            return True
        if self.over == {"broken"}:
            raise RuntimeError("disconnected")
        return False


def start(*script):
    agent = ScriptedAgent(*script)
    peer = Peer(agent, "somebody")
    pieces = cut([Span(0, 0, len(script) * PIECE_BYTES)], Ground(LOCAL, [1 << 30]), Ground(REMOTE, [1 << 30]))
    return agent, peer, NixlReading(peer, pieces, "DRAM")


def test_pieces_that_copy_at_once_go_out_one_per_poll():
    agent, _, reading = start(True, True, True)
    assert [reading.poll() for _ in range(3)] == [State.POSTED, State.POSTED, State.DONE]
    assert not agent.script


def test_pieces_that_take_time_go_out_together():
    agent, peer, reading = start(False, False, False)
    assert reading.poll() is State.POSTED
    assert peer.in_flight == 3
    agent.over = {1, 3}
    assert reading.poll() is State.POSTED
    agent.over = {1, 2, 3}
    assert reading.poll() is State.DONE
    assert peer.in_flight == 0


def test_a_piece_that_fails_leaves_the_reading_posted_while_another_is_in_flight():
    agent, peer, reading = start(False, RuntimeError("no"), True)
    assert reading.poll() is State.POSTED
    assert not reading.release()
    assert peer.broken
    agent.over = {1}
    assert reading.poll() is State.FAILED
    assert reading.error == "READ from somebody: RuntimeError: no"
    assert agent.script == [True], "nothing is posted after a failure"
    assert reading.release()


def test_a_connection_that_breaks_ends_every_piece():
    agent, peer, reading = start(False, False)
    assert reading.poll() is State.POSTED
    agent.over = {"broken"}
    assert reading.poll() is State.FAILED
    assert "disconnected" in reading.error
    assert (peer.in_flight, peer.broken) == (0, True)


def test_a_connection_is_made_anew_ever_more_rarely_until_a_read_works():
    agent, peer, reading = start(True, False)
    assert [now for now in range(60) if peer.may_reconnect(float(now))] == [0, 1, 3, 7, 15, 31, 47]
    assert reading.poll() is State.POSTED
    assert [now for now in range(64, 80) if peer.may_reconnect(float(now))] == [64, 65, 67, 71, 79]
    assert reading.poll() is State.POSTED
    assert not peer.may_reconnect(1000.0), "a READ is in flight"
    agent.over = {1}
    assert reading.poll() is State.DONE
    assert [now for now in range(1000, 1010) if peer.may_reconnect(float(now))] == [1000, 1001, 1003, 1007]


@pytest.mark.parametrize("ending", ["release", "forget"])
def test_what_is_not_posted_yet_is_not_posted_after_the_end(ending):
    agent, peer, reading = start(False, True, True)
    assert reading.poll() is State.POSTED
    if ending == "release":
        assert not reading.release()
    else:
        peer.forgotten = True
    assert reading.poll() is State.POSTED
    agent.over = {1}
    assert reading.poll() is State.FAILED
    assert reading.release()
    assert agent.script == [True]
