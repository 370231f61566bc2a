from __future__ import annotations

import random
import threading

import pytest

from ec_p2p.engine.disk_index import DiskIndex
from ec_p2p.engine.filed import HEADER_BYTES, Filed
from ec_p2p.engine.gdsf import GDSF
from ec_p2p.engine.policy import LRU
from tests.engine.disks import identity

FILE = HEADER_BYTES + 1000


def entry(number: int, rows: int = 1000) -> Filed:
    return Filed(identity(number), rows, rows, 1, "uint8")


class Index:
    """An index with room for `files` files, and what it tells."""

    def __init__(self, files: int) -> None:
        self.told: list[tuple[str, int]] = []
        self.index = DiskIndex(
            files * FILE,
            LRU(),
            lambda filed: self.told.append(("filed", filed.identity[0])),
            lambda identity: self.told.append(("lost", identity[0])),
        )


@pytest.fixture
def three() -> Index:
    made = Index(3)
    for number in range(3):
        made.index.know(entry(number))
    made.told.clear()
    return made


def test_each_change_is_told_once(three: Index) -> None:
    index = three.index
    index.know(entry(0))
    index.count(identity(0), FILE)
    assert three.told == []
    index.count(identity(0), FILE + 1)
    index.count(identity(0), FILE + 1)
    index.know(entry(0, 1001))
    index.know(entry(0, 1001))
    index.know(entry(0, 1000))
    index.forget(identity(0), index.state(identity(0)))
    index.forget(identity(0), index.state(identity(0)))
    assert three.told == [("lost", 0), ("filed", 0), ("lost", 0), ("filed", 0), ("lost", 0)]
    assert index.used_bytes == 2 * FILE
    assert len(index) == 2


def test_an_old_finding_does_not_undo_a_newer_one(three: Index) -> None:
    """Who found a file missing may be overtaken by who has just written it."""
    index = three.index
    seen = index.state(identity(0))
    index.forget(identity(0), seen)
    index.know(entry(0))
    index.forget(identity(0), seen)
    index.forget(identity(0), None)
    assert index.find(identity(0)) == entry(0)
    assert three.told == [("lost", 0), ("filed", 0)]


def test_a_victim_stays_away_until_its_file_is_gone(three: Index) -> None:
    index = three.index
    assert index.reserve(FILE) == [identity(0)]
    index.know(entry(0))
    index.count(identity(0), FILE)
    assert index.state(identity(0)) is None
    assert not index.use(identity(0))
    index.removed(identity(0))
    index.settle(FILE, entry(3))
    index.know(entry(0))
    assert three.told == [("lost", 0), ("filed", 3), ("filed", 0)]
    assert index.used_bytes == 4 * FILE


def test_a_victim_that_nobody_tried_to_remove_counts_and_is_the_first_again(three: Index) -> None:
    index = three.index
    assert index.reserve(3 * FILE) == [identity(0), identity(1), identity(2)]
    index.removed(identity(0))
    index.spared(identity(2))
    index.spared(identity(1))
    index.settle(3 * FILE, None)
    assert index.used_bytes == 2 * FILE
    assert index.find(identity(1)) is None
    assert index.state(identity(1)) == FILE
    index.know(entry(3))
    assert index.reserve(2 * FILE) == [identity(1), identity(2)]


def test_a_victim_that_cannot_be_removed_counts_and_is_no_victim_for_now(three: Index) -> None:
    index = three.index
    assert index.reserve(FILE) == [identity(0)]
    index.kept(identity(0))
    index.settle(FILE, None)
    assert index.used_bytes == 3 * FILE
    assert index.find(identity(0)) is None
    assert index.state(identity(0)) == FILE
    assert index.reserve(3 * FILE) is None
    assert index.reserve(FILE) == [identity(1)]
    index.removed(identity(1))
    index.settle(FILE, entry(3))
    index.reconsider()
    assert index.reserve(3 * FILE) == [identity(2), identity(0), identity(3)]  # among the last


def test_a_victim_that_could_not_be_removed_and_then_went_is_as_any_other_when_it_returns(three: Index) -> None:
    index = three.index
    assert index.reserve(FILE) == [identity(0)]
    index.kept(identity(0))
    index.settle(FILE, None)
    index.forget(identity(0), index.state(identity(0)))
    index.count(identity(0), FILE)
    assert index.reserve(FILE) == [identity(0)]


def test_a_file_that_is_no_entry_counts(three: Index) -> None:
    index = three.index
    for number in (0, 1, 5):
        seen = index.state(identity(number))
        index.disown(identity(number), seen, FILE + number)
        assert index.find(identity(number)) is None
        assert index.state(identity(number)) == FILE + number
        index.know(entry(number))
        index.disown(identity(number), seen, FILE)  # overtaken by who has just written it
        assert index.find(identity(number)) == entry(number)
    assert three.told == [("lost", 0), ("filed", 0), ("lost", 1), ("filed", 1), ("filed", 5)]
    assert index.used_bytes == 4 * FILE


@pytest.mark.parametrize("counted", [False, True], ids=["new", "of an earlier life"])
def test_a_file_that_is_written_counts_as_used_once(counted: bool) -> None:
    """Under a policy that weighs how often an entry was used."""
    index = DiskIndex(3 * FILE, GDSF(), None, None)
    index.know(entry(0))
    index.touched(identity(0))
    if counted:
        index.count(identity(1), FILE)
    assert index.reserve(FILE) == []
    index.settle(FILE, entry(1))
    assert index.reserve(3 * FILE) == [identity(1), identity(0)]


def test_room_is_made_wholly_or_not_at_all(three: Index) -> None:
    index = three.index
    with index.using(identity(1)) as free:
        assert free
        assert index.use(identity(1))
        assert index.reserve(3 * FILE) is None
        assert three.told == []
        assert index.reserve(2 * FILE) == [identity(0), identity(2)]
        index.settle(2 * FILE, None)
        index.unuse(identity(1))
        assert index.reserve(3 * FILE) is None
    assert index.reserve(3 * FILE) == [identity(1)]


def test_what_is_written_counts_before_it_stands(three: Index) -> None:
    index = three.index
    assert index.reserve(FILE) == [identity(0)]
    index.removed(identity(0))
    assert index.used_bytes == 3 * FILE
    assert index.reserve(FILE) == [identity(1)]
    index.settle(FILE, entry(3))
    assert index.used_bytes == 3 * FILE


def test_what_was_written_anew_is_the_last_to_go(three: Index) -> None:
    index = three.index
    index.reserve(FILE)
    index.removed(identity(0))
    index.settle(FILE, Filed(identity(1), 1000, 1, 1000, "uint8"))  # as many bytes in another shape
    assert index.reserve(2 * FILE) == [identity(2)]
    assert three.told == [("lost", 0), ("lost", 1), ("filed", 1), ("lost", 2)]


def test_what_is_found_and_recent_goes_last(three: Index) -> None:
    index = three.index
    index.count(identity(3), FILE, recent=True)
    index.count(identity(4), FILE, recent=True)
    index.know(entry(3))
    assert index.excess(5) == [identity(0), identity(1)]
    assert index.reserve(3 * FILE) == [identity(2), identity(3), identity(4)]


def test_what_is_found_from_before_goes_first(three: Index) -> None:
    index = three.index
    index.count(identity(3), FILE)
    index.know(entry(3))
    index.count(identity(4), FILE)
    index.touched(identity(0))
    index.touched(identity(9))  # not there, or not any more
    assert index.excess(1) == [identity(4)]
    assert index.excess(5) == [identity(3)]
    assert index.excess(5) == []
    assert index.reserve(FILE) == [identity(1)]


def test_damaged_files_count(three: Index) -> None:
    three.index.set_aside(FILE)
    assert three.index.used_bytes == 4 * FILE
    assert three.index.excess(5) == [identity(0)]
    assert three.index.reserve(3 * FILE) is None


def test_all_is_lost(three: Index) -> None:
    three.index.count(identity(5), 10)
    three.index.forget_all()
    assert three.told == [("lost", number) for number in range(3)]
    assert three.index.used_bytes == len(three.index) == 0
    assert all(three.index.shard(number) == {} for number in range(256))


def test_many_threads_keep_the_accounts() -> None:
    made = Index(10)
    index = made.index

    def live(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(2000):
            filed = entry(choice.randrange(20), choice.choice([500, 1000]))
            with index.using(filed.identity) as free:
                if not free:
                    continue
                victims = index.reserve(filed.file_bytes)
                if victims is None:
                    continue
                for victim in victims:
                    choice.choices([index.removed, index.kept, index.spared], [8, 1, 1])[0](victim)
                if choice.random() < 0.1:
                    index.reconsider()
                index.settle(filed.file_bytes, filed if choice.random() < 0.9 else None)
                assert index.used_bytes >= 0
            lost = identity(choice.randrange(20))
            index.forget(lost, index.state(lost))

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = [index.state(identity(number)) for number in range(20)]
    sizes = [state.file_bytes if isinstance(state, Filed) else state or 0 for state in states]
    assert index.used_bytes == sum(sizes)
    assert len(index) == sum(isinstance(state, Filed) for state in states)
    known = {number for number in range(20) if index.find(identity(number))}
    told = {number: [what for what, n in made.told if n == number] for number in range(20)}
    for number, events in told.items():
        assert events == (["filed", "lost"] * len(events))[: len(events)]
        assert (len(events) % 2 == 1) == (number in known)
