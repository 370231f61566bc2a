"""What one process knows of the files in the folder, and which of them go when room is needed.

Owns the index from identity to file, the accounting in bytes, the order of eviction and the telling of it. Must never
do I/O: who asks for room is told which files to remove, and says when that is done. One lock guards it all; `find`
takes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ec_p2p.engine.filed import Filed
from ec_p2p.engine.policy import EvictionPolicy

OnFiled = Callable[[Filed], None]
OnLost = Callable[[bytes], None]
"""Both are called under the index's lock, in the order of events: they must be quick, do no I/O, and call back nothing
but `find`."""

State = Filed | int | None
"""What is known of a file: the entry in it; only how many bytes it takes, its header being unread; or that it isn't."""


def file_bytes_of(state: State) -> int:
    return state.file_bytes if isinstance(state, Filed) else state or 0


class DiskIndex:
    """Files by identity, in 256 shards, as the folder has them: so that a scan compares folder by folder."""

    def __init__(
        self, capacity_bytes: int, policy: EvictionPolicy, on_filed: OnFiled | None, on_lost: OnLost | None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._policy = policy
        self._on_filed = on_filed
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._shards: list[dict[bytes, Filed | int]] = [{} for _ in range(256)]
        self._entries = 0
        self._files_bytes = 0
        self._reserved_bytes = 0
        self._aside_bytes = 0
        self._in_use: dict[bytes, int] = {}
        self._leaving: dict[bytes, int] = {}
        self._reads = 0
        self._reads_over = threading.Condition(self._lock)
        self._refusing = False
        self._stuck: set[bytes] = set()
        """Files that could not be removed: no victims before `reconsider`."""

    # ------------------------------------------------------------ looking

    def find(self, identity: bytes) -> Filed | None:
        state = self._shards[identity[0]].get(identity)
        return state if isinstance(state, Filed) else None

    def state(self, identity: bytes) -> State:
        return self._shards[identity[0]].get(identity)

    def shard(self, number: int) -> dict[bytes, Filed | int]:
        """A copy of one shard: every counted file whose identity starts with this byte."""
        with self._lock:
            return dict(self._shards[number])

    def __len__(self) -> int:
        """Entries that `find` finds."""
        return self._entries

    @property
    def aside_bytes(self) -> int:
        """Bytes of damaged files that are kept."""
        return self._aside_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those about to be written and those set aside included."""
        return self._files_bytes + self._reserved_bytes + self._aside_bytes

    # ------------------------------------------------------------ learning

    def know(self, filed: Filed) -> None:
        """The file of this entry stands. What was not counted before is the last to go."""
        known = self.state(filed.identity)
        if known is filed or known == filed:
            return
        with self._lock:
            if filed.identity not in self._leaving:
                self._become(filed.identity, filed)

    def count(self, identity: bytes, file_bytes: int, *, recent: bool = False) -> None:
        """A file of this size was seen: from now on it counts, whatever is in it. An entry of another size is lost.

        What was not counted before is of less worth than all that was; where it is `recent`, of more.
        """
        with self._lock:
            if identity not in self._leaving and file_bytes_of(self.state(identity)) != file_bytes:
                self._become(identity, file_bytes, self._policy.added if recent else self._policy.restored)

    def disown(self, identity: bytes, seen: State, file_bytes: int) -> None:
        """There is a file of this size, but no entry that can be had from it, if nothing has been heard of it since it
        was in the state `seen`."""
        with self._lock:
            if self.state(identity) is seen and identity not in self._leaving:
                self._become(identity, file_bytes)

    def forget(self, identity: bytes, seen: State) -> None:
        """The file is gone, or no entry, if nothing has been heard of it since it was in the state `seen`."""
        with self._lock:
            if seen is not None and self.state(identity) is seen:
                self._become(identity, None)

    def forget_all(self) -> None:
        for number in range(256):
            for identity, state in self.shard(number).items():
                self.forget(identity, state)

    def touched(self, identity: bytes) -> None:
        with self._lock:
            state = self.state(identity)
            if state is not None:
                self._policy.touched(identity, file_bytes_of(state))

    def set_aside(self, nbytes: int) -> None:
        """How many bytes the damaged files take that are kept."""
        with self._lock:
            self._aside_bytes = nbytes

    # ------------------------------------------------------------ room

    def use(self, identity: bytes) -> bool:
        """Until `unuse` the file is no victim. False: it is one already, and its name must not be used."""
        with self._lock:
            if identity in self._leaving:
                return False
            self._in_use[identity] = self._in_use.get(identity, 0) + 1
            return True

    def unuse(self, identity: bytes) -> None:
        with self._lock:
            users = self._in_use.pop(identity) - 1
            if users:
                self._in_use[identity] = users

    def begin_read(self, identity: bytes) -> bool:
        """`use`, until `end_read`. False also after `refuse_reads`."""
        with self._lock:
            if self._refusing or identity in self._leaving:
                return False
            self._in_use[identity] = self._in_use.get(identity, 0) + 1
            self._reads += 1
            return True

    def end_read(self, identity: bytes, used: bool) -> None:
        """`unuse`, and `touched` if the entry was `used`: it is found, and has been read whole."""
        with self._lock:
            users = self._in_use.pop(identity) - 1
            if users:
                self._in_use[identity] = users
            if used and (state := self.state(identity)) is not None:
                self._policy.touched(identity, file_bytes_of(state))
            self._reads -= 1
            if self._refusing and not self._reads:
                self._reads_over.notify_all()

    def refuse_reads(self) -> None:
        with self._lock:
            self._refusing = True

    def wait_reads(self, timeout_s: float | None) -> int:
        """After `refuse_reads`: wait for those that have begun; returns how many go on even so."""
        with self._lock:
            self._reads_over.wait_for(lambda: not self._reads, timeout_s)
            return self._reads

    @contextmanager
    def using(self, identity: bytes) -> Iterator[bool]:
        """`use`, then `unuse` if that said yes."""
        free = self.use(identity)
        try:
            yield free
        finally:
            if free:
                self.unuse(identity)

    def reserve(self, nbytes: int) -> list[bytes] | None:
        """Count `nbytes` for a file that will be written, until `settle`.

        Returns the files to remove for it, as few as needed; the caller unlinks each and says `removed`, `kept` or
        `spared`.
        None, with nothing changed: even without all files that nobody uses there would be no room.
        """
        with self._lock:
            victims, missing = self._choose(nbytes)
            if missing > 0:
                return None
            self._reserved_bytes += nbytes
            return self._evict(victims)

    def settle(self, nbytes: int, filed: Filed | None) -> None:
        """The file that was reserved for stands, or will not: None."""
        with self._lock:
            self._reserved_bytes -= nbytes
            if filed is not None and not self._become(filed.identity, filed):
                self._policy.touched(filed.identity, filed.file_bytes)  # it had a place in the order already

    def excess(self, at_most: int) -> list[bytes]:
        """Files to remove because there are more bytes than there may be, as by `reserve`; not all of them at once."""
        with self._lock:
            return self._evict(self._choose(0, at_most)[0])

    def removed(self, identity: bytes) -> None:
        """The victim's file is gone."""
        with self._lock:
            del self._leaving[identity]

    def kept(self, identity: bytes) -> None:
        """The victim's file cannot be removed: it counts again, but is no known entry, nor a victim for now."""
        with self._lock:
            self._stuck.add(identity)
            self._become(identity, self._leaving.pop(identity), self._policy.added)

    def spared(self, identity: bytes) -> None:
        """Nobody tried to remove the victim's file: it counts again, but is no known entry. Several are given back in
        the opposite order, so that they are the first victims again."""
        with self._lock:
            self._become(identity, self._leaving.pop(identity))

    def reconsider(self) -> None:
        """What could not be removed may be tried again."""
        with self._lock:
            self._stuck.clear()

    # ------------------------------------------------------------ under the lock

    def _choose(self, nbytes: int, at_most: int | None = None) -> tuple[list[bytes], int]:
        """The first victims that make room for `nbytes`, and how many bytes are missing even so (0 or less: none)."""
        victims: list[bytes] = []
        missing = self.used_bytes + nbytes - self.capacity_bytes
        if missing > 0:
            for identity in self._policy.victims():
                if identity in self._in_use or identity in self._stuck:
                    continue
                victims.append(identity)
                missing -= file_bytes_of(self.state(identity))
                if missing <= 0 or len(victims) == at_most:
                    break
        return victims, missing

    def _evict(self, victims: list[bytes]) -> list[bytes]:
        for identity in victims:
            self._leaving[identity] = file_bytes_of(self.state(identity))
            self._become(identity, None)
        return victims

    def _become(self, identity: bytes, new: State, rank: Callable[[bytes, int], None] | None = None) -> bool:
        """The one place where a file's state changes.

        True: it got a new place in the order of eviction, by `rank`; without that an entry is as one that was used
        just now, and any other file as one of an earlier life.
        """
        shard = self._shards[identity[0]]
        old = shard.get(identity)
        if new == old:
            return False
        before, after = file_bytes_of(old), file_bytes_of(new)
        self._files_bytes += after - before
        self._entries += isinstance(new, Filed) - isinstance(old, Filed)
        if old is not None and (new is None or before != after):
            self._policy.removed(identity, before)
        ranked = new is not None and (old is None or before != after)
        if new is None:
            del shard[identity]
            self._stuck.discard(identity)
        else:
            shard[identity] = new
        if ranked:
            (rank or (self._policy.added if isinstance(new, Filed) else self._policy.restored))(identity, after)
        if isinstance(old, Filed) and self._on_lost is not None:
            self._on_lost(identity)
        if isinstance(new, Filed) and self._on_filed is not None:
            self._on_filed(new)
        return ranked
