from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ec_p2p.engine.files import Files
from ec_p2p.engine.quiet import Quiet


def look(quiet: Quiet, folder: Path, nothing_left: bool = True) -> bool:
    """One look, if it has to be; whether it had to be."""
    if quiet.is_quiet(7, str(folder)):
        return False
    quiet.looked(7, nothing_left)
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "07"
    folder.mkdir()
    (folder / "old").touch()
    return folder


def changed_at(folder: Path, time_ns: int) -> None:
    """As if its names had last changed at that time."""
    os.utime(folder, ns=(time_ns, time_ns))


def test_what_has_not_changed_for_two_looks_is_quiet(folder: Path) -> None:
    quiet = Quiet(Files())
    assert [look(quiet, folder) for _ in range(5)] == [True, True, False, False, False]


CHANGES: dict[str, Callable[[Path], object]] = {
    "a new file": lambda folder: (folder / "new").touch(),
    "a file less": lambda folder: (folder / "old").unlink(),
    "a file renamed into place": lambda folder: (
        (folder.parent / "from").touch() or (folder.parent / "from").rename(folder / "old")
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_quiet_no_more(folder: Path, change: Callable[[Path], object]) -> None:
    changed_at(folder, 10**18)
    quiet = Quiet(Files())
    while look(quiet, folder):
        pass
    change(folder)
    assert [look(quiet, folder) for _ in range(3)] == [True, True, False]


def test_a_change_behind_the_first_look_and_within_the_same_tick_is_seen(folder: Path) -> None:
    quiet = Quiet(Files())
    changed_at(folder, 10**18)
    assert look(quiet, folder)
    (folder / "new").touch()
    changed_at(folder, 10**18)
    assert look(quiet, folder)


def test_what_has_something_left_to_do_is_never_quiet(folder: Path) -> None:
    quiet = Quiet(Files())
    while look(quiet, folder):
        pass
    quiet.wake()
    assert all(look(quiet, folder, nothing_left=False) for _ in range(4))
    assert [look(quiet, folder) for _ in range(3)] == [True, True, False]


def test_all_are_looked_into_once_more_when_they_are_woken(folder: Path) -> None:
    quiet = Quiet(Files())
    while look(quiet, folder):
        pass
    quiet.wake()
    assert [look(quiet, folder) for _ in range(2)] == [True, False]


def test_a_folder_that_goes_and_another_in_its_place(folder: Path) -> None:
    changed_at(folder, 10**18)
    quiet = Quiet(Files())
    while look(quiet, folder):
        pass
    folder.rename(folder.parent / "away")
    assert all(look(quiet, folder) for _ in range(3))
    folder.mkdir()
    changed_at(folder, 10**18)
    assert look(quiet, folder)


def test_it_is_the_folder_that_counts_and_not_a_link_to_it(tmp_path: Path) -> None:
    link, folder = tmp_path / "link", tmp_path / "07"
    folder.mkdir()
    link.symlink_to(folder)
    changed_at(folder, 10**18)
    quiet = Quiet(Files())
    while look(quiet, link):
        pass
    (folder / "new").touch()
    assert look(quiet, link)
