from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ec_p2p.engine.disk import LAYOUT, LocalDiskBackend
from ec_p2p.engine.disk_index import DiskIndex
from ec_p2p.engine.examine import Examiner
from ec_p2p.engine.files import Files
from ec_p2p.engine.policy import LRU, POLICIES, make_policy
from ec_p2p.engine.scan import ALL_EVERY, Scanner
from ec_p2p.engine.set_aside import SetAside
from ec_p2p.engine.tally import Tally
from tests.engine.disks import (
    FILE,
    Clock,
    Failing,
    Gate,
    Memory,
    Sick,
    content,
    count,
    file_of,
    files_in,
    gauge,
    identity,
    os_error,
    put,
    read,
    until,
)

SOON_S = 0.02


def known(disk: LocalDiskBackend, numbers: range) -> set[int]:
    return {number for number in numbers if disk.find(identity(number)) is not None}


# ---------------------------------------------------------------- the start


def test_all_files_count_before_anything_is_written(memory: Memory, tmp_path: Path) -> None:
    """While the first pass is held up a write waits; the cap that the old files fill is then kept."""
    for number in range(3):
        put(tmp_path, number, age_s=100 - number)
    gate = Gate("listdir", "/80")
    with LocalDiskBackend(str(tmp_path), 3 * FILE, files=Sick(gate)) as disk:
        assert gate.reached.wait(30)
        assert memory.offer(disk, 9)
        assert not disk.flush(0.05)
        assert len(files_in(tmp_path)) == 3
        assert known(disk, range(3)) == set()
        assert read(disk, 2) == content(2, 2048)  # reads work from the first moment
        assert known(disk, range(3)) == {2}
        gate.opened.set()
        assert disk.flush(30)
        assert gauge(disk, "disk_bytes", kind="used") == 3 * FILE
        until(lambda: known(disk, range(10)) == {1, 2, 9})
        assert len(files_in(tmp_path)) == 3


def test_sized_files_count_before_their_headers_are_read(memory: Memory, tmp_path: Path) -> None:
    """Between the passes an old file can already be evicted; it was never known, so nobody hears of it."""
    for number in range(3):
        put(tmp_path, number, age_s=100 - number)
    events: list[bytes] = []
    gate = Gate("open", file_of(tmp_path, 1).name)
    with LocalDiskBackend(
        str(tmp_path), 3 * FILE, files=Sick(gate), on_lost=events.append, on_filed=lambda filed: events.append(b"")
    ) as disk:
        assert gate.reached.wait(30)
        assert gauge(disk, "disk_bytes", kind="used") == 3 * FILE
        assert known(disk, range(10)) == {2}
        memory.store(disk, 9)
        assert not file_of(tmp_path, 0).exists()
        gate.opened.set()
        until(lambda: known(disk, range(10)) == {1, 2, 9})
    assert events == [b""] * len(events)


def test_a_file_whose_header_is_being_read_is_no_victim(memory: Memory, tmp_path: Path) -> None:
    put(tmp_path, 0, age_s=100)
    put(tmp_path, 1, age_s=50)
    gate = Gate("open", file_of(tmp_path, 0).name)
    with LocalDiskBackend(str(tmp_path), 2 * FILE, files=Sick(gate)) as disk:
        assert gate.reached.wait(30)
        memory.store(disk, 9)
        gate.opened.set()
        until(lambda: known(disk, range(10)) == {0, 9})
        assert read(disk, 0) == content(0, 2048)


def test_a_smaller_cap_evicts_the_oldest(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path, number, age_s=100 - 10 * (number % 5) - number // 5)
    with LocalDiskBackend(str(tmp_path), 4 * FILE + 100) as disk:
        until(lambda: known(disk, range(10)) == {3, 4, 8, 9})
        assert gauge(disk, "disk_bytes", kind="used") == 4 * FILE
        assert count(disk, "disk_evictions") == 6
    assert len(files_in(tmp_path)) == 4


def test_a_folder_that_is_too_full_and_cannot_be_changed_is_read_all_the_same(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        put(tmp_path, number)
    with LocalDiskBackend(str(tmp_path), 3 * FILE, files=Sick(Failing("unlink", errno.EROFS))) as disk:
        until(lambda: known(disk, range(5)) == set(range(5)))
        assert gauge(disk, "disk_bytes", kind="used") == 5 * FILE
        assert count(disk, "disk_errors", op="scan", errno="EROFS") == 1
        assert all(read(disk, number) == content(number, 2048) for number in range(5))
        assert memory.offer(disk, 6)
        assert disk.flush(30)
        assert gauge(disk, "disk_breaker", op="write") == 1
        assert len(files_in(tmp_path)) == 5
    assert "holds more than it may" in caplog.text


def test_recency_survives_a_restart(memory: Memory, tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path, number, age_s=100 - number)
    with LocalDiskBackend(str(tmp_path)) as disk:
        assert read(disk, 1) == content(1, 2048)
    with LocalDiskBackend(str(tmp_path), 2 * FILE) as disk:
        until(lambda: known(disk, range(4)) == {1, 3})
        memory.store(disk, 5)
        assert known(disk, range(6)) == {1, 5}


def test_what_an_earlier_life_left_goes_before_what_this_one_wrote(memory: Memory, tmp_path: Path) -> None:
    put(tmp_path, 0)
    gate = Gate("open", file_of(tmp_path, 0).name)
    with LocalDiskBackend(str(tmp_path), 2 * FILE, files=Sick(gate)) as disk:
        assert gate.reached.wait(30)
        memory.store(disk, 1)
        gate.opened.set()
        until(lambda: known(disk, range(2)) == {0, 1})
        memory.store(disk, 2)
        assert known(disk, range(3)) == {1, 2}


def test_foreign_files_are_left_alone_and_do_not_count(tmp_path: Path) -> None:
    own = put(tmp_path, 1)
    foreign = [
        own.parent / "notes.txt",
        own.parent / "model.safetensors",
        own.parent / ("a" * 64 + ".safetensors"),  # of another folder
        own.parent / ".hidden.tmp",
        tmp_path / LAYOUT / "README",
        tmp_path / LAYOUT / own.name,
        tmp_path / "else" / own.name,
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
    (tmp_path / LAYOUT / "02").write_bytes(b"not a folder")
    with LocalDiskBackend(str(tmp_path), FILE) as disk:
        until(lambda: known(disk, range(2)) == {1})
        assert gauge(disk, "disk_bytes", kind="used") == FILE
        assert not any(name == "disk_errors" for name, _ in disk.counts())
    assert all(path.read_bytes() == b"x" * 1000 for path in foreign)


def test_leftovers_go_but_not_those_of_living_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_p2p.engine.scan.ALL_EVERY", 1_000_000_000)
    scans: list[str] = []
    spy = Sick(lambda name, args: scans.append(name) if name == "listdir" and args[0].endswith("damaged") else None)
    folder = put(tmp_path, 1).parent
    dead = folder / f".{identity(1).hex()}.00.tmp"
    alive = folder / f".{identity(1).hex()}.01.tmp"
    dead.write_bytes(b"x" * 1000)
    with alive.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with LocalDiskBackend(str(tmp_path), rescan_s=SOON_S, files=spy) as disk:
            until(lambda: known(disk, range(2)) == {1})
            until(lambda: len(scans) > 5)
            assert count(disk, "disk_swept") == 1
            assert gauge(disk, "disk_bytes", kind="used") == FILE
            assert not dead.exists()
            assert alive.exists()
            writer.close()  # it dies
            until(lambda: count(disk, "disk_swept") == 2)
    assert not alive.exists()


def test_headers_are_checked(tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path, number)
    file_of(tmp_path, 0).write_bytes(b"")
    file_of(tmp_path, 1).write_bytes(b"junk" * 5000)
    os.rename(file_of(tmp_path, 2), file_of(tmp_path, 2 + 256))
    with LocalDiskBackend(str(tmp_path)) as disk:
        until(lambda: known(disk, range(300)) == {3})
        until(lambda: count(disk, "disk_damaged") == 3)
        until(lambda: gauge(disk, "disk_bytes", kind="used") == 2 * FILE + 20_000)
    assert len(list((tmp_path / LAYOUT / "damaged").iterdir())) == 3


# ---------------------------------------------------------------- again and again


def test_a_rescan_learns_what_others_did(memory: Memory, tmp_path: Path) -> None:
    events: list[tuple[str, bytes]] = []
    with LocalDiskBackend(
        str(tmp_path),
        rescan_s=SOON_S,
        on_filed=lambda filed: events.append(("filed", filed.identity)),
        on_lost=lambda identity: events.append(("lost", identity)),
    ) as disk:
        memory.store(disk, 0)
        memory.store(disk, 1)
        put(tmp_path, 2)
        until(lambda: known(disk, range(9)) == {0, 1, 2})
        assert gauge(disk, "disk_bytes", kind="used") == 3 * FILE
        file_of(tmp_path, 0).unlink()
        until(lambda: known(disk, range(9)) == {1, 2})
        put(tmp_path, 1, rows=8)  # in the old one's place
        until(lambda: (found := disk.find(identity(1))) is not None and found.rows == 8)
        assert gauge(disk, "disk_bytes", kind="used") == 2 * FILE + 2048
        file_of(tmp_path, 2).unlink()
        file_of(tmp_path, 2).mkdir()
        until(lambda: known(disk, range(9)) == {1})
        assert gauge(disk, "disk_bytes", kind="used") == FILE + 2048
        assert gauge(disk, "disk_entries") == 1
    assert events == [
        ("filed", identity(0)),
        ("filed", identity(1)),
        ("filed", identity(2)),
        ("lost", identity(0)),
        ("lost", identity(1)),
        ("filed", identity(1)),
        ("lost", identity(2)),
    ]


def test_what_others_add_counts_against_the_cap(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path), 4 * FILE, rescan_s=SOON_S) as disk:
        for number in range(3):
            memory.store(disk, number)
        for number in range(3, 6):
            put(tmp_path, number)
        until(lambda: len(files_in(tmp_path)) == 4)
        until(lambda: gauge(disk, "disk_bytes", kind="used") == 4 * FILE)
        until(lambda: known(disk, range(6)) == {2, 3, 4, 5})


def test_a_rescan_with_nothing_new_tells_nothing(memory: Memory, tmp_path: Path) -> None:
    events: list[object] = []
    passes: list[str] = []
    spy = Sick(lambda name, args: passes.append(name) if name == "listdir" and "/ff" in args[0] else None)
    with LocalDiskBackend(
        str(tmp_path), rescan_s=SOON_S, on_filed=events.append, on_lost=events.append, files=spy
    ) as disk:
        for number in range(5):
            memory.store(disk, number)
        seen = len(passes)
        until(lambda: len(passes) > seen + 2)
        assert len(events) == 5


@pytest.mark.parametrize("word", list(POLICIES))
def test_what_others_have_just_written_stays_and_what_is_old_goes(memory: Memory, tmp_path: Path, word: str) -> None:
    policy = make_policy(word)
    with LocalDiskBackend(str(tmp_path), 4 * FILE, policy=policy, rescan_s=0.5) as disk:
        for number in range(2):
            memory.store(disk, number)
        until(lambda: gauge(disk, "disk_bytes", kind="used") == 2 * FILE)
        put(tmp_path, 2, age_s=1000)
        until(lambda: known(disk, range(9)) == {0, 1, 2})
        put(tmp_path, 3)
        until(lambda: known(disk, range(9)) == {0, 1, 2, 3})
        memory.store(disk, 4)
        assert known(disk, range(9)) == {0, 1, 3, 4}
        memory.store(disk, 5)
        memory.store(disk, 6)
        assert known(disk, range(9)) == {3, 4, 5, 6}


@pytest.mark.parametrize("word", list(POLICIES))
def test_two_nodes_over_a_full_folder_keep_what_either_wrote_last(memory: Memory, tmp_path: Path, word: str) -> None:
    with (
        LocalDiskBackend(str(tmp_path), 6 * FILE, policy=make_policy(word), rescan_s=SOON_S) as one,
        LocalDiskBackend(str(tmp_path), 6 * FILE, policy=make_policy(word), rescan_s=SOON_S) as other,
    ):
        for number in range(30):
            memory.store((one, other)[number % 2], number)
            until(lambda number=number: one.find(identity(number)) and other.find(identity(number)))
            until(lambda: len(files_in(tmp_path)) <= 6)
            assert file_of(tmp_path, number).exists()
        assert {int(name[:2], 16) for name in files_in(tmp_path)} == set(range(24, 30))


def test_folders_in_which_nothing_happens_are_not_walked_through(tmp_path: Path) -> None:
    looked_at: list[str] = []
    scans: list[str] = []

    def before(name: str, args: Any) -> None:
        if name == "lstat" and args[0].endswith(".safetensors"):
            looked_at.append(args[0])
        elif name == "listdir" and args[0].endswith("/damaged"):
            scans.append(args[0])

    def scan(times: int) -> None:
        before = len(scans)
        until(lambda: len(scans) >= before + times)

    for number in (1, 2):
        put(tmp_path, number)
    with LocalDiskBackend(str(tmp_path), rescan_s=SOON_S, files=Sick(before)) as disk:
        until(lambda: known(disk, range(3)) == {1, 2})
        scan(3)
        looked_at.clear()
        scan(2 * ALL_EVERY + 1)
        assert 2 <= looked_at.count(str(file_of(tmp_path, 1))) <= 3
        put(tmp_path, 3)
        (file_of(tmp_path, 2).parent / f".{identity(2).hex()}.00.tmp").touch()
        until(lambda: known(disk, range(4)) == {1, 2, 3})
        until(lambda: count(disk, "disk_swept") == 1)
        os.truncate(file_of(tmp_path, 1), 5000)  # in its place: a scan that walks through all finds out
        until(lambda: known(disk, range(4)) == {2, 3})


def test_a_folder_that_cannot_be_listed_keeps_its_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    sick = threading.Event()

    def before(name: str, args: Any) -> None:
        if sick.is_set() and name == "listdir" and args[0].endswith("/01"):
            raise os_error(errno.EACCES)

    with caplog.at_level(logging.WARNING), LocalDiskBackend(str(tmp_path), rescan_s=SOON_S, files=Sick(before)) as disk:
        until(lambda: known(disk, range(3)) == {1, 2})
        sick.set()
        until(lambda: count(disk, "disk_errors", op="scan", errno="EACCES") >= 2)
        assert known(disk, range(3)) == {1, 2}
        assert gauge(disk, "disk_bytes", kind="used") == 2 * FILE
    assert "could not be looked at" in caplog.text


def test_a_file_that_cannot_be_opened_counts_but_is_no_entry(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    sick = threading.Event()
    sick.set()

    def before(name: str, args: Any) -> None:
        if sick.is_set() and name == "open" and file_of(tmp_path, 1).name in args[0]:
            raise os_error(errno.EACCES)

    with LocalDiskBackend(str(tmp_path), rescan_s=SOON_S, files=Sick(before)) as disk:
        until(lambda: count(disk, "disk_errors", op="scan", errno="EACCES") >= 2)
        assert known(disk, range(3)) == {2}
        assert gauge(disk, "disk_bytes", kind="used") == 2 * FILE
        sick.clear()
        until(lambda: known(disk, range(3)) == {1, 2})


def test_a_file_that_could_not_be_read_is_an_entry_again_by_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing has changed in its folder."""
    monkeypatch.setattr("ec_p2p.engine.scan.ALL_EVERY", 1_000_000_000)
    state = Failing("open", 0)
    scans: list[str] = []

    def before(name: str, args: Any) -> None:
        if name == "listdir" and args[0].endswith("/damaged"):
            scans.append(name)
        state(name, args)

    put(tmp_path, 1)
    with LocalDiskBackend(str(tmp_path), rescan_s=SOON_S, files=Sick(before)) as disk:
        until(lambda: known(disk, range(2)) == {1} and len(scans) > 5)
        state.error = errno.EACCES
        assert read(disk, 1) is None
        assert known(disk, range(2)) == set()
        state.error = 0
        until(lambda: known(disk, range(2)) == {1})


# ---------------------------------------------------------------- a folder that is not there


def test_a_vanished_folder_loses_all_and_gives_it_back(memory: Memory, tmp_path: Path, clock: Clock) -> None:
    lost: list[bytes] = []
    folder, away = tmp_path / "disk", tmp_path / "away"
    with LocalDiskBackend(str(folder), on_lost=lost.append) as disk:
        for number in range(5):
            memory.store(disk, number)
        folder.rename(away)
        assert read(disk, 1) is None
        until(lambda: known(disk, range(5)) == set())
        assert sorted(lost) == [identity(number) for number in range(5)]
        assert gauge(disk, "disk_breaker", op="read") == 1
        assert gauge(disk, "disk_bytes", kind="used") == 0
        assert count(disk, "disk_errors", op="read", errno="ENOENT") == 1
        assert memory.offer(disk, 6)
        assert disk.flush(30)
        assert gauge(disk, "disk_breaker", op="write") == 1
        assert not memory.offer(disk, 7)
        assert not folder.exists()  # nothing is written beneath a mount point
        away.rename(folder)
        until(lambda: known(disk, range(7)) == set(range(5)))
        clock.now += 1
        assert read(disk, 1) == content(1, 2048)
        assert memory.offer(disk, 6)
        assert disk.flush(30)
        assert read(disk, 6) == content(6, 2048)
        assert gauge(disk, "disk_breaker", op="read") == gauge(disk, "disk_breaker", op="write") == 0


def test_a_folder_that_vanishes_during_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_p2p.engine.scan.longer", lambda delay_s: SOON_S)
    folder, away = tmp_path / "disk", tmp_path / "away"
    for number in range(3):
        put(folder, number)
    gate = Gate("open", ".safetensors")
    with LocalDiskBackend(str(folder), files=Sick(gate)) as disk:
        assert gate.reached.wait(30)
        folder.rename(away)
        gate.opened.set()
        until(lambda: gauge(disk, "disk_bytes", kind="used") == 0)
        away.rename(folder)
        until(lambda: known(disk, range(3)) == {0, 1, 2})


def test_nothing_is_written_where_nothing_could_be_sized(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_p2p.engine.scan.longer", lambda delay_s: SOON_S)
    sick = threading.Event()
    sick.set()

    def before(name: str, args: Any) -> None:
        if sick.is_set() and name == "lstat" and args[0].endswith(f"{LAYOUT}/."):
            raise os_error(errno.EIO)

    with LocalDiskBackend(str(tmp_path), files=Sick(before)) as disk:
        assert memory.offer(disk, 1)
        assert disk.flush(30)
        assert memory.cpu.pinned_bytes == 0
        assert not files_in(tmp_path)
        assert gauge(disk, "disk_breaker", op="write") == 1
        assert count(disk, "disk_errors", op="write", errno="EIO") == 1
        assert count(disk, "disk_errors", op="scan", errno="EIO") >= 1
        sick.clear()
        until(lambda: memory.offer(disk, 1) and disk.flush(30) and disk.find(identity(1)))
        assert gauge(disk, "disk_breaker", op="write") == 0


# ---------------------------------------------------------------- the end


def test_close_ends_a_scan_half_way(tmp_path: Path) -> None:
    put(tmp_path, 1)
    gate = Gate("listdir", "/80")
    disk = LocalDiskBackend(str(tmp_path), files=Sick(gate))
    assert gate.reached.wait(30)
    gate.opened.set()
    disk.close(30)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")]


def test_a_scan_that_begins_as_all_is_closed_hears_of_it(tmp_path: Path) -> None:
    """Its first step takes back every wish for a scan, and with it the one that ends the pause after the scan."""
    begins, may_begin = threading.Event(), threading.Event()

    class Wake(threading.Event):
        def clear(self) -> None:
            begins.set()
            assert may_begin.wait(30)
            super().clear()

    files, tally, index = Files(), Tally(), DiskIndex(FILE, LRU(), None, None)
    aside = SetAside(files, str(tmp_path), index, tally)
    examiner = Examiner(files, str(tmp_path), index, aside, tally, lambda: False)
    scanner = Scanner(files, str(tmp_path), index, examiner, aside, tally, rescan_s=1000.0, remove=lambda victims: None)
    scanner._wake = Wake()
    scanner.start()
    assert begins.wait(30)
    assert not scanner.close(0)
    may_begin.set()
    assert scanner.close(30)


def test_a_hung_scan_does_not_hold_up_close(memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("listdir", "/80")
    disk = LocalDiskBackend(str(tmp_path), files=Sick(gate))
    assert gate.reached.wait(30)
    pin = memory.pin(1)
    assert disk.offer(pin, memory.payload(pin))
    with caplog.at_level(logging.WARNING):
        disk.close(0.05)
    assert "the scan of" in caplog.text
    assert "2048 bytes were not written" in caplog.text
    gate.opened.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")])
    assert not files_in(tmp_path)
    pin.close()
