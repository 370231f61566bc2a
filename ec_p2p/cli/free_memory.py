"""How much memory this process may still take: of the machine, and of what its control groups let it: a container's
limit, a systemd unit's, one above them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_NO_LIMIT = 1 << 60


class _Files(NamedTuple):
    limit: str
    used: str
    inactive: str
    """The line of memory.stat that tells the page cache which the kernel gives up first."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without taking them from anybody, or hitting a limit."""
    available, left = machine_memory(root), memory_left(root)
    return available if left is None else min(available, left)


def machine_memory(root: Path) -> int:
    """Bytes that the machine has free; 0 where it does not say."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 0


def memory_left(root: Path) -> int | None:
    """Bytes until the tightest limit of a control group; None without one."""
    left = [left for folder, files in _groups(root) if (left := _left(folder, files)) is not None]
    return min(left, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's groups and all above. Without a namespace of its own a container is told a path that it does not
    see, but the group at the top of what it sees is its own."""
    mount = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, files = mount, _V2
        elif "memory" in controllers.split(","):
            top, files = mount / "memory", _V1
        else:
            continue
        group = PurePosixPath(name)
        for one in (group, *group.parents):
            yield top / one.relative_to("/"), files


def _left(folder: Path, files: _Files) -> int | None:
    try:
        limit, used = (folder / files.limit).read_text().strip(), int((folder / files.used).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return None
    return max(0, int(limit) - used + int(statistics.get(files.inactive, 0)))
