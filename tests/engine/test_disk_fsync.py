"""A disk tier that has its files outlive a power failure, where just that fails."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ec_p2p.engine.disk import LocalDiskBackend
from tests.engine.disks import FILE, Memory, Sick, content, count, files_in, gauge, identity, os_error, read


def failing(is_kind: Any) -> Sick:
    """An fsync of this kind of thing fails."""

    def fail(name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync" and is_kind(os.fstat(args[0]).st_mode):
            raise os_error(errno.EIO)

    return Sick(fail)


@pytest.mark.parametrize(("is_kind", "stands"), [(stat.S_ISDIR, True), (stat.S_ISREG, False)], ids=["folder", "file"])
def test_what_stands_counts_though_it_may_not_outlive_a_power_failure(
    memory: Memory, tmp_path: Path, is_kind: Any, stands: bool
) -> None:
    with LocalDiskBackend(str(tmp_path), fsync=True, files=failing(is_kind)) as disk:
        assert memory.offer(disk, 1)
        assert disk.flush(30)
        assert len(files_in(tmp_path)) == stands
        assert (disk.find(identity(1)) is not None) == stands
        assert gauge(disk, "disk_bytes", kind="used") == stands * FILE
        assert count(disk, "disk_writes") == stands
        assert read(disk, 1) == (content(1, 2048) if stands else None)
        assert count(disk, "disk_errors", op="write", errno="EIO") == 1
        assert gauge(disk, "disk_breaker", op="write") == 1
