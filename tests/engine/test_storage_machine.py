"""Random lives of managers over one folder, and of the folder's files, with a plain model beside them.

The model knows which entry must be found and which must not: by what the listeners were told of memory, and by what
really lies in the folder. Which entries had to leave is the tiers' own machines' question.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ec_p2p import ECCacheEngine, StorageManager
from ec_p2p.engine.cpu import Entry, OutOfMemory, Pin
from ec_p2p.engine.disk import LAYOUT
from ec_p2p.engine.filed import HEADER_BYTES, Filed, path_of, write_file
from ec_p2p.engine.files import Files
from ec_p2p.engine.views import tensor_view
from ec_p2p.identity import entry_identity
from tests.engine.disks import gauge, scanned, until
from tests.engine.entries import DIM, DTYPE, ROW_BYTES, bytes_in, embedding, same
from tests.engine.tiers import entries_of

SLAB = 64 << 10
"""Four records and fifteen pages."""
ROWS = dict(zip("abcdefgh", [0, 1, 32, 33, 64, 100, 200, 300], strict=True))
LARGEST_FILE = HEADER_BYTES + 300 * ROW_BYTES
IDENTITY = {name: entry_identity("n", name) for name in ROWS}
NAME = {identity: name for name, identity in IDENTITY.items()}

ENTRIES = {name: embedding(name, rows) for name, rows in ROWS.items()}

NAMES = st.sampled_from(list(ROWS))
ALL = st.permutations(list(ROWS))
SOME = st.builds(lambda names, count: names[:count], ALL, st.integers(1, 8))
SIDES = st.integers(0, 1)
OPTIONS = st.fixed_dictionaries(
    {
        "max_local_cpu_size": st.sampled_from([SLAB, 2 * SLAB]),
        "max_local_disk_size": st.sampled_from([LARGEST_FILE, 2 * LARGEST_FILE, 10 * LARGEST_FILE]),
        "cache_policy": st.sampled_from(["LRU", "GDSF"]),
    }
)


def whole_files() -> dict[str, bytes]:
    """What each entry's file holds."""
    whole = {}
    with tempfile.TemporaryDirectory() as root:
        for name, rows in ROWS.items():
            filed = Filed(IDENTITY[name], rows * ROW_BYTES, rows, DIM, "bfloat16")
            payload = ENTRIES[name].view(torch.uint8).numpy().tobytes()
            write_file(Files(), root, filed, memoryview(payload), fsync=False, abandoned=lambda: False)
            whole[name] = Path(path_of(root, IDENTITY[name])).read_bytes()
    return whole


WHOLE = whole_files()


class Side:
    """One manager and its engine, as a process of its own would have them."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.capacity: int = options["max_local_disk_size"]
        self.pins: list[Pin] = []
        self.in_memory: set[str] = set()
        self.on_disk: set[str] = set()
        with scanned():
            self.storage = StorageManager(
                **options,
                slab_size=SLAB,
                local_disk=str(folder),
                on_stored=self._stored,
                on_evicted=self._evicted,
                on_filed=self._filed,
                on_lost=self._lost,
            )
        assert self.storage.disk is not None
        self.disk = self.storage.disk
        self.engine = ECCacheEngine("m", DTYPE, namespace="n", storage_manager=self.storage)
        until(lambda: self._knows(folder))

    def _knows(self, folder: Path) -> bool:
        """Whether the scan has come to its end."""
        entries = len(list((folder / LAYOUT).glob("[0-9a-f][0-9a-f]/*")))
        return (
            gauge(self.disk, "disk_bytes", kind="used") == bytes_in(folder) <= self.capacity
            and gauge(self.disk, "disk_entries") == entries
        )

    def close(self) -> None:
        for pin in self.pins:
            pin.close()
        self.storage.close()
        assert (self.storage.cpu.pinned_bytes, self.storage.cpu.reserved_bytes) == (0, 0)

    @contextmanager
    def without_room(self) -> Iterator[None]:
        """Meanwhile every record of the arena is in use."""
        cpu = self.storage.cpu
        with ExitStack() as stack:
            for entry in entries_of(cpu):
                stack.enter_context(cpu.pin(entry))
            with suppress(OutOfMemory):
                while True:
                    stack.callback(cpu.release, cpu.reserve(1))
            yield

    def _stored(self, entry: Entry) -> None:
        assert NAME[entry.identity] not in self.in_memory
        self.in_memory.add(NAME[entry.identity])

    def _evicted(self, entry: Entry) -> None:
        self.in_memory.remove(NAME[entry.identity])

    def _filed(self, filed: Filed) -> None:
        assert NAME[filed.identity] not in self.on_disk
        self.on_disk.add(NAME[filed.identity])

    def _lost(self, identity: bytes) -> None:
        self.on_disk.remove(NAME[identity])


class StorageMachine(RuleBasedStateMachine):
    @initialize(options=OPTIONS, names=SOME)
    def begin(self, options: dict[str, Any], names: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sides = [Side(self.folder, options)]
        self.was_shared = False
        self.put(0, names, settled=True)

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            for side in self.sides:
                side.close()
            shutil.rmtree(self.folder)

    def side(self, choice: int) -> Side:
        return self.sides[choice % len(self.sides)]

    def settle(self) -> None:
        for side in self.sides:
            assert side.engine.flush(30)

    # ------------------------------------------------------------ the folder

    def path(self, name: str) -> Path:
        return Path(path_of(str(self.folder / LAYOUT), IDENTITY[name]))

    def file(self, name: str) -> str:
        """'whole', 'missing', or the part that is damaged: 'header' (its length included) or 'payload'."""
        try:
            data = self.path(name).read_bytes()
        except FileNotFoundError:
            return "missing"
        if data == WHOLE[name]:
            return "whole"
        same_header = len(data) == len(WHOLE[name]) and data[:HEADER_BYTES] == WHOLE[name][:HEADER_BYTES]
        return "payload" if same_header else "header"

    def settled_file(self, name: str) -> str:
        self.settle()
        return self.file(name)

    # ------------------------------------------------------------ one engine

    @rule(choice=SIDES, names=SOME, settled=st.booleans())
    def put(self, choice: int, names: list[str], settled: bool) -> None:
        """Unsettled, what is being written is as good as pinned."""
        side = self.side(choice)
        for name in names:
            before = self.settled_file(name) if settled else ""
            known = side.disk.find(IDENTITY[name]) is not None
            if not side.engine.put(name, ENTRIES[name]):
                assert not known
                assert name not in side.in_memory
                self.settle()
                assert side.pins or (not settled and side.engine.put(name, ENTRIES[name]))
            elif settled:
                assert name in side.in_memory or (side.pins and known)
                assert known or self.settled_file(name) == ("payload" if before == "payload" else "whole")

    @rule(choice=SIDES, names=ALL, asked=st.booleans(), room=st.booleans())
    def get(self, choice: int, names: list[str], asked: bool, room: bool) -> None:
        side = self.side(choice)
        with nullcontext() if room else side.without_room():
            for name in names:
                was_in_memory = name in side.in_memory
                file = "" if was_in_memory else self.settled_file(name)
                if asked:
                    assert side.engine.contains(name) == (was_in_memory or file in ("whole", "payload"))
                got = side.engine.get(name)
                if was_in_memory or file == "whole":
                    assert got is not None
                    assert same(got, ENTRIES[name])
                    assert name in side.in_memory or side.pins or not room
                else:
                    assert got is None
                    assert self.file(name) == "missing"
                    assert not side.engine.contains(name)

    @rule(choice=SIDES, name=NAMES)
    def contains(self, choice: int, name: str) -> None:
        side = self.side(choice)
        there = name in side.in_memory or self.settled_file(name) in ("whole", "payload")
        assert side.engine.contains(name) == there

    @rule(choice=SIDES, names=SOME)
    def borrow(self, choice: int, names: list[str]) -> None:
        side = self.side(choice)
        for name in names:
            there = name in side.in_memory or self.settled_file(name) == "whole"
            try:
                pin = side.storage.borrow(IDENTITY[name])
            except OutOfMemory:
                assert side.pins
                assert name not in side.in_memory
                continue
            assert (pin is not None) == there
            if pin is not None:
                side.pins.append(pin)

    @rule(choice=SIDES, first=st.integers(0, 7), kept=st.integers(0, 3))
    def unpin(self, choice: int, first: int, kept: int) -> None:
        pins = self.side(choice).pins
        while len(pins) > kept:
            pins.pop(first % len(pins)).close()

    @rule(choice=SIDES, names=SOME)
    def leave_memory(self, choice: int, names: list[str]) -> None:
        side = self.side(choice)
        for name in names:
            was_in_memory = name in side.in_memory
            assert side.storage.cpu.remove(IDENTITY[name]) == was_in_memory
            assert name not in side.in_memory

    @rule()
    def flush(self) -> None:
        self.settle()
        for side in self.sides:
            cpu = side.storage.cpu
            pinned = {pin.entry for pin in side.pins}
            assert cpu.pinned_bytes == sum(entry.extent_bytes for entry in pinned)
            assert cpu.reserved_bytes == 0
            assert {name for name in ROWS if side.disk.find(IDENTITY[name])} == side.on_disk
            assert gauge(side.disk, "disk_entries") == len(side.on_disk)
            assert not any(name == "disk_errors" for name, _ in side.disk.counts())
        if not self.was_shared:
            assert bytes_in(self.folder) <= self.sides[0].capacity

    # ------------------------------------------------------------ lives, and others

    @rule(ends=st.lists(SIDES, max_size=2), begins=st.lists(OPTIONS, min_size=1, max_size=2))
    def live_on(self, ends: list[int], begins: list[dict[str, Any]]) -> None:
        """Managers are closed, others are opened; at least one there is, and at most two there are."""
        for choice in ends:
            if self.sides:
                self.sides.pop(choice % len(self.sides)).close()
        self.settle()
        self.was_shared = bool(self.sides)
        for options in begins[: 2 - len(self.sides)]:
            self.sides.append(Side(self.folder, options))
        self.was_shared |= len(self.sides) > 1

    @rule(names=SOME, at=st.floats(0, 1, exclude_max=True), how=st.sampled_from(["delete", "flip", "truncate"]))
    def harm(self, names: list[str], at: float, how: str) -> None:
        for name in names:
            if self.settled_file(name) == "missing":
                continue
            path = self.path(name)
            if how == "delete":
                path.unlink()
            elif how == "truncate":
                os.truncate(path, int(at * path.stat().st_size))
            elif data := bytearray(path.read_bytes()):
                data[int(at * len(data))] ^= 0x10
                path.write_bytes(data)

    # ------------------------------------------------------------ always

    @invariant()
    def what_is_in_memory_is_right(self) -> None:
        for side in self.sides:
            entries = entries_of(side.storage.cpu)
            assert {NAME[entry.identity] for entry in entries} == side.in_memory
            for entry in {*entries, *(pin.entry for pin in side.pins)}:
                name = NAME[entry.identity]
                view = tensor_view(side.storage.arena, entry.offset, entry.rows, entry.dim, DTYPE)
                assert same(view, ENTRIES[name])


TestStorageMachine = StorageMachine.TestCase
TestStorageMachine.settings = settings(max_examples=80, stateful_step_count=40)
