"""What Linux knows about running processes, read from /proc: who carries a mark, who belongs to a session.

Never raises for a process that ends while it is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = "/dev/shm/"


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def living() -> Iterator[int]:
    """Process ids, without those that have ended and only wait for their parent."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _stat(int(entry.name))[:1] not in ([], ["Z"], ["X"]):
            yield int(entry.name)


def _stat(pid: int) -> list[str]:
    # The name of the program, in parentheses, may itself hold blanks and parentheses.
    return _read(pid, "stat").rpartition(")")[2].split()


def session(leader: int) -> list[int]:
    """The living processes of the session that `leader` has opened, also when the leader is gone."""
    return [pid for pid in living() if _stat(pid)[3:4] == [str(leader)]]


def marked(variable: str, value: str) -> list[int]:
    """The living processes that were started with this environment variable, whoever their parent is by now."""
    return [pid for pid in living() if f"{variable}={value}" in _read(pid, "environ").split("\0")]


def command(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip()


def cpu_s(pid: int) -> float:
    """Seconds that the process has computed so far, in the kernel and outside."""
    return sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def shared_memory(pid: int) -> set[Path]:
    """Named shared-memory segments that the process has mapped."""
    paths = (line.partition(_SHARED_MEMORY) for line in _read(pid, "maps").splitlines())
    return {Path(_SHARED_MEMORY + name) for _, found, name in paths if found and not name.endswith(" (deleted)")}
