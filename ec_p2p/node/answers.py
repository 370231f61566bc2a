"""The answers to items of wants, and who has not had one yet.

Owns the index of unanswered items, and makes each answer: what is promised is pinned and leased before it is said. It
must never decide where an entry is to come from, nor when there is no way any more: `Wants` does.

    (open) --an entry of the right rows, in the arena or on the readers' devices--> Landed, with a lease
    (open) --an entry of other rows, or a reason--> Missing
    (open) --forgotten--> (gone)

An item is answered once: one that is not open any more is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ec_p2p.engine.cpu import Entry, LocalCPUBackend
from ec_p2p.engine.tally import Tally
from ec_p2p.node.device_reads import DeviceRead, DeviceReads
from ec_p2p.node.leases import Leases, Pin
from ec_p2p.node.messages import FromNode, Landed, Missing
from ec_p2p.node.sessions import Session
from ec_p2p.node.waiting import Waiting


class Answers:
    """Of one node. Used by its loop only."""

    def __init__(
        self,
        backend: LocalCPUBackend,
        device_reads: DeviceReads,
        leases: Leases,
        counters: Tally,
        send: Callable[[Session, FromNode], None],
    ) -> None:
        self._backend = backend
        self._device_reads = device_reads
        self._leases = leases
        self._counters = counters
        self._send = send
        self._by_identity: dict[bytes, list[tuple[Waiting, int]]] = {}
        """Unanswered items, with their indices."""

    # -------------------------------------------------------- who waits

    def await_open(self, waiting: Waiting) -> None:
        """Its open items wait for their entries from now on."""
        for index in waiting.open:
            self._by_identity.setdefault(waiting.want.items[index].identity, []).append((waiting, index))

    def awaited(self, identity: bytes) -> bool:
        return identity in self._by_identity

    def waiters(self, identity: bytes, instance: str | None = None) -> list[tuple[Waiting, int]]:
        """Unanswered items of that identity, of one instance or of all."""
        found = self._by_identity.get(identity, ())
        return [each for each in found if instance is None or each[0].instance == instance]

    def forget(self, waiting: Waiting) -> None:
        """None of its items is answered any more."""
        for index in list(waiting.open):
            self._close(waiting, index)

    # -------------------------------------------------------- what they are told

    def landed(self, waiting: Waiting, found: list[tuple[int, Entry, float | None]], source: str) -> None:
        """Answer items of one want with their entries. With each, when its fetch or staging was started; None: it was
        here."""
        want = waiting.want
        for index, entry, _ in found:
            if want.items[index].rows not in (0, entry.rows):
                self.missing(waiting, index, "rows")
        promised = [each for each in found if each[0] in waiting.open]
        if not promised:
            return
        leases = self._lease(waiting, self._backend.pin_all([entry for _, entry, _ in promised]))
        for (index, entry, started_at), lease in zip(promised, leases, strict=True):
            self._close(waiting, index)
            seconds = 0.0 if started_at is None else time.monotonic() - started_at
            layout = entry.layout
            place = (entry.offset, layout.nbytes, layout.rows, layout.dim, layout.dtype)
            self._send(waiting.session, Landed(want.want, index, lease, *place, source, seconds))
        self._counters.add("wants", len(promised), outcome=source)

    def landed_on_device(self, waiting: Waiting, index: int, read: DeviceRead, source: str, seconds: float) -> None:
        want, advert = waiting.want, read.advert
        if want.items[index].rows not in (0, advert.rows):
            self.missing(waiting, index, "rows")
            return
        [lease] = self._lease(waiting, [self._device_reads.pin(read)])
        self._close(waiting, index)
        place = (0, advert.nbytes, advert.rows, advert.dim, advert.dtype)
        self._send(waiting.session, Landed(want.want, index, lease, *place, source, seconds, read.read))
        self._counters.add("wants", outcome=source)

    def missing(self, waiting: Waiting, index: int, reason: str) -> None:
        """`reason`: one of MISSING_REASONS."""
        if index not in waiting.open:
            return
        self._close(waiting, index)
        self._counters.add("wants", outcome=reason)
        self._send(waiting.session, Missing(waiting.want.want, index, reason))

    # -------------------------------------------------------- inside

    def _lease(self, waiting: Waiting, pins: Sequence[Pin]) -> list[int]:
        want = waiting.want
        return self._leases.grant(waiting.session.sid, waiting.instance, want.want, want.readers, pins)

    def _close(self, waiting: Waiting, index: int) -> None:
        waiting.open.discard(index)
        identity = waiting.want.items[index].identity
        waiters = self._by_identity.get(identity)
        if waiters and (waiting, index) in waiters:  # not, while its want begins
            waiters.remove((waiting, index))
            if not waiters:
                del self._by_identity[identity]
