"""Processes that are killed at any moment while they put: what the next one finds on disk is right, or nothing."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_p2p import ECCacheEngine
from ec_p2p.engine.filed import identity_in, is_temp
from tests.engine.crash_child import NAMES, config, name_of
from tests.engine.disks import count, gauge, until
from tests.engine.entries import DTYPE, bytes_in, is_right, rows_of

CAP = 12 << 20
ROUNDS = 15
ROOT = Path(__file__).parents[2]


class Nursery:
    """Starts processes that put, and ends them in the middle of it."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder

    def start(self, seed: int) -> int:
        """A descriptor of the process, for `kill`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.folder} {seed} {CAP}\n")
        self.process.stdin.flush()
        return os.pidfd_open(int(self.process.stdout.readline()))

    @staticmethod
    def kill(fd: int) -> None:
        """Kill it, and wait until it has let go of everything."""
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            assert select.select([fd], [], [], 30)[0]
        finally:
            os.close(fd)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    command = [sys.executable, "-m", "tests.engine.crash_child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield Nursery(process, tmp_path_factory.mktemp("disk"))
        # Its input ends here, and so does it.


def entry_files(folder: Path) -> dict[bytes, Path]:
    """All entries in the folder, by identity."""
    named = {path: identity_in(path.name) for path in folder.rglob("*") if path.parent.name != "damaged"}
    return {identity: path for path, identity in named.items() if identity is not None}


@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_while_putting(nursery: Nursery, number: int) -> None:
    """Each third round has two processes that put the same entries, killed one after the other; in each fifth they are
    killed while they start."""
    moment = random.Random(number)
    seed = number // 3
    before = set(entry_files(nursery.folder))
    processes = [nursery.start(seed) for _ in range(2 if number % 3 == 2 else 1)]
    try:
        if number % 5:
            until(lambda: set(entry_files(nursery.folder)) - before)
        for _ in processes:
            time.sleep(moment.random() / 5)
    finally:
        for fd in processes:
            nursery.kill(fd)

    with ECCacheEngine("m", DTYPE, config=config(str(nursery.folder), CAP)) as engine:
        disk = engine.storage_manager.disk
        assert disk is not None
        names = [name_of(seed, at) for seed in range(seed + 1) for at in range(NAMES)]
        found = {name for name in names if engine.contains(name)}
        until(lambda: gauge(disk, "disk_entries") == len(entry_files(nursery.folder)))
        until(lambda: gauge(disk, "disk_bytes", kind="used") == bytes_in(nursery.folder) <= CAP)
        until(lambda: not [path for path in nursery.folder.rglob("*") if is_temp(path.name)])
        standing = entry_files(nursery.folder)
        for name in names:
            stands = engine.identity(name) in standing
            got = engine.get(name)
            assert is_right(got, name, rows_of(name)) if stands else got is None
            assert not stands or name in found
        assert count(disk, "disk_damaged") == 0
        assert number % 5 == 0 or count(disk, "disk_reads", outcome="hit") > 0
