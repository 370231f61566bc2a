"""One look at one file: whether it is there, right, and whole, and what the index must hear of that.

Owns the path of every file that is read, whoever asks: a reader, the writer or the scan. Must never decide whether the
disk may be asked.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from ec_p2p.engine.disk_index import DiskIndex, State, file_bytes_of
from ec_p2p.engine.filed import HEADER_BYTES, Damaged, Filed, NotAFile, open_file, path_of, read_header, read_whole
from ec_p2p.engine.files import Files
from ec_p2p.engine.set_aside import SetAside
from ec_p2p.engine.tally import Tally
from ec_p2p.engine.trouble import ABSENT, DELETED, TO_READ, Unreadable, is_one_paths

logger = logging.getLogger(__name__)

RECENCY_S = 60.0
"""How far a file's time of modification may lag behind its last use."""


class Examiner:
    """Thread-safe. The caller has said to the index that it uses the file."""

    def __init__(
        self,
        files: Files,
        root: str,
        index: DiskIndex,
        aside: SetAside,
        tally: Tally,
        abandoned: Callable[[], bool],
    ) -> None:
        self._files = files
        self._root = root
        self._index = index
        self._aside = aside
        self._tally = tally
        self._abandoned = abandoned

    def examine(self, identity: bytes, into: memoryview | None = None) -> Filed | None:
        """The entry in its file, with `into` filled and verified if that has the payload's size. None: there is none.

        Raises Damaged, with the file set aside if that can be done; Unreadable, which concerns this file only; and
        Abandoned or another OSError, with nothing learnt.
        """
        seen = self._index.state(identity)
        try:
            filed = self._read(identity, into, seen)
        except NotAFile:
            if isinstance(seen, Filed):
                self._tally.add("disk_damaged")
            self._index.forget(identity, seen)
            return None
        except OSError as error:
            if not is_one_paths(self._files, self._root, error, TO_READ):
                raise
            if error.errno in ABSENT:
                self._index.forget(identity, seen)
                if error.errno in DELETED:
                    return None
            elif seen is not None:
                self._index.disown(identity, seen, file_bytes_of(seen))
            raise Unreadable(error.errno, error.strerror, path_of(self._root, identity)) from None
        self._index.know(filed)
        return filed

    def _read(self, identity: bytes, into: memoryview | None, seen: State) -> Filed:
        fd, status = open_file(self._files, path_of(self._root, identity))
        try:
            if into is None or status.st_size != HEADER_BYTES + len(into):
                return read_header(self._files, fd, identity, status.st_size)[0]
            known = seen if isinstance(seen, Filed) else None
            filed = read_whole(self._files, fd, identity, into, known, self._abandoned)
            self._mark_used(fd, status)
            return filed
        except Damaged as damage:
            self._set_aside(identity, status, seen, damage)
            raise
        finally:
            self._files.close(fd)

    def _mark_used(self, fd: int, status: os.stat_result) -> None:
        """Have the order of use outlive this process, to the minute."""
        if abs(time.time() - status.st_mtime) > RECENCY_S:
            with suppress(OSError):  # worth no failed read: the file may be another user's
                self._files.utime(fd)

    def _set_aside(self, identity: bytes, bad: os.stat_result, seen: State, damage: Damaged) -> None:
        logger.warning("entry %s on disk is damaged: %s", identity.hex(), damage)
        try:
            self._aside.take(identity, bad)
        except OSError as error:
            # It stays where it is, and is found out again.
            self._tally.add_error("write", error)
            self._index.disown(identity, seen, bad.st_size)
        else:
            self._index.forget(identity, seen)
        self._tally.add("disk_damaged")
