"""What lands is what was there: sizes, spans, growth, and what is refused."""

from __future__ import annotations

import random

import pytest
import zmq

from ec_p2p.transport.interface import Span, State, TransportError
from tests.transport.ends import ARENA, MIB, SLAB


@pytest.mark.parametrize("nbytes", [1, 64, 65536, MIB - 1, MIB, 3 * MIB + 5, 16 * MIB])
def test_exact_bytes_land_and_nothing_around_them(reader, holder, nbytes):
    remote, local = 777, 4096 + 64
    guard = b"\xa5" * 64
    reader.memory[local - 64 : local] = guard
    reader.memory[local + nbytes : local + nbytes + 64] = guard

    assert reader.fetch(holder.name, remote, local, nbytes) == holder.bytes[remote : remote + nbytes]
    assert reader.memory[local - 64 : local] == guard
    assert reader.memory[local + nbytes : local + nbytes + 64] == guard


def test_the_last_byte_of_the_arena_can_be_read(reader, holder):
    assert reader.fetch(holder.name, ARENA - 64, ARENA - 64, 64) == holder.bytes[-64:]


def test_spans_may_cross_slabs_on_either_side(reader, holder):
    assert reader.fetch(holder.name, SLAB - 1000, 0, 3000) == holder.bytes[SLAB - 1000 : SLAB + 2000]
    assert reader.fetch(holder.name, 0, SLAB - 1000, 3000) == holder.bytes[:3000]
    assert reader.fetch(holder.name, SLAB - 7, SLAB - 1000, 3000) == holder.bytes[SLAB - 7 : SLAB + 2993]


def test_one_read_of_many_spans(reader, holder):
    choose = random.Random(1)
    spans = [
        Span(choose.randrange(ARENA - 3 * MIB), place * 3 * MIB, choose.choice([1, 64, 5000, MIB, 3 * MIB]))
        for place in range(12)
    ]
    choose.shuffle(spans)
    reading = reader.transport.read(holder.name, spans)
    assert reader.wait(reading) is State.DONE
    for remote, local, nbytes in spans:
        assert reader.memory[local : local + nbytes] == holder.bytes[remote : remote + nbytes]


def test_many_reads_in_flight(reader, holder):
    choose = random.Random(2)
    place = ARENA // 200
    spans = [
        Span(choose.randrange(ARENA - place), index * place, choose.choice([64, 4096, place])) for index in range(200)
    ]
    readings = [reader.transport.read(holder.name, [span]) for span in spans]
    choose.shuffle(readings)
    assert {reader.wait(reading) for reading in readings} == {State.DONE}
    for remote, local, nbytes in spans:
        assert reader.memory[local : local + nbytes] == holder.bytes[remote : remote + nbytes]


def test_a_small_read_passes_a_large_one(reader, holder):
    large = reader.transport.read(holder.name, [Span(0, 0, SLAB)])
    small = reader.transport.read(holder.name, [Span(5, SLAB, 64)])
    assert reader.wait(small) is State.DONE
    assert large.poll() is State.POSTED
    assert reader.wait(large) is State.DONE
    assert reader.memory[:SLAB] == holder.bytes[:SLAB]


def test_a_later_read_sees_what_was_written_meanwhile(reader, start_holder):
    holder = start_holder()
    assert reader.fetch(holder.name, 1000, 0, 100) == holder.bytes[1000:1100]
    holder.ask("write", 1000, b"changed")
    assert reader.fetch(holder.name, 1000, 0, 7) == b"changed"


def test_a_newer_card_opens_a_new_slab(reader, start_holder):
    holder = start_holder(slabs=1)
    with pytest.raises(TransportError, match=f"64 bytes at offset {SLAB} .* {SLAB} bytes registered"):
        reader.transport.read(holder.name, [Span(SLAB, 0, 64)])
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]

    newer = holder.ask("add_slab")
    assert newer != holder.card
    reader.transport.connect(holder.name, newer)
    assert reader.fetch(holder.name, SLAB, 0, 64) == holder.bytes[SLAB : SLAB + 64]
    assert reader.fetch(holder.name, SLAB - 32, 0, 64) == holder.bytes[SLAB - 32 : SLAB + 32]


def test_connecting_again_changes_nothing(reader, holder):
    for _ in range(3):
        reader.transport.connect(holder.name, holder.card)
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (Span(ARENA - 63, 0, 64), f"64 bytes at offset {ARENA - 63} are not among the {ARENA} bytes registered"),
        (Span(-1, 0, 64), "64 bytes at offset -1"),
        (Span(0, 0, 0), "0 bytes at offset 0"),
        (Span(0, 0, -64), "-64 bytes at offset 0"),
        (Span(1 << 70, 0, 64), f"64 bytes at offset {1 << 70}"),
        (Span(0, ARENA - 63, 64), f"our arena: 64 bytes at offset {ARENA - 63}"),
        (Span(0, -64, 64), "our arena: 64 bytes at offset -64"),
    ],
)
def test_spans_outside_are_refused(reader, holder, span, said):
    with pytest.raises(TransportError, match=said):
        reader.transport.read(holder.name, [Span(0, 0, 64), span])
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]


def test_a_read_without_spans_is_refused(reader, holder):
    with pytest.raises(TransportError, match="without a span"):
        reader.transport.read(holder.name, [])


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 64), (ARENA - 64, 64), (ARENA, 64), (ARENA, 0), (-64, 64)])
def test_ranges_that_overlap_or_leave_the_arena_are_not_registered(reader, offset, nbytes):
    card = reader.transport.card()
    with pytest.raises(TransportError, match=f"cannot register {nbytes} bytes at offset {offset}"):
        reader.transport.register(offset, nbytes)
    assert reader.transport.card() == card


def test_unknown_and_forgotten_peers_are_refused(reader, holder, start_holder):
    with pytest.raises(TransportError, match="unknown peer nobody"):
        reader.transport.read("nobody", [Span(0, 0, 64)])
    reader.transport.forget("nobody")

    passing = start_holder()
    assert reader.fetch(passing.name, 0, 0, 64) == passing.bytes[:64]
    reader.transport.forget(passing.name)
    reader.transport.progress()
    with pytest.raises(TransportError, match=f"unknown peer {passing.name}"):
        reader.transport.read(passing.name, [Span(0, 0, 64)])

    reader.transport.connect(passing.name, passing.card)
    assert reader.fetch(passing.name, 0, 0, 64) == passing.bytes[:64]


def test_forgetting_ends_the_readings_of_that_peer_only(reader, holder, start_holder):
    passing = start_holder()
    assert reader.fetch(passing.name, 0, 0, 64) == passing.bytes[:64]
    doomed = reader.transport.read(passing.name, [Span(0, 0, SLAB)])
    other = reader.transport.read(holder.name, [Span(0, SLAB, SLAB)])
    reader.transport.forget(passing.name)
    assert reader.wait(doomed) is State.FAILED
    assert "forgotten" in doomed.error
    assert reader.wait(other) is State.DONE
    assert reader.memory[SLAB:] == holder.bytes[:SLAB]


def test_a_released_reading_has_failed(reader, holder):
    reading = reader.transport.read(holder.name, [Span(0, 0, SLAB)])
    assert reading.poll() is State.POSTED
    while not reading.release():
        reader.transport.progress()
    assert reading.poll() is State.FAILED
    assert reading.release()


def test_nothing_wakes_an_idle_loop(reader, holder):
    assert reader.fetch(holder.name, 0, 0, 64) == holder.bytes[:64]
    reader.transport.progress()
    poller = zmq.Poller()
    for target in reader.transport.sockets():
        poller.register(target, zmq.POLLIN)
    assert poller.poll(300) == []
