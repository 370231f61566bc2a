"""Fetching one entry from another node: landing memory, READs, validation, failover.

Owns the choice of the next holder, and the landing memory while no READ may write into it: `Transfers` has it
meanwhile. It must never hand out bytes that were not validated. One fetch per identity, however many wait for it.

    NEXT_HOLDER --arena has room--> CONNECTING, --has none--> WAITING_MEMORY --some was freed--> CONNECTING
    CONNECTING --card covers the extent--> READING --arrived, same generation and identity--> (landed)
    CONNECTING --only on the holder's disk--> STAGING --the holder answers where it is--> CONNECTING
    CONNECTING, STAGING, READING --failed, late, or not the promised entry--> NEXT_HOLDER, or GIVEN_UP
    NEXT_HOLDER --there is none--> GIVEN_UP
    WAITING_MEMORY --nobody wants it any more, or nobody as late as this, or it can never fit--> GIVEN_UP
    GIVEN_UP --> (failed)

The record of the extent is read only after its payload has arrived. The holder invalidates the record before it lets
the extent be written again, so an unchanged record proves that the payload was whole all the time it was being read.
The record lands in a place that goes with the landing extent: they live, and are quarantined, together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

import msgspec

from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.engine.cpu import Entry, OutOfMemory, TooLarge
from ec_p2p.engine.entry import Layout
from ec_p2p.engine.extents import RESERVED, Extent
from ec_p2p.engine.generation import RECORD_BYTES, proves
from ec_p2p.engine.tally import Tally
from ec_p2p.node.adverts import promised
from ec_p2p.node.memory import Memory
from ec_p2p.node.peers import Peer, Peers, PeerState
from ec_p2p.node.rates import Rates
from ec_p2p.node.transfers import LATE, STUCK, Leg, Transfers
from ec_p2p.transport.interface import Transport

logger = logging.getLogger(__name__)

_QUARANTINE_SHARE = 4
"""With this part of the arena in quarantine nothing more is fetched. Slabs that were refused do not count: they leave
less to go on with."""


class Stage(Enum):
    NEXT_HOLDER = "about to try a holder"
    WAITING_MEMORY = "waiting for memory"
    CONNECTING = "connecting"
    STAGING = "waiting for the holder's disk"
    READING = "being read"
    GIVEN_UP = "about to fail"


_TO_DRIVE = (Stage.NEXT_HOLDER, Stage.GIVEN_UP)
"""Nothing is waited for."""

Holder = tuple[NodeInfo, Advert]


class Fetch(msgspec.Struct, eq=False, gc=False):
    """One entry on its way, from `source` as `advert` says. Made and driven by Fetches."""

    identity: bytes
    source: NodeInfo
    advert: Advert
    holders: list[Holder]
    """Who may be tried yet."""
    started_at: float
    give_up_at: float
    stage_deadline: float
    stage: Stage = Stage.NEXT_HOLDER
    layout: Layout | None = None
    """Of the entry that the advert promises. None: nothing that can be stored."""
    extent: Extent | None = None
    """Its landing memory, while no READ may write into it."""
    reason: str = ""
    """Why it is given up."""


class Fetches:
    """All fetches of one node. Used by the node's loop only; `progress` never blocks.

    Each fetch ends in one call of `on_landed(landed)`, with (entry, when its fetch was started) of all that came whole
    together, or of `on_failed(identity, reason)`; never within `start`. `still_wanted` tells whether anybody waits: a
    fetch that only waits for memory is dropped when nobody does.
    """

    def __init__(
        self,
        memory: Memory,
        arena: memoryview,
        transport: Transport,
        peers: Peers,
        rates: Rates,
        counters: Tally,
        read_timeout_s: float,
        on_landed: Callable[[list[tuple[Entry, float]]], None],
        on_failed: Callable[[bytes, str], None],
        still_wanted: Callable[[bytes], bool],
    ) -> None:
        self._memory = memory
        self._arena = arena
        self._peers = peers
        self._rates = rates
        self._counters = counters
        self._read_timeout_s = read_timeout_s
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._still_wanted = still_wanted
        self._fetches: dict[bytes, Fetch] = {}
        self._failed_at_once: deque[Fetch] = deque()
        self._planned: dict[bytes, int] = {}
        self._complained_of: set[bytes] = set()
        """Nodes with adverts that promise nothing, of which the log says so once."""
        self._transfers: Transfers[Fetch] = Transfers(
            transport,
            memory.release,
            rates,
            counters,
            read_timeout_s,
            lambda: memory.usable_bytes // _QUARANTINE_SHARE,
            self._arrived,
            self._broken,
        )

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._fetches

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def newest_transfer_at(self) -> float:
        """When the newest READ in flight was posted; infinity while one wants to be polled without a pause."""
        return self._transfers.newest_posted_at

    @property
    def quarantined_bytes(self) -> int:
        return self._transfers.quarantined_bytes

    def outstanding(self, incarnation: bytes) -> int:
        """Payload bytes that are on their way from a holder, or about to be."""
        return self._transfers.outstanding(incarnation) + self._planned.get(incarnation, 0)

    def plan(self, holder: Holder) -> None:
        """Count an entry among what is about to come from a holder; the next `start` begins all that was planned."""
        info, advert = holder
        self._planned[info.incarnation] = self._planned.get(info.incarnation, 0) + advert.nbytes

    def start(self, wanted: Mapping[bytes, list[Holder]], now: float, give_up_at: float) -> None:
        """Have entries fetched that some nodes advertise, in memory or on disk, next to each other where there is room.
        There must be no fetch of them, and a holder of each; the lists are the fetches' own from then on. Their READs
        leave with the next `turn`, together with those of all that was started by then."""
        self._planned.clear()
        fetches = [
            Fetch(identity, *holders[0], holders, now, give_up_at, give_up_at) for identity, holders in wanted.items()
        ]
        self._fetches.update(zip(wanted, fetches, strict=True))
        if len(fetches) > 1:
            row = self._memory.reserve_row([fetch.advert.nbytes for fetch in fetches])
            for fetch, extent in zip(fetches, row or (), strict=False):
                fetch.extent = extent
        for fetch in fetches:
            self._next_holder(fetch, now)
            if fetch.stage in _TO_DRIVE:
                self._failed_at_once.append(fetch)

    def extend(self, identity: bytes, give_up_at: float) -> None:
        """Somebody who joins a running fetch may be more patient than those before."""
        fetch = self._fetches[identity]
        fetch.give_up_at = max(fetch.give_up_at, give_up_at)

    def peer_ready(self, peer: Peer, now: float) -> None:
        for fetch in list(self._fetches.values()):
            if fetch.stage is Stage.CONNECTING and fetch.source.incarnation == peer.info.incarnation:
                self._connect(fetch, fetch.stage_deadline, now)
                self._drive(fetch, now)

    def staged(self, incarnation: bytes, identity: bytes, advert: Advert | None, now: float) -> None:
        """A holder has answered a stage request: the entry is in its arena now, or cannot be brought there."""
        fetch = self._fetches.get(identity)
        if fetch is None or fetch.stage is not Stage.STAGING or fetch.source.incarnation != incarnation:
            return  # an answer that came too late
        if advert is None:
            self._failed_holder(fetch, "not_staged", now)
        elif advert.state != EntryState.RESIDENT or promised(advert) != fetch.layout:
            self._failed_holder(fetch, "layout", now)
        else:
            fetch.advert = advert
            self._connect(fetch, now + self._read_timeout_s, now)
        self._drive(fetch, now)

    def peer_gone(self, incarnation: bytes, now: float) -> None:
        self._complained_of.discard(incarnation)
        waits = (Stage.WAITING_MEMORY, Stage.CONNECTING, Stage.STAGING)
        for fetch in list(self._fetches.values()):
            fetch.holders = [holder for holder in fetch.holders if holder[0].incarnation != incarnation]
            if fetch.stage in waits and fetch.source.incarnation == incarnation:
                self._memory.leave(fetch)
                self._failed_holder(fetch, "gone", now)
                self._drive(fetch, now)

    def turn(self, now: float) -> None:
        """Look after what was started, and what is in flight."""
        for _ in range(len(self._failed_at_once)):
            self._drive(self._failed_at_once.popleft(), now)
        self._transfers.turn(now)

    def progress(self, now: float) -> None:
        """Look after everything, and end what has taken too long."""
        for fetch in list(self._fetches.values()):
            if fetch.stage is Stage.WAITING_MEMORY:
                if not self._still_wanted(fetch.identity) or now >= fetch.give_up_at:
                    self._give_up(fetch, "no_memory")
            elif fetch.stage is Stage.CONNECTING and now >= fetch.stage_deadline:
                self._rates.silent(fetch.source.incarnation)
                self._failed_holder(fetch, "connect_timeout", now)
            elif fetch.stage is Stage.STAGING and now >= fetch.stage_deadline:
                # Not silent: a disk may be slow, and have brought the entry by the time that somebody asks again.
                self._rates.failed(fetch.source.incarnation)
                self._failed_holder(fetch, "stage_timeout", now)
            self._drive(fetch, now)
        self._transfers.turn(now)
        self._transfers.settle()

    def deadlines(self) -> Iterable[float]:
        """When there is something to do even if nothing is heard. Transfers are not listed: they are looked after all
        the time."""
        if self._failed_at_once or self._transfers.waiting:
            yield 0.0
        for fetch in self._fetches.values():
            if fetch.stage is Stage.WAITING_MEMORY:
                yield fetch.give_up_at
            elif fetch.stage in (Stage.CONNECTING, Stage.STAGING):
                yield fetch.stage_deadline

    def close(self) -> None:
        """Let go of what can be let go of. The transport is closed after this, the arena after the transport."""
        self._transfers.close()
        for fetch in self._fetches.values():
            self._drop_landing(fetch)
        self._fetches.clear()

    # -------------------------------------------------------- stages

    def _drive(self, fetch: Fetch, now: float) -> None:
        """Go on until something is to be waited for, or it has ended, which is told. A loop: a popular entry may have
        as many holders as there are nodes, and all of them may fail at once."""
        while self._fetches.get(fetch.identity) is fetch:
            if fetch.stage is Stage.NEXT_HOLDER:
                self._next_holder(fetch, now)
            elif fetch.stage is Stage.GIVEN_UP:
                self._fail(fetch)
            else:
                return

    def _next_holder(self, fetch: Fetch, now: float) -> None:
        if not fetch.holders:
            self._give_up(fetch, "failed")
            return
        fetch.source, advert = fetch.holders.pop(0)
        fetch.advert, fetch.layout, extent = advert, promised(advert), fetch.extent
        if fetch.layout is None:
            # A dtype that this version does not know, or numbers that do not belong together: a peer may say anything,
            # and as often as somebody wants it.
            level = logging.DEBUG if fetch.source.incarnation in self._complained_of else logging.WARNING
            logger.log(level, "node %s advertises what cannot be stored: %s", fetch.source.name, advert)
            self._complained_of.add(fetch.source.incarnation)
            self._failed_holder(fetch, "layout", now)
        elif extent is not None and extent.nbytes >= advert.nbytes:
            self._connect(fetch, now + self._read_timeout_s, now)
        else:
            self._drop_landing(fetch)
            self._allocate(fetch, now)

    def _allocate(self, fetch: Fetch, now: float) -> None:
        try:
            fetch.extent = self._memory.reserve(fetch.advert.nbytes)
        except TooLarge:
            self._give_up(fetch, "too_large")
        except OutOfMemory:
            fetch.stage = Stage.WAITING_MEMORY
            self._memory.wait(fetch, lambda now: self._memory_freed(fetch, now))
        else:
            self._memory.leave(fetch)
            self._connect(fetch, now + self._read_timeout_s, now)

    def _memory_freed(self, fetch: Fetch, now: float) -> None:
        if self._still_wanted(fetch.identity):
            self._allocate(fetch, now)
        else:
            self._give_up(fetch, "no_memory")
        self._drive(fetch, now)

    def _connect(self, fetch: Fetch, deadline: float, now: float) -> None:
        """READ from the source as soon as that can be done, until the deadline."""
        fetch.stage, fetch.stage_deadline = Stage.CONNECTING, deadline
        advert, incarnation = fetch.advert, fetch.source.incarnation
        peer = self._peers.get(incarnation)
        if peer is None:
            return  # its adverts came before itself: wait for `peer_ready`
        if peer.state is PeerState.UNUSABLE:
            self._failed_holder(fetch, "unusable", now)
        elif self._transfers.stuck(incarnation):
            self._failed_holder(fetch, STUCK, now)
        elif advert.state == EntryState.DISK:
            if peer.state is not PeerState.READY:
                return  # asked for its card: wait for `peer_ready`
            if self._peers.stage(peer, fetch.identity):
                fetch.stage = Stage.STAGING
                fetch.stage_deadline = now + self._read_timeout_s
            else:
                self._failed_holder(fetch, "not_asked", now)
        elif peer.covers(advert):
            extent, fetch.stage, fetch.extent = fetch.extent, Stage.READING, None
            assert extent is not None
            # Hands the landing memory over; it comes back with `_arrived` or `_broken`.
            self._transfers.add(incarnation, Leg(fetch, extent, advert.offset, advert.record, advert.nbytes))
        else:
            self._peers.ask(peer, now)  # the holder's arena has grown since its card was read

    def _broken(self, fetch: Fetch, why: str, extent: Extent | None, now: float) -> None:
        fetch.extent = extent
        if why == LATE:
            self._rates.silent(fetch.source.incarnation)
        elif why != STUCK:  # which may be for the sake of another holder
            self._rates.failed(fetch.source.incarnation)
        self._failed_holder(fetch, why, now)
        self._drive(fetch, now)

    def _arrived(self, legs: deque[Leg[Fetch]], now: float) -> None:
        """All of one holder. What is whole becomes visible at once, and is told in one go."""
        whole: list[Fetch] = []
        changed: list[Fetch] = []
        parts: list[tuple[Extent, bytes, Layout]] = []
        arena, peer, nbytes = self._arena, ("peer", legs[0].owner.source.name), 0
        while legs:
            leg = legs.popleft()
            fetch, extent = leg.owner, leg.extent
            layout, start = fetch.layout, extent.landing_record
            assert layout is not None
            if proves(arena[start : start + RECORD_BYTES], fetch.advert.generation, fetch.identity, layout):
                whole.append(fetch)
                parts.append((extent, fetch.identity, layout))
                nbytes += layout.nbytes
            else:
                fetch.extent = extent
                self._failed_holder(fetch, "changed", now)
                changed.append(fetch)
        if whole:
            entries = self._publish(whole, parts)
            for fetch in whole:
                del self._fetches[fetch.identity]
            self._counters.add_all(
                (("fetches", (("outcome", "landed"), peer)), len(whole)), (("fetched_bytes", (peer,)), nbytes)
            )
            self._on_landed([(entry, fetch.started_at) for entry, fetch in zip(entries, whole, strict=True)])
        for fetch in changed:
            self._drive(fetch, now)

    def _publish(self, fetches: list[Fetch], parts: list[tuple[Extent, bytes, Layout]]) -> list[Entry]:
        """Should it raise, which is an error of this node, the next `progress` ends all of them, and who waits for one
        that is there by then is answered with it."""
        try:
            return self._memory.publish_all(parts)
        except Exception:
            for fetch, (extent, *_) in zip(fetches, parts, strict=True):
                fetch.extent = extent if extent.life is RESERVED else None
                self._give_up(fetch, "failed")
            raise

    # -------------------------------------------------------- endings

    def _failed_holder(self, fetch: Fetch, why: str, now: float) -> None:
        self._counters.add("fetches", outcome=why, peer=fetch.source.name)
        if now >= fetch.give_up_at:
            self._give_up(fetch, "deadline")
        else:
            fetch.stage = Stage.NEXT_HOLDER

    def _give_up(self, fetch: Fetch, reason: str) -> None:
        fetch.stage = Stage.GIVEN_UP
        fetch.reason = reason

    def _fail(self, fetch: Fetch) -> None:
        self._memory.leave(fetch)
        self._drop_landing(fetch)
        del self._fetches[fetch.identity]
        self._on_failed(fetch.identity, fetch.reason)

    def _drop_landing(self, fetch: Fetch) -> None:
        if fetch.extent is not None:
            self._memory.release(fetch.extent)
            fetch.extent = None
