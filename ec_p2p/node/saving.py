"""From a worker's write window to an advertised entry.

Owns windows and commits, and decides when the fleet is told: that an entry is being encoded, that it is here, that it
is gone. It must never advertise bytes that are not in place.

    (encoding announced) -> PENDING advert -> commit -> entry, RESIDENT advert -> eviction -> DISK advert where the
    entry is on disk by then, else withdrawal
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from ec_p2p.engine.cpu import Entry, LocalCPUBackend, OutOfMemory, TooLarge
from ec_p2p.engine.extents import Extent
from ec_p2p.engine.filed import Filed
from ec_p2p.engine.generation import check
from ec_p2p.engine.tally import Tally
from ec_p2p.node.adverts import on_disk, pending, resident
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.encodings import Encodings
from ec_p2p.node.fetch_policy import EncodeTimes
from ec_p2p.node.memory import Memory
from ec_p2p.node.messages import SKIP_REASONS, Commit, NoWindow, OpenWindow, Saved, SaveSkipped, Window
from ec_p2p.node.sessions import Session, Sessions

logger = logging.getLogger(__name__)


class Saving:
    """Used by the node's loop only. `on_disk(identity)` tells what is known to be on disk. `on_stored(entry)` is called
    when an entry was stored, `on_change(identity)` when it was found on disk, or its encode given up."""

    def __init__(
        self,
        backend: LocalCPUBackend,
        memory: Memory,
        sessions: Sessions,
        links: DirectoryLinks,
        counters: Tally,
        encode_times: EncodeTimes,
        on_disk: Callable[[bytes], Filed | None],
        on_stored: Callable[[Entry], None],
        on_change: Callable[[bytes], None],
    ) -> None:
        self._backend = backend
        self._memory = memory
        self._sessions = sessions
        self._links = links
        self._counters = counters
        self._encode_times = encode_times
        self._on_disk = on_disk
        self._on_stored = on_stored
        self._on_change = on_change
        self._encodings = Encodings()
        self._shared: set[bytes] = set()
        """In the arena, and the fleet was told so; it is not told of all that was fetched."""
        self._ids = itertools.count(1)

    # -------------------------------------------------------- windows

    def open_window(self, session: Session, message: OpenWindow) -> None:
        try:
            extent = self._memory.reserve(message.nbytes)
        except (TooLarge, OutOfMemory, ValueError) as error:
            self._counters.add("windows_refused")
            self._sessions.send(session, NoWindow(message.request, f"{type(error).__name__}: {error}"))
            return
        window = next(self._ids)
        session.windows[window] = extent
        self._sessions.send(session, Window(message.request, window, extent.offset, extent.nbytes))

    def close_window(self, session: Session, window: int) -> None:
        extent: Extent | None = session.windows.pop(window, None)
        if extent is not None:
            self._memory.release(extent)

    def session_gone(self, session: Session) -> None:
        """Free its windows. With the last scheduler of an instance give up what that was about to encode: whoever waits
        for it waits in vain."""
        for window in list(session.windows):
            self.close_window(session, window)
        instance = session.attach.instance
        if session.attach.kind == "scheduler" and not self._sessions.schedulers_of(instance):
            self._encode_times.forget(instance)
            for identity in self._encodings.of(instance):
                self._give_up(identity, instance)

    # -------------------------------------------------------- entries

    def commit(self, session: Session, commit: Commit) -> None:
        """Make an entry of bytes in the session's window. A commit that cannot be true is counted, and is none: there
        will be no entry to wait for."""
        try:
            entry = self._publish(session, commit)
        except (ValueError, KeyError, OutOfMemory) as error:
            self._counters.add("bad_commits")
            logger.warning("commit of %s refused: %s", session.attach.instance, error)
            self._no_entry(session, SaveSkipped("error", commit.identity))
            return
        began = self._encodings.begun_at(entry.identity, session.attach.instance)
        if began is not None:
            self._encode_times.committed(session.attach.instance, entry.rows, entry.nbytes, began, time.monotonic())
        self._counters.add("saves")
        self._counters.add("saved_bytes", entry.nbytes)
        self._encodings.end(entry.identity, session.attach.instance)
        self.advertise(entry)
        for scheduler in self._sessions.schedulers_of(session.attach.instance):
            self._sessions.send(scheduler, Saved(entry.identity, entry.nbytes))
        self._on_stored(entry)

    def skipped(self, session: Session, message: SaveSkipped) -> None:
        """A worker could not save an output: there will be no entry to wait for."""
        if message.reason not in SKIP_REASONS:  # a client may say anything, and metrics keep each word for ever
            message = SaveSkipped("error", message.identity)
        self._counters.add("saves_skipped", reason=message.reason)
        self._no_entry(session, message)

    def _no_entry(self, session: Session, message: SaveSkipped) -> None:
        self._give_up(message.identity, session.attach.instance)
        for scheduler in self._sessions.schedulers_of(session.attach.instance):
            self._sessions.send(scheduler, message)

    def _publish(self, session: Session, commit: Commit) -> Entry:
        extent: Extent | None = session.windows.get(commit.window)
        if extent is None:
            raise ValueError(f"window {commit.window} is not this client's")
        # Before anything is carved: what leaves the window must never go back to the free list while the client may
        # still write to it.
        check(commit.identity, commit.nbytes, commit.rows, commit.dim, commit.dtype)
        piece = self._backend.carve(extent, commit.offset - extent.offset, commit.nbytes)
        return self._memory.publish(piece, commit.identity, commit.nbytes, commit.rows, commit.dim, commit.dtype)

    # -------------------------------------------------------- what the fleet is told

    def advertise(self, entry: Entry) -> None:
        """The entry is in the arena."""
        self._shared.add(entry.identity)
        self._counters.add("adverts")
        self._links.store(resident(entry))

    def evicted(self, entry: Entry) -> None:
        """The entry is in the arena no more."""
        self._counters.add("evictions")
        self._shared.discard(entry.identity)
        self._tell(entry.identity)

    def filed(self, identity: bytes) -> None:
        """The entry is on disk from now on, or was found there."""
        if self._backend.peek(identity) is None:
            self._tell(identity)
            self._on_change(identity)

    def lost(self, identity: bytes) -> None:
        """The entry is on disk no more."""
        if identity not in self._shared:
            self._tell(identity)

    def _tell(self, identity: bytes) -> None:
        """What is true of an entry that others cannot have from the arena."""
        filed = self._on_disk(identity)
        if filed is not None:
            self._counters.add("adverts")
            self._links.store(on_disk(filed))
        elif identity in self._encodings:
            self._links.store(pending(identity))
        else:
            self._links.withdraw(identity)

    # -------------------------------------------------------- encodes

    def encoding(self, session: Session, identities: list[bytes], now: float) -> None:
        """The session's instance is about to compute these."""
        for identity in identities:
            if self._backend.peek(identity) is None:
                self._encodings.begin(identity, session.attach.instance, now)
                self._tell(identity)

    def encoded_by_another(self, identity: bytes, instance: str) -> bool:
        return self._encodings.by_another(identity, instance)

    def tick(self, now: float) -> None:
        """Give up encodes that were announced too long ago."""
        for identity, instance in self._encodings.late(now):
            self._give_up(identity, instance)

    def _give_up(self, identity: bytes, instance: str) -> None:
        """Nothing comes of this instance's encode, if it had announced one. Another one's may go on: then the fleet is
        told nothing new, but the other itself waits in vain for this one's."""
        if not self._encodings.end(identity, instance):
            return
        if identity not in self._encodings and identity not in self._shared:
            self._tell(identity)
        self._on_change(identity)
