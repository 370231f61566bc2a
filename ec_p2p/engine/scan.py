"""Learning what lies in the folder: at the start, and again from time to time, since others may share it.

Owns the thread that walks the folder, and the sweep of what dead writers left. Must never read a payload, nor touch
what nobody here has made.

Each scan goes twice over the folder. First it sizes everything, so that all files count; only then may anything be
written. Then it reads the headers of what is not known yet, newest first. Of the 256 folders it passes over those that
have not changed since they were last looked at, which costs a thousandth.

What the first scan finds is from an earlier life and ranks below all that was used in this one. What a later one finds
another node has just written: it ranks above, unless its file is older than that.
"""

from __future__ import annotations

import heapq
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import TypeVar

from ec_p2p.engine.breaker import longer
from ec_p2p.engine.disk_index import DiskIndex, State
from ec_p2p.engine.examine import Examiner
from ec_p2p.engine.filed import Abandoned, Damaged, Filed, identity_in, is_temp, path_of, sweep
from ec_p2p.engine.files import Files
from ec_p2p.engine.quiet import Quiet
from ec_p2p.engine.set_aside import SetAside
from ec_p2p.engine.tally import Tally
from ec_p2p.engine.trouble import ABSENT, Unreadable

logger = logging.getLogger(__name__)

BATCH = 128
"""Files between two breaths: the thread leaves the core, and the interpreter, to others."""

BREATH_S = 0.001
ALL_EVERY = 12
"""Of so many scans one passes over no folder: for what changes a file in its place, and for file systems that do not
tell when a folder has changed."""

_T = TypeVar("_T")

_Found = tuple[int, bytes, int]
"""Modification time in ns, identity and size of a file whose header is to be read."""


class Scanner:
    """Scans at once, then every `rescan_s` or when woken; after a failure sooner.

    `remove` unlinks victims of the index, and may raise OSError.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        index: DiskIndex,
        examiner: Examiner,
        aside: SetAside,
        tally: Tally,
        *,
        rescan_s: float,
        remove: Callable[[list[bytes]], object],
    ) -> None:
        self._files = files
        self._root = root
        self._index = index
        self._rescan_s = rescan_s
        self._examiner = examiner
        self._aside = aside
        self._tally = tally
        self._remove = remove
        self._changed = threading.Condition()
        self._sized = False
        self._scans = 0
        self._recent_ns: float = inf
        """What was modified since then is recent."""
        self._quiet = Quiet(files)
        self._failure: OSError | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._problems = 0
        self._first_problem = ""
        self._thread = threading.Thread(target=self._run, name="ec-p2p-disk-scan", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Scan again soon."""
        self._wake.set()

    def wait_sized(self) -> None:
        """Wait until all files count. Raises the OSError that kept the last scan from it, Abandoned when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._sized or self._failure is not None or self._closing.is_set())
            if self._sized:
                return
            if self._failure is None:
                raise Abandoned
            # Another one each time: an exception keeps what its traceback passed through, views of the arena included.
            raise OSError(self._failure.errno, f"the last scan failed: {self._failure}")

    def close(self, timeout_s: float | None) -> bool:
        """End the thread. False: it hangs in the operating system."""
        self._closing.set()
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        retry_s = 0.0
        while True:
            self._wake.clear()
            if self._closing.is_set():
                return  # the clearing may have swallowed the wake of `close`
            try:
                self._scan()
            except Abandoned:
                return
            except OSError as error:
                logger.warning("cannot scan %s: %s", self._root, error)
                self._give_up(error)
            except Exception as error:  # else whoever waits for this thread would wait for ever
                logger.exception("cannot scan %s", self._root)
                self._give_up(OSError(f"the scan of {self._root} failed: {error!r}"))
            retry_s = 0.0 if self._failure is None else longer(retry_s)
            self._wake.wait(min(retry_s or self._rescan_s, self._rescan_s))
            if self._closing.is_set():
                return

    def _give_up(self, error: OSError) -> None:
        self._tally.add_error("scan", error)
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _scan(self) -> None:
        self._problems = 0
        begun_ns = time.time_ns()
        if self._scans % ALL_EVERY == 0:
            self._quiet.wake()
        try:
            self._files.lstat(f"{self._root}/.")
        except FileNotFoundError:
            # Unmounted, or moved: nothing of it can be read, and if it returns the next scan finds it.
            self._index.forget_all()
            self._quiet.wake()
            raise
        self._index.reconsider()
        fresh = [self._size_folder(number) for number in range(256)]
        self._aside.prune()
        self._count(fresh)
        self._scans += 1
        # Another host's clock may lag behind by so much.
        self._recent_ns = begun_ns - self._rescan_s * 1e9
        try:
            while victims := self._index.excess(BATCH):
                self._remove(victims)
                self._breathe()
        except OSError as error:
            # What cannot be changed can be read all the same.
            self._tally.add_error("scan", error)
            logger.warning("%s holds more than it may, and nothing can be removed: %s", self._root, error)
        if self._index.used_bytes > self._index.capacity_bytes:
            # The cap is smaller than what was set aside under an earlier one.
            self._aside.prune(kept=0)
        with self._changed:
            self._sized = True
            self._failure = None
            self._changed.notify_all()
        for batch in self._batches(_newest_first(fresh)):
            for _, identity, _ in batch:
                self._learn(identity)
        if self._problems:
            logger.warning(
                "%d files of %s could not be looked at; the first: %s",
                self._problems,
                self._root,
                self._first_problem,
            )

    def _count(self, fresh: list[list[_Found]]) -> None:
        """Have all files that were found count, and each be worth more than those that were modified before."""
        recent: list[_Found] = []
        for batch in self._batches(_newest_first(fresh)):
            for found in batch:
                modified_ns, identity, file_bytes = found
                if modified_ns >= self._recent_ns:
                    recent.append(found)
                else:
                    self._index.count(identity, file_bytes)
        for batch in self._batches(reversed(recent)):
            for _, identity, file_bytes in batch:
                self._index.count(identity, file_bytes, recent=True)

    def _size_folder(self, number: int) -> list[_Found]:
        """Compare one folder with the index: forget what is gone, sweep, and return what is new, newest first."""
        folder = f"{self._root}/{number:02x}"
        known = self._index.shard(number)
        if self._quiet.is_quiet(number, folder) and all(isinstance(state, Filed) for state in known.values()):
            return []
        problems, temps = self._problems, 0
        found: list[_Found] = []
        try:
            names = self._files.listdir(folder)
        except OSError as error:
            if error.errno not in ABSENT:
                self._problem(error)
                self._quiet.looked(number, nothing_left=False)
                return []
            names = []
        for batch in self._batches(names):
            for name in batch:
                identity = identity_in(name)
                if identity is not None:
                    state = known.pop(identity, None)
                    found.extend(self._news(identity, state))
                elif is_temp(name):
                    temps += 1
                    self._sweep(f"{folder}/{name}")
        for identity, state in known.items():
            # A listing may miss what is renamed into place meanwhile.
            found.extend(self._news(identity, state))
        found.sort(reverse=True)
        self._quiet.looked(number, nothing_left=not found and not temps and problems == self._problems)
        return found

    def _news(self, identity: bytes, state: State) -> list[_Found]:
        """The file, if its header is to be read: nothing, or something else, is known of it."""
        try:
            status = self._files.lstat(path_of(self._root, identity))
        except OSError as error:
            if error.errno in ABSENT:
                self._index.forget(identity, state)
            else:
                self._problem(error)
            return []
        if not stat.S_ISREG(status.st_mode):
            self._index.forget(identity, state)
            return []
        if isinstance(state, Filed) and state.file_bytes == status.st_size:
            return []
        return [(status.st_mtime_ns, identity, status.st_size)]

    def _sweep(self, temp: str) -> None:
        try:
            if sweep(self._files, temp):
                self._tally.add("disk_swept")
        except OSError as error:
            self._problem(error)

    def _learn(self, identity: bytes) -> None:
        if self._index.find(identity) is not None:
            return
        with self._index.using(identity) as free:
            if not free:
                return
            try:
                self._examiner.examine(identity)
            except Damaged:
                return  # set aside, and counted, by whoever found out
            except Unreadable as error:
                self._problem(error)
            except (FileNotFoundError, PermissionError):
                raise  # not this file: the folder of all
            except OSError as error:
                self._problem(error)

    def _problem(self, error: OSError) -> None:
        self._tally.add_error("scan", error)
        self._problems += 1
        if self._problems == 1:
            self._first_problem = str(error)

    def _batches(self, items: Iterable[_T]) -> Iterator[list[_T]]:
        iterator = iter(items)
        while batch := list(islice(iterator, BATCH)):
            self._breathe()
            yield batch

    def _breathe(self) -> None:
        if self._closing.wait(BREATH_S):
            raise Abandoned


def _newest_first(folders: list[list[_Found]]) -> Iterator[_Found]:
    # Merged rather than sorted as one: sorting a million files would hold the interpreter for a second.
    return heapq.merge(*folders, reverse=True)
