"""Which folders need not be looked into again.

Owns what is remembered of each folder: when names in it last changed, as the file system tells. Must never be trusted
for what lies in the files: they may change without that.
"""

from __future__ import annotations

from ec_p2p.engine.files import Files

_Version = tuple[int, int, int]
"""A folder's device and inode, and when names in it last changed, in ns."""


class Quiet:
    """Folders by number. A folder is quiet when it is as it was two looks ago, and nothing was left to do in it.

    Two, since two changes within one tick of the file system's clock look like one: the second may come behind a look.
    What has not changed from one look to the next was not being changed at the former.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._now: dict[int, _Version] = {}
        """As they are at the look that goes on."""
        self._done: dict[int, _Version] = {}
        """As they were when nothing was left to do."""
        self._quiet: dict[int, _Version] = {}

    def is_quiet(self, number: int, folder: str) -> bool:
        """Ask before each look. Never raises: who looks into the folder meets the same error."""
        self._now.pop(number, None)
        try:
            status = self._files.lstat(f"{folder}/.")
        except OSError:
            return False
        version = self._now[number] = status.st_dev, status.st_ino, status.st_mtime_ns
        return self._quiet.get(number) == version

    def looked(self, number: int, nothing_left: bool) -> None:
        """The look is over."""
        version = self._now.get(number)
        if version is None or not nothing_left:
            self._done.pop(number, None)
            self._quiet.pop(number, None)
            return
        if self._done.get(number) == version:
            self._quiet[number] = version
        self._done[number] = version

    def wake(self) -> None:
        """Have every folder looked into once more."""
        self._quiet.clear()
