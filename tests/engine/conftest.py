"""Fixtures that several tests of the engine use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ec_p2p.engine.breaker import Breaker
from tests.engine.disks import Clock, Memory


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of every disk's breakers."""
    clock = Clock()
    monkeypatch.setattr("ec_p2p.engine.disk.Breaker", lambda: Breaker(clock=clock))
    return clock
