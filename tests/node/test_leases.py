"""Leases end with their readers, and are cheap however many those are."""

from __future__ import annotations

import tracemalloc

import pytest

from ec_p2p.node.leases import Leases

SCHEDULER = 1


class Pin:
    closed = False

    def close(self):
        self.closed = True


def granted(leases, readers, count=1):
    """Pins, and the numbers of their leases."""
    pins = [Pin() for _ in range(count)]
    return pins, leases.grant(SCHEDULER, "engine", 1, readers, pins)


@pytest.mark.parametrize("readers", [1, 3, 64, 65])
def test_the_last_of_its_readers_ends_it(readers):
    leases = Leases()
    [pin], [lease] = granted(leases, readers)
    leases.dispatched(lease, SCHEDULER)
    for reader in reversed(range(readers)):
        assert not pin.closed
        leases.read_by(lease, "engine", reader)
        leases.read_by(lease, "another", 0)
    assert pin.closed
    assert len(leases) == 0


@pytest.mark.parametrize("reader", [-(1 << 60), -1, 2, 64, 1 << 60])
def test_who_is_none_of_its_readers_ends_nothing(reader):
    leases = Leases()
    [pin], [lease] = granted(leases, 2)
    leases.dispatched(lease, SCHEDULER)
    leases.read_by(lease, "engine", reader)
    leases.reader_gone("engine", reader)
    leases.read_by(lease, "engine", 0)
    leases.read_by(lease, "engine", 0)
    assert not pin.closed
    leases.reader_gone("engine", 1)
    assert pin.closed


def test_readers_of_one_lease_are_not_those_of_another():
    leases = Leases()
    pins, numbers = granted(leases, 2, count=2)
    for lease in numbers:
        leases.dispatched(lease, SCHEDULER)
    leases.read_by(numbers[0], "engine", 0)
    leases.read_by(numbers[1], "engine", 1)
    assert len(leases) == 2
    leases.reader_gone("engine", 1)
    assert [pin.closed for pin in pins] == [True, False]


def test_one_without_readers_ends_when_it_is_dispatched():
    leases = Leases()
    [pin], [lease] = granted(leases, 0)
    assert not pin.closed
    leases.dispatched(lease, SCHEDULER)
    assert pin.closed


def test_very_many_readers_of_very_many_leases_take_little_memory():
    leases = Leases()
    tracemalloc.start()
    try:
        _, numbers = granted(leases, 4096, count=1000)
        for lease in numbers:
            leases.read_by(lease, "engine", 17)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(leases) == 1000
    assert held < 4 << 20
