"""Where damaged files go, so that somebody may look at them, and how many of them stay.

Owns the folder `damaged`, and that the index counts what lies in it. Must never decide what is damaged.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ec_p2p.engine.disk_index import DiskIndex
from ec_p2p.engine.filed import path_of
from ec_p2p.engine.files import Files
from ec_p2p.engine.tally import Tally

KEPT = 8


class SetAside:
    """Thread-safe."""

    def __init__(self, files: Files, root: str, index: DiskIndex, tally: Tally) -> None:
        self._files = files
        self._root = root
        self._folder = f"{root}/damaged"
        self._index = index
        self._tally = tally

    def take(self, identity: bytes, bad: os.stat_result) -> None:
        """Move an entry's file, which had the status `bad`, to the others; unless another has taken its place. Raises
        OSError: then it stays where it is."""
        path = path_of(self._root, identity)
        with suppress(FileExistsError):
            self._files.mkdir(self._folder)
        with suppress(FileNotFoundError):
            now = self._files.lstat(path)
            if (now.st_dev, now.st_ino) == (bad.st_dev, bad.st_ino):
                self._files.rename(path, f"{self._folder}/{identity.hex()}.safetensors")
                self._index.set_aside(self._index.aside_bytes + bad.st_size)
        self.prune()

    def prune(self, kept: int = KEPT) -> None:
        """Remove all but the `kept` files that came last. What cannot be removed counts on; such errors are counted."""
        try:
            found = self._found()
        except OSError as error:
            self._tally.add_error("write", error)
            return
        nbytes = sum(size for _, size, _ in found[:kept])
        for _, size, path in found[kept:]:
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._tally.add_error("write", error)
                nbytes += size
        self._index.set_aside(nbytes)

    def _found(self) -> list[tuple[int, int, str]]:
        """When each file came, its bytes and its path, the newest first. Raises OSError."""
        try:
            names = self._files.listdir(self._folder)
        except FileNotFoundError:
            return []
        found: list[tuple[int, int, str]] = []
        for name in names:
            path = f"{self._folder}/{name}"
            with suppress(FileNotFoundError):
                status = self._files.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_ctime_ns, status.st_size, path))
        found.sort(reverse=True)
        return found
