from __future__ import annotations

import errno
import logging
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ec_p2p.engine.disk import LAYOUT, LocalDiskBackend
from ec_p2p.engine.filed import HEADER_BYTES, Filed
from ec_p2p.engine.policy import LRU, POLICIES, make_policy
from tests.engine.disks import (
    FILE,
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
    put,
    read,
    until,
)


class Heard:
    """What a backend's listeners were told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def filed(self, filed: Filed) -> None:
        self.events.append(("filed", filed.identity[0]))

    def lost(self, identity: bytes) -> None:
        self.events.append(("lost", identity[0]))


# ---------------------------------------------------------------- writing and reading


def test_what_is_offered_is_written_and_read_back(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        assert disk.find(identity(1)) is disk.look(identity(1)) is None
        assert read(disk, 1) is None
        filed = memory.store(disk, 1)
        assert filed == Filed(identity(1), 2048, 4, 256, "float16")
        assert disk.look(identity(1)) == filed
        assert read(disk, 1) == content(1, 2048)
        assert file_of(tmp_path, 1).stat().st_size == filed.file_bytes == FILE
        assert gauge(disk, "disk_bytes", kind="used") == FILE
        assert gauge(disk, "disk_bytes", kind="capacity") == 64 << 30
        assert gauge(disk, "disk_bytes", kind="queued") == 0
        assert gauge(disk, "disk_entries") == 1
        assert count(disk, "disk_writes") == 1
        assert count(disk, "disk_written_bytes") == FILE
        assert count(disk, "disk_reads", outcome="hit") == 1
        assert count(disk, "disk_reads", outcome="miss") == 1
        assert count(disk, "disk_read_bytes") == 2048


@pytest.mark.parametrize(("rows", "dim"), [(0, 256), (4, 0), (1, 1), (3, 300_000)])
def test_any_shape_comes_back(memory: Memory, tmp_path: Path, rows: int, dim: int) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        filed = memory.store(disk, 1, rows, dim, "uint8")
        assert (filed.rows, filed.dim, filed.dtype) == (rows, dim, "uint8")
    with LocalDiskBackend(str(tmp_path)) as disk:
        assert disk.look(identity(1)) == filed
        assert read(disk, 1, rows * dim) == content(1, rows * dim)


def test_an_entry_is_written_once(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        memory.store(disk, 1)
        assert not memory.offer(disk, 1)
        assert count(disk, "disk_writes") == 1
        assert not any(value for (name, _), value in disk.counts().items() if name == "disk_skipped")


def test_what_another_node_has_written_is_not_written_again(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        inode = put(tmp_path, 1).stat().st_ino
        memory.store(disk, 1)
        assert file_of(tmp_path, 1).stat().st_ino == inode
        assert count(disk, "disk_writes") == 0
        put(tmp_path, 2, rows=8)  # not what is to be stored
        assert memory.store(disk, 2).rows == 4
        assert read(disk, 2) == content(2, 2048)
        assert gauge(disk, "disk_bytes", kind="used") == 2 * FILE


def test_known_before_the_pin_closes(memory: Memory, tmp_path: Path) -> None:
    pinned: list[tuple[int, bool]] = []

    def filed(filed: Filed) -> None:
        pinned.append((memory.cpu.pinned_bytes, disk.find(filed.identity) is filed))

    with LocalDiskBackend(str(tmp_path), on_filed=filed) as disk:
        memory.store(disk, 1)
    assert pinned == [(4096, True)]


def test_fsync_reaches_the_file_and_its_folder(memory: Memory, tmp_path: Path) -> None:
    synced: list[bool] = []

    def before(name: str, args: Any) -> None:
        if name == "fsync":
            synced.append(stat.S_ISDIR(os.fstat(args[0]).st_mode))

    for fsync, expected in ((False, []), (True, [False, True])):
        with LocalDiskBackend(str(tmp_path), fsync=fsync, files=Sick(before)) as disk:
            memory.store(disk, int(fsync))
        assert synced == expected


def test_a_buffer_of_another_size_gets_nothing(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        memory.store(disk, 1)
        assert read(disk, 1, 2047) is None
        assert read(disk, 1, 2049) is None
        assert count(disk, "disk_reads", outcome="miss") == 2
        assert count(disk, "disk_damaged") == 0
        assert read(disk, 1) == content(1, 2048)


def test_what_is_not_taken_says_why(memory: Memory, tmp_path: Path) -> None:
    gate = Gate("pwritev")
    with LocalDiskBackend(str(tmp_path), 4 * FILE, queue_bytes=2 * 2048, files=Sick(gate)) as disk:
        assert memory.offer(disk, 1)
        assert gate.reached.wait(30)
        assert memory.offer(disk, 2)
        assert not memory.offer(disk, 1)
        assert not memory.offer(disk, 2)
        assert not memory.offer(disk, 3)
        assert not memory.offer(disk, 4, rows=100)
        assert gauge(disk, "disk_bytes", kind="queued") == 2 * 2048
        assert count(disk, "disk_skipped", reason="queue_full") == 1
        assert count(disk, "disk_skipped", reason="too_large") == 1
        gate.opened.set()
        assert disk.flush(30)
        memory.store(disk, 3)


def test_a_folder_that_cannot_be_made_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"local_disk='.*/file/below' cannot be made: Not a directory"):
        LocalDiskBackend(str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match="local_disk='' names no folder"):
        LocalDiskBackend("")
    for bad in ({"max_local_disk_size": 0}, {"queue_bytes": -1}, {"rescan_s": 0.0}, {"rescan_s": float("inf")}):
        [(key, value)] = bad.items()
        with pytest.raises(ValueError, match=f"{key}={value}; accepted: a positive number"):
            LocalDiskBackend(str(tmp_path / "disk"), **bad)
    assert not (tmp_path / "disk").exists()


def test_the_tier_needs_no_torch() -> None:
    code = "import sys, ec_p2p.engine as e; e.LocalDiskBackend; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


# ---------------------------------------------------------------- a folder that others share


def test_look_finds_what_others_wrote_and_loses_what_they_deleted(memory: Memory, tmp_path: Path) -> None:
    heard = Heard()
    with LocalDiskBackend(str(tmp_path), on_filed=heard.filed, on_lost=heard.lost) as disk:
        put(tmp_path, 1)
        assert disk.find(identity(1)) is None
        filed = disk.look(identity(1))
        assert filed is not None
        assert disk.find(identity(1)) == disk.look(identity(1)) == filed
        assert gauge(disk, "disk_bytes", kind="used") == FILE
        file_of(tmp_path, 1).unlink()
        assert disk.find(identity(1)) == filed
        assert disk.look(identity(1)) is disk.look(identity(1)) is disk.find(identity(1)) is None
        assert gauge(disk, "disk_bytes", kind="used") == 0
        put(tmp_path, 1)
        assert read(disk, 1) == content(1, 2048)
        file_of(tmp_path, 1).unlink()
        assert read(disk, 1) is read(disk, 1) is None
        assert disk.find(identity(1)) is None
        assert gauge(disk, "disk_breaker", op="read") == 0
    assert heard.events == [("filed", 1), ("lost", 1)] * 2


@pytest.mark.parametrize("operation", ["open", "fstat", "preadv"])
def test_what_another_host_deleted_on_nfs_is_a_miss(memory: Memory, tmp_path: Path, operation: str) -> None:
    stale = Failing(operation, 0)
    with LocalDiskBackend(str(tmp_path), files=Sick(stale)) as disk:
        memory.store(disk, 1)
        stale.error = errno.ESTALE
        assert read(disk, 1) is disk.find(identity(1)) is None
        assert gauge(disk, "disk_breaker", op="read") == 0
        assert count(disk, "disk_reads", outcome="miss") == 1


def test_a_file_that_another_replaced_counts_with_its_new_size(memory: Memory, tmp_path: Path) -> None:
    heard = Heard()
    with LocalDiskBackend(str(tmp_path), on_filed=heard.filed, on_lost=heard.lost) as disk:
        memory.store(disk, 1)
        for rows in (8, 2, 2):
            put(tmp_path, 1, rows=rows)
            filed = disk.look(identity(1))
            assert filed is not None
            assert filed.rows == rows
            assert disk.find(identity(1)) == filed
            assert gauge(disk, "disk_bytes", kind="used") == filed.file_bytes
        put(tmp_path, 1, rows=6)
        assert read(disk, 1, 1024) is None
        assert read(disk, 1, 6 * 512) == content(1, 6 * 512)
        assert gauge(disk, "disk_bytes", kind="used") == HEADER_BYTES + 6 * 512
        assert gauge(disk, "disk_entries") == 1
    assert heard.events == [("filed", 1)] + [("lost", 1), ("filed", 1)] * 3


WRITER = """
import sys, threading
from pathlib import Path
from tests.engine.disks import Memory, Sick, LocalDiskBackend

def before(name, args):
    if name == "pwritev" and args[2] > 4096:
        print("half", flush=True)
        threading.Event().wait()

memory = Memory()
disk = LocalDiskBackend(sys.argv[1], files=Sick(before))
memory.offer(disk, 1, 1, 3 << 20, "uint8")
threading.Event().wait()
"""


def test_two_processes_write_one_key_and_one_of_them_dies(memory: Memory, tmp_path: Path) -> None:
    """The other's file is right; what the dead one left goes with the next scan, and not before it died."""
    payload = content(1, 3 << 20)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            with LocalDiskBackend(str(tmp_path)) as disk:
                memory.store(disk, 1, 1, 3 << 20, "uint8")
                assert read(disk, 1, len(payload)) == payload
            passes: list[str] = []
            spy = Sick(lambda name, args: passes.append(name) if name == "listdir" and "/ff" in args[0] else None)
            with LocalDiskBackend(str(tmp_path), rescan_s=0.02, files=spy) as disk:
                until(lambda: len(passes) > 2)
                assert len(files_in(tmp_path)) == 2
                assert count(disk, "disk_swept") == 0
                process.kill()
                until(lambda: len(files_in(tmp_path)) == 1)
                assert read(disk, 1, len(payload)) == payload
            assert count(disk, "disk_swept") == 1
        finally:
            process.kill()


# ---------------------------------------------------------------- damage


def flip(at: int) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))

    return harm


def claim(length: int) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(length.to_bytes(8, "little"))

    return harm


def nest(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b'{"__metadata__":' + b"[" * 4000)


def impersonate(path: Path) -> None:
    folder = path.parents[2]
    os.replace(put(folder, 77), path)


HARMS: dict[str, Callable[[Path], None]] = {
    "truncated payload": lambda path: os.truncate(path, FILE - 1),
    "truncated header": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, FILE + 1),
    "flipped in the length": flip(3),
    "flipped in the metadata": flip(60),
    "flipped in the padding": flip(4000),
    "flipped in the payload": flip(HEADER_BYTES),
    "flipped at the end": flip(FILE - 1),
    "a header of 4 GB": claim(4 << 30),
    "a header of 2**64 - 1": claim((1 << 64) - 1),
    "deeply nested": nest,
    "another entry's": impersonate,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_is_damaged_is_a_miss_and_set_aside(memory: Memory, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    heard = Heard()
    with LocalDiskBackend(str(tmp_path), on_filed=heard.filed, on_lost=heard.lost) as disk:
        memory.store(disk, 1)
        harm(file_of(tmp_path, 1))
        harmed = file_of(tmp_path, 1).read_bytes()
        assert read(disk, 1) is None
        assert disk.find(identity(1)) is disk.look(identity(1)) is None
        assert files_in(tmp_path) == [f"damaged/{file_of(tmp_path, 1).name}"]
        assert (tmp_path / LAYOUT / "damaged" / file_of(tmp_path, 1).name).read_bytes() == harmed
        assert count(disk, "disk_damaged") == count(disk, "disk_reads", outcome="damaged") == 1
        assert gauge(disk, "disk_bytes", kind="used") == len(harmed)
        assert gauge(disk, "disk_breaker", op="read") == 0
        memory.store(disk, 1)
        assert read(disk, 1) == content(1, 2048)
    assert heard.events == [("filed", 1), ("lost", 1), ("filed", 1)]


def test_a_good_file_in_a_damaged_ones_place_stays(memory: Memory, tmp_path: Path) -> None:
    """Another node has replaced it just before it is set aside."""

    def before(name: str, args: Any) -> None:
        if name == "mkdir" and args[0].endswith("damaged"):
            put(tmp_path, 1)

    with LocalDiskBackend(str(tmp_path), files=Sick(before)) as disk:
        memory.store(disk, 1)
        flip(5000)(file_of(tmp_path, 1))
        assert read(disk, 1) is None
        assert read(disk, 1) == content(1, 2048)
        assert gauge(disk, "disk_bytes", kind="used") == FILE


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("make", [Path.mkdir, make_link, os.mkfifo], ids=["folder", "link", "pipe"])
def test_what_is_no_file_is_a_miss_and_left_alone(memory: Memory, tmp_path: Path, make: Any) -> None:
    heard = Heard()
    with LocalDiskBackend(str(tmp_path), on_filed=heard.filed, on_lost=heard.lost) as disk:
        memory.store(disk, 1)
        file_of(tmp_path, 1).unlink()
        make(file_of(tmp_path, 1))
        before = file_of(tmp_path, 1).lstat()
        assert read(disk, 1) is disk.look(identity(1)) is disk.find(identity(1)) is None
        assert file_of(tmp_path, 1).lstat().st_ino == before.st_ino
        assert count(disk, "disk_damaged") == 1
        assert gauge(disk, "disk_bytes", kind="used") == 0
        assert gauge(disk, "disk_breaker", op="read") == 0
    assert heard.events == [("filed", 1), ("lost", 1)]


def test_a_folder_in_an_entrys_place_harms_no_other(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        file_of(tmp_path, 1).mkdir(parents=True)
        assert memory.offer(disk, 1)
        memory.store(disk, 2)
        assert gauge(disk, "disk_breaker", op="write") == 0
        assert count(disk, "disk_errors", op="write", errno="EISDIR") == 1
        assert gauge(disk, "disk_bytes", kind="used") == FILE
    assert os.listdir(file_of(tmp_path, 1).parent) == [file_of(tmp_path, 1).name]


def test_eight_damaged_files_are_kept(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        for number in range(12):
            memory.store(disk, number)
            flip(5000)(file_of(tmp_path, number))
            assert read(disk, number) is None
            # The order in which they came is told by a clock that ticks every few milliseconds.
            until(lambda number=number: _now_of(tmp_path) > _set_aside(tmp_path, number).stat().st_ctime_ns)
        assert files_in(tmp_path) == [f"damaged/{file_of(tmp_path, number).name}" for number in range(4, 12)]
        assert gauge(disk, "disk_bytes", kind="used") == 8 * FILE
        assert count(disk, "disk_damaged") == 12
    with LocalDiskBackend(str(tmp_path)) as disk:
        until(lambda: gauge(disk, "disk_bytes", kind="used") == 8 * FILE)


def _set_aside(folder: Path, number: int) -> Path:
    return folder / LAYOUT / "damaged" / file_of(folder, number).name


def _now_of(folder: Path) -> int:
    (folder / "clock").write_bytes(b"")
    (folder / "clock").unlink()
    return folder.stat().st_ctime_ns


def test_damaged_files_give_way_when_nothing_else_can(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path), 3 * FILE) as disk:
        for number in range(3):
            memory.store(disk, number)
        for number in (1, 2):
            flip(5000)(file_of(tmp_path, number))
            assert read(disk, number) is None
        memory.store(disk, 3)
        assert len(files_in(tmp_path)) == 3
        assert disk.find(identity(0)) is None
        memory.store(disk, 4, rows=10)
        assert files_in(tmp_path) == [f"0{number}/{file_of(tmp_path, number).name}" for number in (3, 4)]
        assert gauge(disk, "disk_bytes", kind="used") == FILE + HEADER_BYTES + 5120


# ---------------------------------------------------------------- eviction


def test_room_is_made_by_the_least_recently_used(memory: Memory, tmp_path: Path) -> None:
    heard = Heard()
    with LocalDiskBackend(str(tmp_path), 3 * FILE, on_filed=heard.filed, on_lost=heard.lost) as disk:
        for number in range(3):
            memory.store(disk, number)
        assert read(disk, 0) is not None
        memory.store(disk, 3)
        assert disk.find(identity(1)) is None
        assert count(disk, "disk_evictions") == 1
        assert gauge(disk, "disk_bytes", kind="used") == 3 * FILE
        assert len(files_in(tmp_path)) == 3
    assert heard.events == [("filed", 0), ("filed", 1), ("filed", 2), ("lost", 1), ("filed", 3)]


def test_no_more_goes_than_is_needed(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path), 5 * FILE) as disk:
        for number in range(4):
            memory.store(disk, number)
        memory.store(disk, 4)
        assert count(disk, "disk_evictions") == 0
        memory.store(disk, 5, rows=1)
        assert count(disk, "disk_evictions") == 1
        memory.store(disk, 6, rows=6)
        assert {number for number in range(7) if disk.find(identity(number))} == {2, 3, 4, 5, 6}
        assert gauge(disk, "disk_bytes", kind="used") <= 5 * FILE


def test_the_policy_is_the_callers(memory: Memory, tmp_path: Path) -> None:
    class NewestFirst(LRU):
        def victims(self) -> Iterator[bytes]:
            return reversed(list(super().victims()))

    with LocalDiskBackend(str(tmp_path), 3 * FILE, policy=NewestFirst()) as disk:
        for number in range(5):
            memory.store(disk, number)
        assert {number for number in range(5) if disk.find(identity(number))} == {0, 1, 4}


@pytest.mark.parametrize("word", list(POLICIES))
def test_each_policy_keeps_the_cap(memory: Memory, tmp_path: Path, word: str) -> None:
    choice = random.Random(5)
    for _ in range(2):
        with LocalDiskBackend(str(tmp_path), 10 * FILE, policy=make_policy(word), rescan_s=0.01) as disk:
            for _ in range(150):
                number, rows = choice.randrange(30), choice.randrange(1, 9)
                memory.offer(disk, number, rows)
                assert disk.flush(30)
                assert gauge(disk, "disk_bytes", kind="used") <= 10 * FILE
                assert read(disk, number, 512 * rows) in (content(number, 512 * rows), None)
                file_of(tmp_path, choice.randrange(30)).unlink(missing_ok=True)
            assert count(disk, "disk_evictions") > 0


def test_what_is_being_read_is_no_victim(memory: Memory, tmp_path: Path) -> None:
    gate = Gate("utime")
    with LocalDiskBackend(str(tmp_path), 2 * FILE, files=Sick(gate)) as disk:
        memory.store(disk, 1)
        memory.store(disk, 2)
        os.utime(file_of(tmp_path, 1), (0, 0))
        found: list[bytes | None] = []
        reader = threading.Thread(target=lambda: found.append(read(disk, 1)))
        reader.start()
        assert gate.reached.wait(30)
        memory.store(disk, 3)
        assert disk.find(identity(1)) is not None
        assert disk.find(identity(2)) is None
        assert memory.offer(disk, 4, rows=8)  # would need the one that is being read
        assert disk.flush(30)
        assert disk.find(identity(4)) is None
        assert {number for number in range(9) if disk.find(identity(number))} == {1, 3}  # and nothing went for it
        assert count(disk, "disk_skipped", reason="in_use") == 1
        gate.opened.set()
        reader.join()
        assert found == [content(1, 2048)]
        assert memory.store(disk, 4, rows=8)


def test_a_victim_is_not_found_again_before_it_is_gone(memory: Memory, tmp_path: Path) -> None:
    heard = Heard()
    gate = Gate("unlink", file_of(tmp_path, 1).name)
    with LocalDiskBackend(str(tmp_path), FILE, on_filed=heard.filed, on_lost=heard.lost, files=Sick(gate)) as disk:
        memory.store(disk, 1)
        assert memory.offer(disk, 2)
        assert gate.reached.wait(30)
        assert disk.find(identity(1)) is disk.look(identity(1)) is read(disk, 1) is None
        gate.opened.set()
        assert disk.flush(30)
    assert heard.events == [("filed", 1), ("lost", 1), ("filed", 2)]


# ---------------------------------------------------------------- the end


class Slow:
    """A disk that takes its time for each chunk."""

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("pwritev", "rename"):
            time.sleep(0.01)


def test_close_writes_a_burst_to_a_slow_disk(memory: Memory, tmp_path: Path) -> None:
    disk = LocalDiskBackend(str(tmp_path), files=Sick(Slow()))
    for number in range(12):
        assert memory.offer(disk, number, 1, 100_000, "uint8")
    disk.close()
    assert memory.cpu.pinned_bytes == 0
    memory.arena.buffer[:] = bytes(len(memory.arena.buffer))  # whoever still reads it writes zeros
    assert len(files_in(tmp_path)) == 12
    with LocalDiskBackend(str(tmp_path)) as disk:
        for number in range(12):
            assert read(disk, number, 100_000) == content(number, 100_000)


def test_after_close_nothing_is_done(memory: Memory, tmp_path: Path) -> None:
    disk = LocalDiskBackend(str(tmp_path))
    memory.store(disk, 1)
    disk.close()
    disk.close()
    assert not memory.offer(disk, 2)
    assert disk.flush(0)
    assert read(disk, 1) is disk.look(identity(1)) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")]


def test_close_waits_for_who_reads(memory: Memory, tmp_path: Path) -> None:
    gate = Gate("preadv")
    disk = LocalDiskBackend(str(tmp_path), files=Sick(gate))
    memory.store(disk, 1)
    found: list[bytes | None] = []
    reader = threading.Thread(target=lambda: found.append(read(disk, 1)))
    reader.start()
    assert gate.reached.wait(30)
    closer = threading.Thread(target=disk.close)
    closer.start()
    until(lambda: not memory.offer(disk, 2))
    gate.opened.set()
    closer.join()
    assert found == [content(1, 2048)]
    reader.join()


def test_a_hung_write_does_not_hold_up_close(memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("pwritev")
    disk = LocalDiskBackend(str(tmp_path), files=Sick(gate))
    pins = [memory.pin(number, 1, 2 << 20, "uint8") for number in range(2)]
    assert all(disk.offer(pin, memory.payload(pin)) for pin in pins)
    assert gate.reached.wait(30)
    with caplog.at_level(logging.WARNING):
        disk.close(0.05)
    assert f"{4 << 20} bytes were not written" in caplog.text
    assert memory.cpu.pinned_bytes == 4 << 20
    gate.opened.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ec-p2p-disk")])
    assert files_in(tmp_path) == []
    assert memory.cpu.pinned_bytes == 4 << 20
    for pin in pins:
        pin.close()


def test_a_hung_read_does_not_hold_up_close(memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nbytes = 3 << 20
    gate = Gate("preadv")
    spy = Sick(lambda name, args: name == "preadv" and args[2] > HEADER_BYTES and gate(name, args))
    disk = LocalDiskBackend(str(tmp_path), files=spy)
    memory.store(disk, 1, 1, nbytes, "uint8")
    into = bytearray(nbytes)
    found: list[Filed | None] = []
    reader = threading.Thread(target=lambda: found.append(disk.read(identity(1), memoryview(into))))
    reader.start()
    assert gate.reached.wait(30)
    with caplog.at_level(logging.WARNING):
        disk.close(0.05)
    assert "1 reads from" in caplog.text
    gate.opened.set()
    reader.join()
    assert found == [None]
    assert not any(into[2 << 20 :])


def test_idle_threads_sleep(memory: Memory, tmp_path: Path) -> None:
    def switches() -> list[str]:
        return [
            line
            for thread in threading.enumerate()
            if thread.name.startswith("ec-p2p-disk")
            for line in Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
            if "ctxt_switches" in line
        ]

    passes: list[str] = []
    spy = Sick(lambda name, args: passes.append(name) if name == "open" else None)
    put(tmp_path, 1)
    with LocalDiskBackend(str(tmp_path), files=spy) as disk:
        memory.store(disk, 2)
        until(lambda: disk.find(identity(1)))
        last: list[list[str]] = [[]]

        def settled() -> bool:
            time.sleep(0.1)
            last.append(switches())
            return last[-1] == last[-2]

        until(settled)
        time.sleep(0.5)
        assert switches() == last[-1]
        assert len(last[-1]) == 4
