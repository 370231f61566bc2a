"""Where damaged files go, so that somebody may look at them, and how many of them stay.

Owns the folder `damaged`. Must never decide what is damaged.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ec_p2p.engine.filed import path_of
from ec_p2p.engine.files import Files

KEPT = 8


def _folder(root: str) -> str:
    return f"{root}/damaged"


def set_aside(files: Files, root: str, identity: bytes, bad: os.stat_result) -> None:
    """Move an entry's file, which had the status `bad`, to the others; unless another has taken its place. Raises
    OSError."""
    path = path_of(root, identity)
    with suppress(FileExistsError):
        files.mkdir(_folder(root))
    with suppress(FileNotFoundError):
        now = files.lstat(path)
        if (now.st_dev, now.st_ino) == (bad.st_dev, bad.st_ino):
            files.rename(path, f"{_folder(root)}/{identity.hex()}.safetensors")


def prune(files: Files, root: str, kept: int = KEPT) -> int:
    """Remove all but the `kept` files that came last; returns the bytes of those. Raises OSError."""
    folder = _folder(root)
    try:
        names = files.listdir(folder)
    except FileNotFoundError:
        return 0
    found: list[tuple[int, int, str]] = []
    for name in names:
        path = f"{folder}/{name}"
        with suppress(FileNotFoundError):
            status = files.lstat(path)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_ctime_ns, status.st_size, path))
    found.sort(reverse=True)
    for _, _, path in found[kept:]:
        with suppress(FileNotFoundError):
            files.unlink(path)
    return sum(size for _, size, _ in found[:kept])
