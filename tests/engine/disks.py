"""What tests of the disk tier share: an arena to write from, and ways to say what should be on disk."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import LocalCPUBackend, Pin
from ec_p2p.engine.disk import LAYOUT, LocalDiskBackend
from ec_p2p.engine.filed import HEADER_BYTES, Filed, path_of, write_file
from ec_p2p.engine.files import Files
from ec_p2p.engine.generation import itemsize
from ec_p2p.engine.scan import Scanner

FILE = HEADER_BYTES + 2048
"""Bytes of the file of an entry of the usual size."""


def identity(number: int) -> bytes:
    """32 bytes that differ in the first one too, so that entries lie in several folders."""
    return bytes([number % 256]) + number.to_bytes(31, "little")


class Sick(Files):
    """Real file operations; `before(operation, arguments)` is called ahead of each, and may wait or raise."""

    def __init__(self, before: Callable[[str, tuple[Any, ...]], object]) -> None:
        for name in (name for name in vars(Files) if not name.startswith("_")):
            setattr(self, name, self._hooked(name, getattr(Files, name), before))

    @staticmethod
    def _hooked(name: str, real: Callable[..., Any], before: Callable[[str, tuple[Any, ...]], object]) -> Any:
        def call(*args: Any) -> Any:
            try:
                before(name, args)
            except BaseException:
                if name == "close":
                    real(*args)  # as the operating system does: what it could not write is gone, and so is the number
                raise
            return real(*args)

        return call


class Gate:
    """Holds up one kind of file operation until it is opened."""

    def __init__(self, operation: str, matching: str = "") -> None:
        self.operation = operation
        self.matching = matching
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if name == self.operation and self.matching in str(args[0]):
            self.reached.set()
            assert self.opened.wait(30)


class Clock:
    """The breakers' time, which passes when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Failing:
    """One kind of operation fails while `error` is set, on the paths that are `matching`."""

    def __init__(self, operation: str, error: int, matching: str = "") -> None:
        self.operation = operation
        self.error = error
        self.matching = matching

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.error and name == self.operation and self.matching in str(args[0]):
            raise os_error(self.error)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait, for as long as it may take on a busy machine, until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


@contextmanager
def scanned() -> Iterator[None]:
    """A disk tier is made within; at the end its first scan is over. It sees nothing of what others do after that, not
    even where it has just removed a file."""
    scan, over = Scanner._scan, threading.Event()

    def scan_and_tell(scanner: Scanner) -> None:
        scan(scanner)
        over.set()

    with patch.object(Scanner, "_scan", scan_and_tell):
        yield
        assert over.wait(60)


def in_wait(thread: threading.Thread, function: str) -> bool:
    """Whether the thread has called the function, and waits in it for another thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return {"wait", function} <= names


class Memory:
    """A CPU tier to write from and to read into."""

    def __init__(self, nbytes: int = 8 << 20) -> None:
        self.arena = Arena.create(nbytes, nbytes)
        self.cpu = LocalCPUBackend(self.arena)

    def pin(self, number: int, rows: int = 4, dim: int = 256, dtype: str = "float16") -> Pin:
        """A pinned entry; whatever was stored under its number goes."""
        nbytes = rows * dim * itemsize(dtype)
        self.cpu.remove(identity(number))
        extent = self.cpu.reserve(nbytes)
        self.arena.buffer[extent.offset : extent.offset + nbytes] = content(number, nbytes)
        return self.cpu.pin(self.cpu.publish(extent, identity(number), nbytes, rows, dim, dtype))

    def payload(self, pin: Pin) -> memoryview:
        return self.arena.buffer[pin.entry.offset : pin.entry.offset + pin.entry.nbytes]

    def offer(self, disk: LocalDiskBackend, number: int, rows: int = 4, dim: int = 256, dtype: str = "float16") -> bool:
        """Offer an entry; a pin that is not taken is closed."""
        pin = self.pin(number, rows, dim, dtype)
        taken = disk.offer(pin, self.payload(pin))
        if not taken:
            pin.close()
        return taken

    def store(
        self, disk: LocalDiskBackend, number: int, rows: int = 4, dim: int = 256, dtype: str = "float16"
    ) -> Filed:
        """Have an entry written, and wait for that."""
        assert self.offer(disk, number, rows, dim, dtype)
        assert disk.flush(30)
        filed = disk.find(identity(number))
        assert filed is not None
        return filed

    def close(self) -> None:
        assert self.cpu.pinned_bytes == 0, "a pin was left open"
        self.arena.close()


def read(disk: LocalDiskBackend, number: int, nbytes: int = 2048) -> bytes | None:
    into = bytearray(nbytes)
    return None if disk.read(identity(number), memoryview(into)) is None else bytes(into)


def put(folder: Path, number: int, rows: int = 4, age_s: float = 0) -> Path:
    """Have another process's entry in the folder; it is as old as that from the moment that it is there."""
    filed = Filed(identity(number), rows * 512, rows, 256, "float16")
    payload = memoryview(content(number, rows * 512))

    def age(name: str, args: tuple[Any, ...]) -> None:
        if name == "rename" and age_s:
            os.utime(args[0], (time.time() - age_s,) * 2)

    (folder / LAYOUT).mkdir(parents=True, exist_ok=True)
    write_file(Sick(age), str(folder / LAYOUT), filed, payload, fsync=False, abandoned=lambda: False)
    return file_of(folder, number)


def file_of(folder: Path, number: int) -> Path:
    return Path(path_of(str(folder / LAYOUT), identity(number)))


def files_in(folder: Path) -> list[str]:
    """Names of all files of the tier, those set aside included."""
    return sorted(str(path.relative_to(folder / LAYOUT)) for path in folder.rglob("*") if path.is_file())


def count(disk: LocalDiskBackend, name: str, **labels: str) -> float:
    return disk.counts().get((name, tuple(labels.items())), 0.0)


def gauge(disk: LocalDiskBackend, name: str, **labels: str) -> float:
    return disk.gauges()[name, tuple(labels.items())]


_UNSHARED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
_MOUNT = 'mount -t tmpfs -o size=2m none "$0" && '


def run_in_a_small_disk(script: str, folder: Path) -> None:
    """Run Python code while a file system of 2 MiB is mounted at `folder`, its first argument; it ends by printing
    'right'. Skips the test where nothing can be mounted."""
    try:
        subprocess.run([*_UNSHARED, _MOUNT + "true", str(folder)], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    command = [*_UNSHARED, _MOUNT + 'exec "$1" -c "$2" "$0"', str(folder), sys.executable, script]
    _run_to_the_right_end(command)


def run_as_anybody(script: str, folder: Path) -> None:
    """Run Python code, `folder` its first argument, in a process that modes of files hold for, as they do for anybody
    but root; it ends by printing 'right'. Skips the test where that cannot be had."""
    command = [sys.executable, "-c", script, str(folder)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root cannot give up its privileges here")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    _run_to_the_right_end(command)


def _run_to_the_right_end(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
