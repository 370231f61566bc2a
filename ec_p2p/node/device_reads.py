"""READs that the readers of an instance do themselves, each into the memory of its own device.

Owns which entries are, or are about to be, in the device memory of an instance's readers, and what each lander knows of
the peers. It must never decide who is promised what: that is the wants' part, to whom every READ ends once.

    (none) --bring: every reader has a lander, the holder's arena can be read--> READING
    READING --all have landed--> LANDED, --one has not, is gone, replaced, or silent--> (failed)
    READING --half of the want's time is over--> UNWANTED (failed)
    UNWANTED --all have landed, one has not, is gone, replaced, or silent--> (gone)
    LANDED --the last pin is closed--> (gone)
    LANDED --the landers of the readers are others by now--> as before for those who have pinned it, for nobody else

Whatever fails here is fetched into the arena instead: a device's memory is not waited for. What is unwanted is looked
after all the same: how it ends tells whether its landers are well, and its holder. That somebody was in a hurry tells
nothing.

A READ that fails in a lander may fail for reasons of that device's network: other instances go on reading from the
holder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import closing

from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.engine.tally import Tally
from ec_p2p.node.adverts import promised
from ec_p2p.node.fetch import Holder
from ec_p2p.node.messages import (
    READ_REASONS,
    DropEntry,
    PeerCard,
    PeerGone,
    Quarantined,
    ReadEnded,
    ReadEntry,
    ToLander,
)
from ec_p2p.node.peers import Peer, Peers, PeerState
from ec_p2p.node.rates import Delivery, Rates
from ec_p2p.node.sessions import Session, Sessions

_AVOID_S = 10.0
"""A device that cannot read from a holder is not made to try again for so long."""
_OF_THE_HOLDER = ("late", "disconnected")
"""Reasons for which whoever fetches the entry instead should rather ask another holder."""
_NOT_AGAIN = (*_OF_THE_HOLDER, "refused", "stuck", "error")
"""Reasons that the next READ of this holder would meet again."""

_NO_REVISION = -1

Readers = tuple[Session, ...]
"""The landers of the readers of one instance, by rank."""


class DeviceRead:
    """One entry, for all readers of one instance."""

    __slots__ = (
        "advert",
        "deadline",
        "delivery",
        "identity",
        "instance",
        "landers",
        "owing",
        "pins",
        "read",
        "source",
        "started_at",
        "wanted",
        "wanted_until",
    )

    def __init__(
        self,
        read: int,
        instance: str,
        identity: bytes,
        holder: Holder,
        landers: Readers,
        delivery: Delivery,
        *,
        now: float,
        deadline: float,
        wanted_until: float,
    ) -> None:
        self.read = read
        self.instance = instance
        self.identity = identity
        self.source: NodeInfo = holder[0]
        self.advert: Advert = holder[1]
        self.landers = landers
        self.owing = set(landers)
        """Whose answer is still to come."""
        self.delivery = delivery
        self.started_at = now
        self.deadline = deadline
        """Who has not answered by then is silent."""
        self.wanted_until = wanted_until
        self.wanted = True
        self.pins = 0

    @property
    def readers(self) -> int:
        return len(self.landers)

    @property
    def landed(self) -> bool:
        return not self.owing

    @property
    def next_look(self) -> float:
        return min(self.deadline, self.wanted_until) if self.wanted else self.deadline


class _Pin:
    """Keeps a landed entry in the devices' memory."""

    __slots__ = ("_on_closed", "_read")

    def __init__(self, read: DeviceRead, on_closed: Callable[[DeviceRead], None]) -> None:
        read.pins += 1
        self._read: DeviceRead | None = read
        self._on_closed = on_closed

    def close(self) -> None:
        if self._read is not None:
            read, self._read = self._read, None
            read.pins -= 1
            self._on_closed(read)


class DeviceReads:
    """Of one node, used by its loop only. Each READ ends with one call of `on_landed(read)` or `on_failed(instance,
    identity)`, never within `bring`. A READ that nobody pins in `on_landed` is dropped."""

    def __init__(
        self,
        sessions: Sessions,
        peers: Peers,
        rates: Rates,
        counters: Tally,
        read_timeout_s: float,
        on_landed: Callable[[DeviceRead], None],
        on_failed: Callable[[str, bytes], None],
    ) -> None:
        self._sessions = sessions
        self._peers = peers
        self._rates = rates
        self._counters = counters
        self._read_timeout_s = read_timeout_s
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._reads: dict[tuple[bytes, Readers], DeviceRead] = {}
        """By identity, and by who has read it: no other reader can load it."""
        self._by_number: dict[int, DeviceRead] = {}
        self._numbers = itertools.count(1)
        self._avoid: dict[tuple[str, bytes | None], float] = {}
        """(instance, holder, or None for all of them) -> until when nothing is read there."""
        self._heard_at: dict[Session, float] = {}
        """When a lander has last said how a READ ended."""
        self._quarantined: dict[Session, int] = {}
        """Bytes of the device's memory that a lander may not use, as it says."""
        self._told: dict[tuple[Session, bytes], int] = {}
        """(lander, peer) -> revision of the card that it was given."""

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def quarantined_bytes(self) -> int:
        """Of all devices. Any thread may ask."""
        return sum(list(self._quarantined.values()))

    def find(self, instance: str, readers: int, identity: bytes) -> DeviceRead | None:
        """What has landed, or is on its way, for exactly those who are the readers of the instance now."""
        return self._reads.get((identity, self._landers(instance, readers))) if self._reads else None

    def pin(self, read: DeviceRead) -> _Pin:
        return _Pin(read, self._unpinned)

    def bring(
        self, instance: str, readers: int, identity: bytes, holders: Iterable[Holder], now: float, give_up_at: float
    ) -> bool:
        """Have every reader of the instance READ the entry, which `find` does not find. False where that cannot be done
        now."""
        landers = self._landers(instance, readers)
        if not landers or (instance, None) in self._avoid:
            return False
        for holder in holders:
            peer = self._readable(holder)
            if peer is not None and (instance, holder[0].incarnation) not in self._avoid:
                # A lander gives up on a READ by itself, on its payload or on its record; the deadline is for one that
                # does not answer.
                read = DeviceRead(
                    next(self._numbers),
                    instance,
                    identity,
                    holder,
                    landers,
                    self._rates.begun(holder[0].incarnation, now),
                    now=now,
                    deadline=now + 2 * self._read_timeout_s,
                    wanted_until=_half_of(now, give_up_at),
                )
                self._start(read, peer)
                return True
        return False

    def extend(self, read: DeviceRead, now: float, give_up_at: float) -> None:
        """Somebody who joins it may be more patient than those before."""
        read.wanted_until = max(read.wanted_until, _half_of(now, give_up_at))

    def answered(self, session: Session, message: ReadEnded, now: float) -> None:
        """A lander says how its READ has ended."""
        if session.attach.kind == "lander":
            self._heard_at[session] = now
        read = self._by_number.get(message.read)
        if read is None or session not in read.owing:
            return  # dropped meanwhile
        if message.reason:
            reason = message.reason if message.reason in READ_REASONS else "error"
            if reason in _NOT_AGAIN:
                self._avoid[read.instance, read.source.incarnation] = now + _AVOID_S
            if reason == "refused":
                self._tell_again(session, read.source.incarnation)
            if reason in _OF_THE_HOLDER:
                self._rates.failed(read.source.incarnation)
            self._fail(read, reason)
            return
        read.owing.discard(session)
        self._counters.add("device_read_bytes", read.advert.nbytes)
        if not read.landed:
            return
        read.delivery.done(read.advert.nbytes * read.readers)
        if read.landers != self._landers(read.instance, read.readers):
            self._fail(read, "gone")
        elif not read.wanted:
            self._fail(read, "deadline")
        else:
            self._counters.add("device_reads", outcome="landed")
            with closing(self.pin(read)):
                self._on_landed(read)

    def quarantined(self, session: Session, message: Quarantined) -> None:
        """A lander says what late READs keep from it."""
        if session.attach.kind == "lander":
            self._quarantined[session] = message.nbytes
            self._counters.add("device_quarantined", message.entries)

    def peer_gone(self, incarnation: bytes) -> None:
        """Landers let go of it when its READs have ended."""
        for lander, peer in [key for key in self._told if key[1] == incarnation]:
            del self._told[lander, peer]
            self._sessions.send(lander, PeerGone(peer))

    def lander_gone(self, session: Session) -> None:
        self._heard_at.pop(session, None)
        self._quarantined.pop(session, None)
        for key in [key for key in self._told if key[0] is session]:
            del self._told[key]
        for read in list(self._by_number.values()):
            if session in read.landers and not read.landed:
                self._fail(read, "gone")

    def tick(self, now: float) -> None:
        for key in [key for key, until in self._avoid.items() if now >= until]:
            del self._avoid[key]
        for read in list(self._by_number.values()):
            if read.landed or now < read.next_look:
                continue
            if now >= read.deadline:
                silent = any(self._heard_at.get(lander, float("-inf")) < read.started_at for lander in read.owing)
                self._avoid[read.instance, None if silent else read.source.incarnation] = now + _AVOID_S
                self._fail(read, "silent" if silent else "late")
            else:
                self._give_up(read)

    def deadlines(self) -> Iterable[float]:
        return (read.next_look for read in self._by_number.values() if not read.landed)

    # -------------------------------------------------------- inside

    def _landers(self, instance: str, readers: int) -> Readers:
        """Empty unless every reader has one."""
        landers = self._sessions.landers_of(instance)
        return tuple(landers[rank] for rank in range(readers)) if all(map(landers.__contains__, range(readers))) else ()

    def _readable(self, holder: Holder) -> Peer | None:
        info, advert = holder
        peer = self._peers.get(info.incarnation)
        if (
            advert.state == EntryState.RESIDENT
            and peer is not None
            and peer.state is PeerState.READY
            and peer.covers(advert)
            and not self._rates.distrusted(info.incarnation)
            and promised(advert) is not None
        ):
            return peer
        return None

    def _tell_again(self, lander: Session, peer: bytes) -> None:
        """The card may have been lost on the way, or not: when the peer is gone, that has to be told all the same."""
        if (lander, peer) in self._told:
            self._told[lander, peer] = _NO_REVISION

    def _start(self, read: DeviceRead, peer: Peer) -> None:
        self._reads[read.identity, read.landers] = read
        self._by_number[read.read] = read
        advert = read.advert
        order = ReadEntry(
            read.read,
            read.source.incarnation,
            advert.offset,
            advert.record,
            advert.generation,
            read.identity,
            advert.nbytes,
            advert.rows,
            advert.dim,
            advert.dtype,
        )
        for lander in read.landers:
            key = (lander, read.source.incarnation)
            if self._told.get(key) != peer.revision:
                self._told[key] = peer.revision
                self._sessions.send(lander, PeerCard(read.source.incarnation, peer.blob))
            self._sessions.send(lander, order)

    def _fail(self, read: DeviceRead, why: str) -> None:
        self._counters.add("device_reads", outcome=why)
        read.delivery.lost()
        wanted = read.wanted
        self._forget(read)
        if wanted:
            self._on_failed(read.instance, read.identity)

    def _give_up(self, read: DeviceRead) -> None:
        """Nobody waits for it any more. Its landers go on: one that is told to drop it would not say how it ended."""
        read.wanted = False
        del self._reads[read.identity, read.landers]
        self._on_failed(read.instance, read.identity)

    def _unpinned(self, read: DeviceRead) -> None:
        if not read.pins:
            self._forget(read)

    def _forget(self, read: DeviceRead) -> None:
        if read.wanted:
            del self._reads[read.identity, read.landers]
        del self._by_number[read.read]
        drop: ToLander = DropEntry(read.read)
        for lander in read.landers:
            self._sessions.send(lander, drop)


def _half_of(now: float, give_up_at: float) -> float:
    """What is left of a want's time after that is for the arena."""
    return now + (give_up_at - now) / 2
