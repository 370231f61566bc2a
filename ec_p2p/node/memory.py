"""The arena's memory as the node's parts take it and give it back, and the line of those who wait for some.

Owns the line. Whatever gives memory back does so here: a landing that came to nothing, an entry that may be evicted
from now on, a pin that was closed. So whoever waits hears of it, whichever part it was. It must never decide what is
evicted, nor for how long somebody waits: who runs out of patience leaves.

    (no room) --wait--> WAITING --something was freed--> woken: takes what it needs and leaves, or WAITING in its place
    WAITING --leave--> (gone)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from ec_p2p.engine.cpu import Entry, LocalCPUBackend
from ec_p2p.engine.entry import Layout
from ec_p2p.engine.extents import Extent

Wake = Callable[[float], object]
"""Called with the time. There may be room now, and there may be none."""


class Memory:
    """Used by the node's loop only. Nobody is woken but by `progress`."""

    def __init__(self, backend: LocalCPUBackend) -> None:
        self._backend = backend
        self._waiting: dict[Hashable, Wake] = {}
        self._freed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def usable_bytes(self) -> int:
        """See LocalCPUBackend.usable_bytes."""
        return self._backend.usable_bytes

    # -------------------------------------------------------- taking and giving back

    def reserve(self, nbytes: int) -> Extent:
        """See LocalCPUBackend.reserve. Who gets OutOfMemory may `wait`; who gets TooLarge would wait in vain."""
        return self._backend.reserve(nbytes)

    def reserve_row(self, sizes: Sequence[int]) -> list[Extent] | None:
        """See LocalCPUBackend.reserve_row."""
        return self._backend.reserve_row(sizes)

    def release(self, extent: Extent) -> None:
        self._backend.release(extent)
        self.freed()

    def publish(self, extent: Extent, identity: bytes, nbytes: int, rows: int, dim: int, dtype: str) -> Entry:
        """See LocalCPUBackend.publish: nothing is given back where it raises. Whoever is to have the entry pins it at
        once; otherwise it may go to those who wait."""
        entry = self._backend.publish(extent, identity, nbytes, rows, dim, dtype)
        self.freed()
        return entry

    def publish_all(self, parts: Iterable[tuple[Extent, bytes, Layout]]) -> list[Entry]:
        """`publish` for several at once: see LocalCPUBackend.publish_all."""
        entries = self._backend.publish_all(parts)
        self.freed()
        return entries

    def freed(self) -> None:
        """Memory has become free, or evictable."""
        self._freed = bool(self._waiting)

    # -------------------------------------------------------- waiting

    def wait(self, who: Hashable, wake: Wake) -> None:
        """Have `wake` called whenever memory was freed, until `who` leaves. Who waits already keeps its place."""
        self._waiting[who] = wake

    def leave(self, who: Hashable) -> None:
        """It waits no more, if it did."""
        self._waiting.pop(who, None)

    def progress(self, now: float) -> None:
        """If something was freed, wake those who wait, the longest first; a smaller one may overtake a larger one."""
        if not self._freed:
            return
        self._freed = False
        for who in list(self._waiting):
            wake = self._waiting.get(who)
            if wake is None:
                continue
            try:
                wake(now)
            except Exception:
                # The others have not been asked yet, and must not be kept from it again by the same one.
                self.leave(who)
                self.freed()
                raise

    def deadlines(self) -> Iterable[float]:
        """At once, when `progress` would wake somebody."""
        return (0.0,) if self._freed and self._waiting else ()
