"""Peers that die, stop, come back or lose their connection; and an end that is closed."""

from __future__ import annotations

import contextlib
import os

import pytest

from ec_p2p.transport.interface import Span, State, TransportError
from tests.transport.ends import MIB, SLAB, End, Holder, in_child, unique_name, until


def outcome(end, peer, spans):
    """FAILED also when the READ was refused at once."""
    try:
        return end.wait(end.transport.read(peer, spans))
    except TransportError:
        return State.FAILED


def test_a_peer_killed_before_the_read(reader, holder, start_holder):
    doomed = start_holder()
    assert reader.fetch(doomed.name, 0, 0, 64) == doomed.bytes[:64]
    doomed.kill()
    for _ in range(3):
        assert outcome(reader, doomed.name, [Span(0, 0, 64)]) is State.FAILED
    assert reader.fetch(holder.name, 0, 0, MIB) == holder.bytes[:MIB]


def test_a_peer_killed_while_it_is_read(reader, holder, start_holder):
    doomed = start_holder()
    assert reader.fetch(doomed.name, 0, 0, 64) == doomed.bytes[:64]
    readings = [reader.transport.read(doomed.name, [Span(0, 0, SLAB)]) for _ in range(20)]
    assert reader.wait(readings[0]) is State.DONE
    doomed.kill()
    states = [reader.wait(reading) for reading in readings]
    assert states[-1] is State.FAILED
    assert doomed.name in readings[-1].error
    assert reader.fetch(holder.name, 0, 0, MIB) == holder.bytes[:MIB]


def test_a_peer_that_was_killed_can_be_forgotten(reader, start_holder):
    doomed = start_holder()
    doomed.kill()
    outcome(reader, doomed.name, [Span(0, 0, 64)])
    reader.transport.forget(doomed.name)
    reader.transport.progress()
    with pytest.raises(TransportError, match="unknown peer"):
        reader.transport.read(doomed.name, [Span(0, 0, 64)])


def test_a_peer_killed_before_it_was_ever_connected_to(kind, reader):
    doomed = Holder(kind)
    doomed.close()
    with contextlib.suppress(TransportError):
        reader.transport.connect(doomed.name, doomed.card)
    assert outcome(reader, doomed.name, [Span(0, 0, 64)]) is State.FAILED
    reader.transport.forget(doomed.name)


def test_a_restarted_peer_is_another_peer(reader, start_holder):
    first = start_holder()
    assert reader.fetch(first.name, 0, 0, 64) == first.bytes[:64]
    first.kill()
    second = start_holder()
    assert reader.fetch(second.name, 0, 0, MIB) == second.bytes[:MIB]
    assert outcome(reader, first.name, [Span(0, 0, 64)]) is State.FAILED


def test_a_lost_connection_is_made_anew(reader, start_holder):
    holder = start_holder()

    def lose_connection():
        reader.transport.forget(holder.name)
        reader.transport.progress()
        reader.transport.connect(holder.name, holder.card)
        assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]
        assert holder.ask("cut") > 0
        # Now and then nobody notices, because shared memory needs no connection.
        return any(outcome(reader, holder.name, [Span(0, 0, 64)]) is State.FAILED for _ in range(200))

    until(lose_connection, "a loss that matters")
    until(lambda: outcome(reader, holder.name, [Span(0, 0, 64)]) is State.DONE, "a new connection")
    assert reader.fetch(holder.name, 100, 0, MIB) == holder.bytes[100 : 100 + MIB]


def test_connecting_and_forgetting_leaks_no_files(reader, holder, start_holder):
    passing = start_holder()

    def once():
        reader.transport.connect(passing.name, passing.card)
        assert reader.fetch(passing.name, 0, 0, 64) == passing.bytes[:64]
        reader.transport.forget(passing.name)
        reader.transport.progress()

    def open_files():
        return len(os.listdir("/proc/self/fd")), passing.open_files()

    once()
    before = open_files()
    for _ in range(20):
        once()
    until(lambda: all(now <= then for now, then in zip(open_files(), before, strict=True)), f"{before} open files")


def close_early(kind, name, card):
    end = End(kind, unique_name(), slabs=2)
    end.transport.connect(name, card)
    assert len(end.fetch(name, 0, 0, 64)) == 64
    readings = [end.transport.read(name, [Span(0, 0, SLAB)]) for _ in range(3)]
    end.transport.close()
    end.transport.close()
    states = [reading.poll() for reading in readings]
    assert all(reading.release() for reading in readings)
    end.transport.progress()
    refusals = []
    for call in (
        lambda: end.transport.read(name, [Span(0, 0, 64)]),
        lambda: end.transport.connect(name, card),
        lambda: end.transport.register(SLAB, SLAB),
    ):
        with pytest.raises(TransportError) as refusal:
            call()
        refusals.append(str(refusal.value))
    end.close()
    return states, refusals


def test_closing_with_reads_in_flight(kind, holder):
    states, refusals = in_child(close_early, kind, holder.name, holder.card)
    assert states == [State.FAILED] * 3
    assert refusals == [f"unknown peer {holder.name}", "the transport is closed", "the transport is closed"]


def close_and_open_again(kind, name, card):
    landed = []
    for _ in range(2):
        end = End(kind, unique_name())
        end.transport.connect(name, card)
        landed.append(end.fetch(name, 0, 0, 64))
        end.close()
    return landed


def test_an_end_can_be_opened_after_another_was_closed(kind, holder):
    assert in_child(close_and_open_again, kind, holder.name, holder.card) == [holder.bytes[:64]] * 2


def leave_open(kind, name, card):
    end = End(kind, unique_name())
    end.transport.connect(name, card)
    end.fetch(name, 0, 0, 64)
    globals()["kept"] = end, end.transport.read(name, [Span(0, 0, SLAB)])


def test_a_process_may_end_without_closing(kind, holder, reader):
    in_child(leave_open, kind, holder.name, holder.card)
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]
