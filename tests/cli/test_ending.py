"""Nothing that a benchmark has started outlives it, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import command, environment

FETCH = ("fetch", "--transport=zmq", "--sizes=64KiB", "--repeat=1000000"), 2
DIRECTORY = ("directory",), 12
INSTANCES = ("directory", "--instances=1,2,3,4,5,6"), 5
"""(a benchmark that goes on for long, how many processes it starts beside those of multiprocessing itself)."""


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def stat(pid: int) -> tuple[str, int, str] | None:
    """(state, parent, when it started), by which a process is known; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


def children(parent: int) -> dict[int, str]:
    """{pid: when it started} of those that do the benchmark's work."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or (seen := stat(int(entry.name))) is None or seen[1] != parent:
            continue
        try:
            if b"resource_tracker" not in (entry / "cmdline").read_bytes():
                found[int(entry.name)] = seen[2]
        except OSError:
            continue
    return found


def at_work(pid: int) -> bool:
    """It has connected: ZMQ has threads of its own, and clients of a node map its arena."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1 or "ec-p2p-arena" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def alive(pid: int, started: str) -> bool:
    seen = stat(pid)
    return seen is not None and seen[2] == started and seen[0] not in "ZX"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
@pytest.mark.parametrize(("bench", "count"), [FETCH, DIRECTORY, INSTANCES])
def test_it_ends_with_all_its_processes(bench: tuple[str, ...], count: int, number: int, status: int) -> None:
    process = subprocess.Popen(
        command("bench", *bench), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    started: dict[int, str] = {}

    def all_started() -> bool:
        assert process.poll() is None
        now = children(process.pid)
        started.update(now)
        return len(now) >= count and all(map(at_work, now))

    try:
        until(all_started, "the benchmark's processes")
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    if number != signal.SIGKILL:
        assert (out, error) == ("", "")
    until(lambda: not any(alive(*one) for one in started.items()), "the end of the benchmark's processes")


def test_a_second_signal_does_not_wait_for_anything() -> None:
    """Such as for what the first one has begun to put in order."""
    script = """
import time
from ec_p2p.cli.ending import ended_by_signals
with ended_by_signals():
    try:
        print("begun", flush=True)
        time.sleep(1000)
    finally:
        print("ending", flush=True)
        time.sleep(1000)
"""
    process = subprocess.Popen([*command()[:1], "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for word in ("begun\n", "ending\n"):
        assert process.stdout.readline() == word
        os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.stdout.close()


def test_what_starts_too_late_ends_at_once() -> None:
    """Its starter is no more by the time that it asks the kernel."""
    done = subprocess.run([*command()[:1], "-m", "ec_p2p.cli.ending", "-1", "/bin/echo", "ran"], capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")
