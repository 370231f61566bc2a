"""How long a command waits for directories: the clock is played, so that patience can be tested without having it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ec_p2p.cli import following
from ec_p2p.cli.following import Following, NoDirectory


class Replica:
    """One that tells `entries_per_turn` at each turn, until it has told them all and is fresh."""

    def __init__(self, name: str, entries: int, entries_per_turn: int = 1) -> None:
        self.endpoint = name
        self.position = None
        self._left = entries
        self._told = 0
        self._per_turn = entries_per_turn

    def __len__(self) -> int:
        return self._told

    @property
    def fresh(self) -> bool:
        return not self._left

    def tell(self) -> None:
        now = min(self._left, self._per_turn)
        self._left -= now
        self._told += now


SILENT = 10**9


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch):
    def play(*replicas: Replica) -> tuple[Following, SimpleNamespace]:
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=lambda: clock.now))

        class View:
            def __init__(self) -> None:
                self.replicas = replicas

            @property
            def fresh(self) -> bool:
                return any(replica.fresh for replica in replicas)

        def turn(longest_s: float) -> None:
            clock.now += longest_s
            for replica in replicas:
                replica.tell()

        one = object.__new__(Following)
        one.view, one.turn, one._security = View(), turn, None  # type: ignore[assignment, method-assign]
        return one, clock

    return play


def test_a_directory_that_goes_on_telling_is_waited_for_longer_than_a_silent_one(played) -> None:
    one, clock = played(Replica("slow", 300))
    assert one.catch_up(5.0) == []
    assert clock.now > 25.0
    one, clock = played(Replica("silent", SILENT, 0))
    with pytest.raises(NoDirectory, match="no directory answered within 5 s at silent"):
        one.catch_up(5.0)
    assert 5.0 < clock.now < 6.0


def test_but_not_for_ever(played) -> None:
    one, clock = played(Replica("endless", SILENT))
    with pytest.raises(NoDirectory):
        one.catch_up(5.0)
    assert 100.0 < clock.now < 101.0


def test_once_one_is_followed_a_silent_one_is_not_waited_for_long_but_one_that_tells_is(played) -> None:
    one, clock = played(Replica("quick", 1), Replica("silent", SILENT, 0))
    assert one.catch_up(60.0) == ["silent"]
    assert 1.0 < clock.now < 2.0
    one, clock = played(Replica("quick", 1), Replica("slow", 300), Replica("silent", SILENT, 0))
    assert one.catch_up(5.0) == ["silent"]
    assert clock.now > 25.0
