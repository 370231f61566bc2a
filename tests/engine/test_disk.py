from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_p2p.engine.disk import LocalDiskBackend
from ec_p2p.engine.filed import HEADER_BYTES, Filed
from tests.engine.disks import Memory, content, count, file_of, files_in, gauge, identity, read, until

FILE = HEADER_BYTES + 2048
"""Bytes of the file of an entry of the usual size."""


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


class Heard:
    """What a backend's listeners were told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bytes]] = []

    def filed(self, filed: Filed) -> None:
        self.events.append(("filed", filed.identity))

    def lost(self, identity: bytes) -> None:
        self.events.append(("lost", identity))


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
        assert gauge(disk, "disk_entries") == 1
        assert count(disk, "disk_writes") == 1
        assert count(disk, "disk_written_bytes") == FILE
        assert count(disk, "disk_reads", outcome="hit") == 1
        assert count(disk, "disk_reads", outcome="miss") == 1
        assert count(disk, "disk_read_bytes") == 2048


def test_an_entry_is_written_once(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        memory.store(disk, 1)
        assert not memory.offer(disk, 1)
        assert count(disk, "disk_writes") == 1


def test_a_restart_finds_what_was_written(memory: Memory, tmp_path: Path) -> None:
    with LocalDiskBackend(str(tmp_path)) as disk:
        for number in range(20):
            memory.store(disk, number)
    heard = Heard()
    with LocalDiskBackend(str(tmp_path), on_filed=heard.filed) as disk:
        until(lambda: gauge(disk, "disk_entries") == 20)
        assert gauge(disk, "disk_bytes", kind="used") == 20 * FILE
        assert all(read(disk, number) == content(number, 2048) for number in range(20))
    assert sorted(heard.events) == [("filed", identity(number)) for number in range(20)]


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
    assert heard.events == [
        ("filed", identity(0)),
        ("filed", identity(1)),
        ("filed", identity(2)),
        ("lost", identity(1)),
        ("filed", identity(3)),
    ]
