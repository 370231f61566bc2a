"""READs that the readers of an instance do themselves, each into the memory of its own device.

Owns which entries are, or are about to be, in the device memory of an instance's readers, and what each lander knows of
the peers. It must never decide who is promised what: that is the wants' part, to whom every READ ends once.

    (none) --bring: every reader has a lander, the holder's arena can be read--> READING
    READING --all have landed--> LANDED, --one has not, is gone, or late--> (failed)
    LANDED --the last pin is closed--> (gone)

Whatever fails here is fetched into the arena instead: a device's memory is not waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.engine.generation import RECORD_BYTES
from ec_p2p.engine.tally import Tally
from ec_p2p.node.fetch import Holder
from ec_p2p.node.messages import DropEntry, PeerCard, PeerGone, ReadEnded, ReadEntry, ToLander
from ec_p2p.node.peers import Peer, Peers, PeerState
from ec_p2p.node.rates import Rates
from ec_p2p.node.sessions import Session, Sessions


class DeviceRead:
    """One entry, for all readers of one instance."""

    __slots__ = (
        "advert",
        "deadline",
        "identity",
        "instance",
        "landers",
        "pins",
        "read",
        "source",
        "started_at",
        "unread",
    )

    def __init__(
        self,
        read: int,
        instance: str,
        identity: bytes,
        holder: Holder,
        landers: Sequence[Session],
        now: float,
        deadline: float,
    ) -> None:
        self.read = read
        self.instance = instance
        self.identity = identity
        self.source: NodeInfo = holder[0]
        self.advert: Advert = holder[1]
        self.landers = landers
        self.unread = {lander.sid for lander in landers}
        """Whose answer is still to come."""
        self.started_at = now
        self.deadline = deadline
        self.pins = 0

    @property
    def landed(self) -> bool:
        return not self.unread


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
        self._reads: dict[tuple[str, bytes], DeviceRead] = {}
        self._by_number: dict[int, DeviceRead] = {}
        self._numbers = itertools.count(1)
        self._told: dict[tuple[Session, bytes], int] = {}
        """(lander, peer) -> revision of the card that it was given."""

    def __len__(self) -> int:
        return len(self._reads)

    def __contains__(self, key: tuple[str, bytes]) -> bool:
        """Whether (instance, identity) is in the instance's devices, or on its way there."""
        return key in self._reads

    def landed(self, instance: str, identity: bytes) -> DeviceRead | None:
        read = self._reads.get((instance, identity))
        return read if read is not None and read.landed else None

    def pin(self, read: DeviceRead) -> _Pin:
        return _Pin(read, self._unpinned)

    def bring(
        self, instance: str, readers: int, identity: bytes, holders: Iterable[Holder], now: float, give_up_at: float
    ) -> bool:
        """Have every reader of the instance READ the entry. False where that cannot be done now."""
        landers = self._sessions.landers_of(instance)
        if not readers or not all(rank in landers for rank in range(readers)):
            return False
        for holder in holders:
            peer = self._readable(holder)
            if peer is not None:
                # A lander gives up on a READ by itself; this is for one that does not answer.
                deadline = min(give_up_at, now + 2 * self._read_timeout_s)
                ours = [landers[rank] for rank in range(readers)]
                read = DeviceRead(next(self._numbers), instance, identity, holder, ours, now, deadline)
                self._start(read, peer)
                return True
        return False

    def answered(self, session: Session, message: ReadEnded, now: float) -> None:
        """A lander says how its READ has ended."""
        read = self._by_number.get(message.read)
        if read is None or session.sid not in read.unread:
            return  # dropped meanwhile
        if message.reason:
            self._fail(read, message.reason)
            return
        read.unread.discard(session.sid)
        self._counters.add("device_read_bytes", read.advert.nbytes)
        if read.landed:
            self._counters.add("device_reads", outcome="landed")
            self._rates.observe(read.source.incarnation, read.advert.nbytes, read.started_at)
            with closing(self.pin(read)):
                self._on_landed(read)

    def peer_gone(self, incarnation: bytes) -> None:
        """Landers let go of it when its READs have ended."""
        for lander, peer in [key for key in self._told if key[1] == incarnation]:
            del self._told[lander, peer]
            self._sessions.send(lander, PeerGone(peer))

    def lander_gone(self, session: Session) -> None:
        for key in [key for key in self._told if key[0] is session]:
            del self._told[key]
        for read in list(self._reads.values()):
            if session.sid in read.unread:
                self._fail(read, "gone")

    def tick(self, now: float) -> None:
        for read in list(self._reads.values()):
            if now >= read.deadline and not read.landed:
                self._fail(read, "late")

    def deadlines(self) -> Iterable[float]:
        return (read.deadline for read in self._reads.values() if not read.landed)

    # -------------------------------------------------------- inside

    def _readable(self, holder: Holder) -> Peer | None:
        info, advert = holder
        peer = self._peers.get(info.incarnation)
        if (
            advert.state == EntryState.RESIDENT
            and peer is not None
            and peer.state is PeerState.READY
            and peer.covers(advert.offset, advert.nbytes)
            and peer.covers(advert.record, RECORD_BYTES)
            and not self._rates.distrusted(info.incarnation)
        ):
            return peer
        return None

    def _start(self, read: DeviceRead, peer: Peer) -> None:
        self._reads[read.instance, read.identity] = read
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
        if why not in ("no_memory", "gone"):
            self._rates.failed(read.source.incarnation)
        self._forget(read)
        self._on_failed(read.instance, read.identity)

    def _unpinned(self, read: DeviceRead) -> None:
        if not read.pins:
            self._forget(read)

    def _forget(self, read: DeviceRead) -> None:
        del self._reads[read.instance, read.identity]
        del self._by_number[read.read]
        drop: ToLander = DropEntry(read.read)
        for lander in read.landers:
            self._sessions.send(lander, drop)
