"""Transfers: READs of one or many entries from one holder, and the landing memory while they may write into it.

Owns every READ in flight, and each landing extent from `add` until it is handed back, or freed out of quarantine. What
was added for one holder since the last turn goes out in one READ, the records of all of it in a second one. It must
never hand out memory that a library may still write into, nor know whether what has landed is any good.

    (added) --turn, the holder's window and the bound have room--> PAYLOADS --done--> RECORDS --done--> legs arrived
    (added) --a READ of the same holder is late, the holder is stuck--> every leg broken, its memory handed back
    PAYLOADS, RECORDS --failed, refused--> every leg broken, its memory handed back
    PAYLOADS, RECORDS --late--> every leg broken, its memory QUARANTINED --the library is sure--> (freed)

Whatever is in flight may end in quarantine. So what is in flight and what is in quarantine have one bound together,
`quarantine_bytes`, which only the last READ that is posted below it may cross. A holder with memory in quarantine is
`stuck`: nothing more is read from it before that has ended. With the bound reached by quarantine alone, all are.

The records are read only after the payloads have arrived: that order is what makes an unchanged record a proof.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ec_p2p.engine.extents import Extent
from ec_p2p.engine.generation import RECORD_BYTES, fence
from ec_p2p.engine.tally import Tally
from ec_p2p.node.rates import Delivery, Rates
from ec_p2p.transport.interface import Reading, Span, State, Transport, TransportError

logger = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Landing memory of what travels together, unless a single entry takes more: who waits for a small one should not have
to wait for many large ones."""
BATCH_LEGS = 256
WINDOW_BYTES = 64 << 20
"""Landing memory of what is in flight from one holder, where one READ more may be posted below it; the rest waits here.
Far more than any wire needs. It bounds what a holder that hangs can put into quarantine, so it counts whole pages: tiny
entries take far more memory than they have payload."""
_MOST_LATE = 1_024
"""Holders of which the log has said so. Those that are gone do not gather for ever."""
_WINDOWS = 4
"""The bound has room for so many windows, at least: one holder that hangs is not to stop all others."""

Owner = TypeVar("Owner")


class Leg(msgspec.Struct, Generic[Owner], frozen=True, eq=False, gc=False):
    """One entry's part of a transfer. It lands in `extent`, which is the transfer's until it is handed back."""

    owner: Owner
    extent: Extent
    payload: int
    """Where its `nbytes` of payload are in the holder's arena."""
    record: int
    """Where its record is."""
    nbytes: int


LATE, STUCK = "late", "stuck"


class _End(Enum):
    """How a transfer has ended. Broken ones by the word that the metrics use."""

    ARRIVED = "arrived"
    REFUSED = "refused"
    FAILED = "disconnected"
    LATE = LATE
    STUCK = STUCK
    """It was never posted: the holder hangs, or the bound was reached."""


class _Transfer(msgspec.Struct, Generic[Owner], eq=False):
    """The two READs of a batch, one after the other. `legs` are those not yet handed back."""

    peer: bytes
    legs: deque[Leg[Owner]]
    nbytes: int
    """Of payload."""
    memory: int
    """What it lands in."""
    of_records: bool
    """Whether it is at its second READ."""
    posted_at: float = 0.0
    deadline: float = 0.0
    reading: Reading | None = None
    delivery: Delivery | None = None
    """Of the READ of the payloads, while it is in flight."""
    end: _End | None = None
    """None while it may still move."""

    @property
    def hurried(self) -> bool:
        """Whether it wants to be polled again without a pause."""
        return self.reading is None or bool(self.reading.unposted)


class _Detained(NamedTuple):
    """A READ that was late, and the memory that it may still write into."""

    peer: bytes
    reading: Reading
    extents: list[Extent]


class Transfers(Generic[Owner]):
    """Used by the node's loop only; nothing blocks, nothing is called back but from within `turn`.

    Each leg ends with `on_arrived(legs, now)`, which takes from the left what it has seen to, or with one call of
    `on_broken(owner, why, extent, now)`; the extent is the callee's then. It is None where the memory stays in
    quarantine, or was freed at once. `quarantine_bytes` tells the bound as it is now.
    """

    def __init__(
        self,
        transport: Transport,
        release: Callable[[Extent], object],
        rates: Rates,
        counters: Tally,
        read_timeout_s: float,
        quarantine_bytes: Callable[[], int],
        on_arrived: Callable[[deque[Leg[Owner]], float], None],
        on_broken: Callable[[Owner, str, Extent | None, float], None],
    ) -> None:
        self._transport = transport
        self._release = release
        self._rates = rates
        self._counters = counters
        self._read_timeout_s = read_timeout_s
        self._bound = quarantine_bytes
        self._on_arrived = on_arrived
        self._on_broken = on_broken
        self._added: dict[bytes, deque[Leg[Owner]]] = {}
        self._in_flight: list[_Transfer[Owner]] = []
        self._quarantine: list[_Detained] = []
        self._late: set[bytes] = set()
        """Holders of which the log says that a READ was late, until they deliver."""

    def __len__(self) -> int:
        """READs in flight: while there are any, `turn` wants to be called again soon."""
        return len(self._in_flight)

    @property
    def waiting(self) -> bool:
        """Whether the next turn has something to do, whatever the wire does: to post what was added, or to tell of what
        was given up behind a late READ."""
        return self._next_holder() is not None or any(transfer.end is not None for transfer in self._in_flight)

    @property
    def newest_posted_at(self) -> float:
        """When the newest READ in flight was posted; infinity while one wants to be polled without a pause; 0.0 without
        one."""
        return max(
            (float("inf") if transfer.hurried else transfer.posted_at for transfer in self._in_flight), default=0.0
        )

    @property
    def quarantined_bytes(self) -> int:
        return sum(extent.nbytes for held in self._quarantine for extent in held.extents)

    def stuck(self, peer: bytes) -> bool:
        """Whether nothing may be read from a holder now: it has not let go of memory, or all of them together hold too
        much."""
        if not self._quarantine:
            return False
        return any(held.peer == peer for held in self._quarantine) or self.quarantined_bytes >= self._bound()

    def outstanding(self, peer: bytes) -> int:
        """Payload bytes that were added for a holder and have not arrived yet."""
        in_flight = sum(transfer.nbytes for transfer in self._in_flight if transfer.peer == peer)
        return sum(leg.nbytes for leg in self._added.get(peer, ())) + in_flight

    def add(self, peer: bytes, leg: Leg[Owner]) -> None:
        """Have an entry read from the holder with this incarnation, from the next `turn` on. It must not be `stuck`."""
        self._added.setdefault(peer, deque()).append(leg)

    def turn(self, now: float) -> None:
        """Look after what is in flight, then post what was added."""
        for transfer in list(self._in_flight):
            self._poll(transfer, now)
        while (peer := self._next_holder()) is not None:  # what breaks at once may be added again, for another holder
            self._post(self._take_batch(peer), now)
        if self._added and not self._in_flight:
            self._give_up_behind(None, now)  # quarantine alone has reached the bound, which may have become smaller

    def settle(self) -> None:
        """Free what the library is done with by now."""
        if self._quarantine:
            self._quarantine = [held for held in self._quarantine if not self._settled(held)]

    def close(self) -> None:
        """Nothing is called back any more. The transport is closed after this, the arena after the transport."""
        self._in_flight.clear()
        self._added.clear()

    # -------------------------------------------------------- inside

    def _next_holder(self) -> bytes | None:
        """The first in line with something to post, and room in its window and below the bound."""
        if not self._added:
            return None
        if not self._in_flight and not self._quarantine:
            return next(iter(self._added))
        if self.quarantined_bytes + sum(each.memory for each in self._in_flight) >= self._bound():
            return None
        window = self._window_bytes()
        return next((peer for peer in self._added if self._memory_in_flight(peer) < window), None)

    def _window_bytes(self) -> int:
        return max(1, min(WINDOW_BYTES, self._bound() // _WINDOWS))

    def _memory_in_flight(self, peer: bytes) -> int:
        return sum(transfer.memory for transfer in self._in_flight if transfer.peer == peer)

    def _take_batch(self, peer: bytes) -> _Transfer[Owner]:
        legs = self._added.pop(peer)
        batch = take_batch(legs, min(BATCH_BYTES, self._window_bytes()))
        if legs:
            self._added[peer] = legs  # behind the other holders: it is their turn now
        return self._transfer(peer, batch)

    def _transfer(self, peer: bytes, legs: deque[Leg[Owner]]) -> _Transfer[Owner]:
        nbytes, memory = sum([leg.nbytes for leg in legs]), sum([leg.extent.nbytes for leg in legs])
        transfer = _Transfer(peer, legs, nbytes, memory, of_records=not nbytes)
        self._in_flight.append(transfer)
        return transfer

    def _post(self, transfer: _Transfer[Owner], now: float) -> None:
        """Begin its next READ."""
        transfer.posted_at, transfer.deadline = now, now + self._read_timeout_s
        transfer.end = _End.REFUSED
        try:
            transfer.reading = self._transport.read(transfer.peer.hex(), _spans(transfer))
        except TransportError as error:
            logger.info("READ from %s refused: %s", transfer.peer.hex()[:8], error)
        else:
            transfer.end = None
            if not transfer.of_records:
                transfer.delivery = self._rates.begun(transfer.peer, now)
            self._counters.add("transfers", of="records" if transfer.of_records else "payloads")
        self._poll(transfer, now)

    def _poll(self, transfer: _Transfer[Owner], now: float) -> None:
        if transfer.end is None:
            transfer.end = self._look(transfer, now)
        if transfer.end is None:
            return
        delivery, transfer.delivery = transfer.delivery, None
        if transfer.end is _End.ARRIVED and not transfer.of_records:
            assert delivery is not None
            delivery.done(transfer.nbytes)
            if transfer.peer in self._late:
                self._late.discard(transfer.peer)
                logger.info("node incarnation %s delivers again", transfer.peer.hex()[:8])
            transfer.of_records = True
            fence()  # where the READ itself is done by this processor's loads
            self._post(transfer, now)
            return
        if delivery is not None:
            delivery.lost()
        # Should a callee raise, the next turn goes on with the others.
        while transfer.legs:
            if transfer.end is _End.ARRIVED:
                self._on_arrived(transfer.legs, now)
            else:
                leg = transfer.legs.popleft()
                extent = None if transfer.end is _End.LATE else leg.extent
                self._on_broken(leg.owner, transfer.end.value, extent, now)
        self._in_flight.remove(transfer)

    def _look(self, transfer: _Transfer[Owner], now: float) -> _End | None:
        assert transfer.reading is not None
        state = transfer.reading.poll()
        if state is State.POSTED:
            if now < transfer.deadline:
                return None
            self._complain(transfer)
            self._detain(_Detained(transfer.peer, transfer.reading, [leg.extent for leg in transfer.legs]))
            self._give_up_behind(transfer.peer, now)
            return _End.LATE
        transfer.reading.release()
        return _End.ARRIVED if state is State.DONE else _End.FAILED

    def _complain(self, transfer: _Transfer[Owner]) -> None:
        if transfer.peer not in self._late:
            if len(self._late) >= _MOST_LATE:
                self._late.clear()
            self._late.add(transfer.peer)
            logger.warning(
                "a READ of %d bytes from node incarnation %s has not ended in %.1f s: other holders are tried, and its "
                "landing memory is not used before it has ended (said once, until that node delivers)",
                transfer.nbytes,
                transfer.peer.hex()[:8],
                self._read_timeout_s,
            )

    def _detain(self, held: _Detained) -> None:
        if not self._settled(held):
            self._counters.add("quarantined", len(held.extents))
            self._quarantine.append(held)

    def _give_up_behind(self, late: bytes | None, now: float) -> None:
        """What waits behind a late READ would wait as long, and nothing may be read from a holder that is stuck now."""
        for peer in [peer for peer in self._added if peer == late or self.stuck(peer)]:
            self._transfer(peer, self._added.pop(peer)).end = _End.STUCK

    def _settled(self, held: _Detained) -> bool:
        """Free the memory, if nothing can write into it any more."""
        held.reading.poll()
        if not held.reading.release():
            return False
        for extent in held.extents:
            self._release(extent)
        return True


def take_batch(legs: deque[Leg[Owner]], most_bytes: int) -> deque[Leg[Owner]]:
    """Take from the front of `legs`, which is not empty: at most BATCH_LEGS and what lands in `most_bytes`, or one."""
    batch = deque([legs.popleft()])
    memory = batch[0].extent.nbytes
    while legs and len(batch) < BATCH_LEGS:
        memory += legs[0].extent.nbytes
        if memory > most_bytes:
            break
        batch.append(legs.popleft())
    return batch


def _spans(transfer: _Transfer[Owner]) -> list[Span]:
    legs = transfer.legs
    if transfer.of_records:
        return stretches([(leg.record, leg.extent.landing_record, RECORD_BYTES) for leg in legs])
    return stretches([(leg.payload, leg.extent.offset, leg.nbytes) for leg in legs])


def stretches(parts: Iterable[tuple[int, int, int]]) -> list[Span]:
    """Spans of (remote, local, bytes): what lies behind the one before on both sides goes with it."""
    spans: list[Span] = []
    remote = local = nbytes = 0
    for source, target, size in parts:
        if source == remote + nbytes and target == local + nbytes:
            nbytes += size
        else:
            if nbytes:
                spans.append(Span(remote, local, nbytes))
            remote, local, nbytes = source, target, size
    if nbytes:
        spans.append(Span(remote, local, nbytes))
    return spans
