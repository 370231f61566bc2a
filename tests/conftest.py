"""For every test: nothing that a test has started outlives the session."""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import procfs
import pytest
from hypothesis import HealthCheck, settings
from processes import Failed, until

_MARK = "EC_P2P_TESTS"

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell starts what it sends to the background deaf to Ctrl-C, and every process that this one starts would be, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Fails the session when a process of ours outlives it, or when this one still holds a socket of a node."""
    mark = secrets.token_hex(8)
    # What spawned nodes log goes here, and goes with it. Short: paths of sockets may be made from it.
    with tempfile.TemporaryDirectory(prefix="ec-p2p-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, mark)
        patch.setenv("TMPDIR", folder)
        yield
        _await_end(mark)


def _await_end(mark: str) -> None:
    gc.collect()
    left: list[str] = []

    def all_gone() -> bool:
        left[:] = [f"process {pid}: {procfs.command(pid)}" for pid in _started_here(mark)]
        left.extend(f"socket {name}" for name in _open_unix_sockets() if "ec-p2p" in name)
        return not left

    try:
        until(all_gone, "the end of what the tests have started", timeout_s=30)
    except Failed:
        pytest.fail("left behind by the tests:\n" + "\n".join(left))


def _started_here(mark: str) -> list[int]:
    # multiprocessing's own helper lives as long as this interpreter, by design.
    return [pid for pid in procfs.marked(_MARK, mark) if "multiprocessing.resource_tracker" not in procfs.command(pid)]


def _open_unix_sockets() -> list[str]:
    """Names of the Unix sockets that this process holds."""
    names = dict(re.findall(r"(\d+) (\S+)$", Path("/proc/net/unix").read_text(), re.MULTILINE))
    targets = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    inodes = (re.fullmatch(r"socket:\[(\d+)\]", target) for target in targets)
    return [names[found[1]] for found in inodes if found and found[1] in names]
