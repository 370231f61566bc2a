"""Random lives of a disk tier, of others who share its folder, and of its files, with a plain model beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ec_p2p.engine.disk import LAYOUT, LocalDiskBackend
from ec_p2p.engine.filed import HEADER_BYTES, Filed
from tests.engine.disks import Memory, content, count, file_of, files_in, gauge, identity, put, read, scanned, until

NUMBERS = st.integers(0, 6)
ROWS = st.integers(0, 8)
CAPACITIES = st.integers(20_000, 40_000)


def file_bytes(rows: int) -> int:
    return HEADER_BYTES + 512 * rows


class DiskMachine(RuleBasedStateMachine):
    @initialize(capacity=CAPACITIES)
    def begin(self, capacity: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.memory = Memory(1 << 20)
        self.files: dict[int, tuple[int, str]] = {}
        """What really lies in the folder: rows, and '' or which part of it is harmed."""
        self.known: dict[int, int] = {}
        """Rows of what the tier holds to be there, least recently used first."""
        self.aside: dict[int, int] = {}
        """Bytes of what was set aside."""
        self.harmed = 0
        self.start(capacity)

    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.told: dict[int, int] = {}
        with scanned():
            self.disk = LocalDiskBackend(str(self.folder), capacity, on_filed=self.on_filed, on_lost=self.on_lost)

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            self.memory.close()
            shutil.rmtree(self.folder)

    def on_filed(self, filed: Filed) -> None:
        assert filed.identity[0] not in self.told
        assert self.disk_says(filed.identity) in (None, filed.rows)
        self.told[filed.identity[0]] = filed.rows

    def on_lost(self, identity: bytes) -> None:
        del self.told[identity[0]]

    def disk_says(self, identity: bytes) -> int | None:
        # A scan may speak before the constructor has returned.
        found = self.disk.find(identity) if hasattr(self, "disk") else None
        return None if found is None else found.rows

    # ------------------------------------------------------------ the model

    def used(self) -> int:
        return sum(map(file_bytes, self.known.values())) + sum(self.aside.values())

    def seen(self, number: int, rows: int) -> None:
        """The tier has read this in a header. It keeps its place in the order, unless its size is another."""
        if number in self.known and self.known[number] == rows:
            return
        self.known.pop(number, None)
        self.known[number] = rows

    def set_aside(self, number: int) -> None:
        rows, _ = self.files.pop(number)
        self.aside[number] = file_bytes(rows)
        self.known.pop(number, None)

    def looked(self, number: int) -> int | None:
        """What a look at the header finds."""
        if number not in self.files:
            self.known.pop(number, None)
            return None
        rows, harm = self.files[number]
        if harm == "header":
            self.set_aside(number)
            return None
        self.seen(number, rows)
        return rows

    def make_room(self, number: int, nbytes: int) -> bool:
        missing = self.used() + nbytes - self.capacity
        victims: list[int] = []
        for victim, rows in self.known.items():
            if missing <= 0:
                break
            if victim != number:
                victims.append(victim)
                missing -= file_bytes(rows)
        if missing > 0:
            return False
        for victim in victims:
            del self.known[victim]
            self.files.pop(victim, None)
        return True

    # ------------------------------------------------------------ the tier

    @rule(number=NUMBERS, rows=ROWS)
    def store(self, number: int, rows: int) -> None:
        took = self.memory.offer(self.disk, number, rows)
        assert self.disk.flush(30)
        assert took == (number not in self.known)
        if not took or self.looked(number) == rows:
            return
        room = self.make_room(number, file_bytes(rows))
        if not room:
            self.aside.clear()
            room = self.make_room(number, file_bytes(rows))
        if room:
            self.known.pop(number, None)
            self.known[number] = rows
            self.files[number] = rows, ""

    @rule(number=NUMBERS)
    def look(self, number: int) -> None:
        found = self.disk.look(identity(number))
        assert (found and found.rows) == self.looked(number)

    @rule(number=NUMBERS)
    def read_what_is_known(self, number: int) -> None:
        if number in self.known:
            self.read(number, self.known[number])

    @rule(number=NUMBERS, rows=ROWS)
    def read(self, number: int, rows: int) -> None:
        found = read(self.disk, number, 512 * rows)
        if number in self.files and self.files[number] == (rows, "payload"):
            self.set_aside(number)
        elif self.looked(number) == rows:
            self.known[number] = self.known.pop(number)
            assert found == content(number, 512 * rows)
            return
        assert found is None

    @rule(capacity=CAPACITIES, order=st.permutations(range(7)))
    def restart(self, capacity: int, order: list[int]) -> None:
        """All files get another age, and the next life another cap."""
        self.disk.close()
        oldest_first = [number for number in order if number in self.files]
        for age, number in enumerate(reversed(oldest_first), 1):
            os.utime(file_of(self.folder, number), (time.time() - 100 * age,) * 2)
        self.known = {number: self.files[number][0] for number in oldest_first}
        del self.disk
        self.start(capacity)
        for number in oldest_first:
            if self.used() > capacity:
                del self.known[number]
                del self.files[number]
        kept = list(self.known)
        damaged = sum(self.files[number][1] == "header" for number in kept)
        for number in kept:
            self.looked(number)
        until(lambda: count(self.disk, "disk_damaged") == damaged)
        until(lambda: count(self.disk, "disk_evictions") == len(oldest_first) - len(kept))
        until(lambda: gauge(self.disk, "disk_entries") == len(self.known))
        until(lambda: gauge(self.disk, "disk_bytes", kind="used") == self.used())

    # ------------------------------------------------------------ others

    @rule(number=NUMBERS, rows=ROWS)
    def another_writes(self, number: int, rows: int) -> None:
        put(self.folder, number, rows)
        self.files[number] = rows, ""

    @rule(number=NUMBERS)
    def another_deletes(self, number: int) -> None:
        file_of(self.folder, number).unlink(missing_ok=True)
        self.files.pop(number, None)

    @precondition(lambda self: self.harmed < 8)  # so that all of them are kept
    @rule(number=NUMBERS, part=st.sampled_from(["header", "payload"]))
    def harm(self, number: int, part: str) -> None:
        if number not in self.files or self.files[number][1] or (part == "payload" and not self.files[number][0]):
            return
        with file_of(self.folder, number).open("r+b") as file:
            at = 100 if part == "header" else HEADER_BYTES + 7
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        self.files[number] = self.files[number][0], part
        self.harmed += 1

    # ------------------------------------------------------------ always

    @invariant()
    def what_is_known_is_the_models(self) -> None:
        assert {number: self.disk_says(identity(number)) for number in range(7)} == {
            number: self.known.get(number) for number in range(7)
        }
        assert gauge(self.disk, "disk_entries") == len(self.known)
        assert self.told == self.known

    @invariant()
    def all_bytes_count(self) -> None:
        assert gauge(self.disk, "disk_bytes", kind="used") == self.used()

    @invariant()
    def the_folder_is_the_models(self) -> None:
        expected = [f"{number:02x}/{file_of(self.folder, number).name}" for number in self.files]
        expected += [f"damaged/{file_of(self.folder, number).name}" for number in self.aside]
        assert files_in(self.folder) == sorted(expected)

    @invariant()
    def nothing_is_held_and_nothing_is_wrong(self) -> None:
        assert self.memory.cpu.pinned_bytes == 0
        assert gauge(self.disk, "disk_breaker", op="write") == gauge(self.disk, "disk_breaker", op="read") == 0
        assert not any(name == "disk_errors" for name, _ in self.disk.counts())
        assert count(self.disk, "disk_skipped", reason="queue_full") == 0
        assert (self.folder / LAYOUT).exists()


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=40)
