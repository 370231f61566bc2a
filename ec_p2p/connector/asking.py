"""The scheduler's conversation with the node: what it was asked, what it answered, which leases are ours.

Owns wants. It must never count on an answer: the node may be slow, frozen, gone or another one, and each of these is an
event like others. Wants and leases carry the incarnation they belong to; nothing is said of one to another node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ec_p2p.config import Config
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.leases import Lease, Leases
from ec_p2p.connector.request_state import Event, Item, RequestRecord, State
from ec_p2p.node.client import Detached, NodeClient
from ec_p2p.node.messages import OUT_OF_TIME, FromNode, Landed, Missing, Saved, SaveSkipped, WantItem
from ec_p2p.node.tensors import Place

GRACE_S = 1.0
"""The node keeps a want's deadline itself; this much later we stop believing that it lives."""
RETRY_S = 0.1
"""Between two tries for an item without media that may yet turn up."""
RECONSIDER_S = 1.0
"""A no for want of time or memory that is older than this when it first matters to an item without media is outdated:
the request has queued for other reasons meanwhile."""
ON_ITS_WAY_S = 1.0
"""An output that is encoded now may not have reached the node for this long: a no to a check says nothing about it."""
REMEMBERED = 65536
"""Identities of which we remember what the node has last said."""
OPEN_CHECKS = 64
"""A node that owes this many answers to checks is asked no more of them."""


class _Want:
    """One want at one node. `check`: vLLM has the items, so nobody waits for the answer."""

    __slots__ = ("check", "forgotten", "incarnation", "items", "unanswered")

    def __init__(self, incarnation: bytes, items: Sequence[Item], check: bool) -> None:
        self.incarnation = incarnation
        self.items = list(items)
        self.check = check
        self.unanswered = len(items)
        self.forgotten = False


class Asking:
    """All wants and undispatched leases of one scheduler. Used by its thread only."""

    def __init__(
        self,
        client: NodeClient,
        config: Config,
        counts: Counts,
        *,
        readers: int,
        fetches: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._counts = counts
        self._readers = readers
        self._fetches = fetches
        self._clock = clock
        self._wants: dict[int, _Want] = {}
        self._leases = Leases()
        self._held: dict[bytes, bool] = {}
        """What the node has last said of an entry: that it holds it, or that its save was skipped."""
        self._on_its_way: dict[bytes, float] = {}
        """When the encode of an entry began, oldest first, until the node says what became of it."""
        self._heard_at = clock()
        self._silent = False
        self.not_in_node: dict[str, bytes] = {}
        """Identities, by identifier, of what vLLM has and the node lacks, as checks found; the owner takes them out."""

    # -------------------------------------------------------- asking

    def ask(self, record: RequestRecord, items: Sequence[Item]) -> bool:
        """Ask for `items`; each is WANTED after it, or MISSING, or, without media and without a node, as it was.

        False if nobody was asked.
        """
        now = self._clock()
        due = [item for item in items if now >= item.retry_at]
        if not due:
            return False
        if not self._client.attach():
            self._no_node(due, now)
            return False
        for expect_s, group in (
            (0.0, [item for item in due if item.has_media and not item.hinted]),
            (self._config.expect_s, [item for item in due if item.hinted or not item.has_media]),
        ):
            if not group:
                continue
            if not self._send(record, group, expect_s=expect_s):
                self._no_node(group, now)
                continue
            for item in group:
                item.apply(Event.ASKED)
                self._set_deadline(item, now)
        return True

    def check(self, record: RequestRecord, items: Sequence[Item]) -> int:
        """Ask for what vLLM has too: for spare leases, and to learn of what the node lacks. The want's id, or 0."""
        for item in items:
            item.checked = True
        if self._silent or sum(want.check and want.unanswered > 0 for want in self._wants.values()) >= OPEN_CHECKS:
            return 0
        return self._send(record, items, expect_s=0.0, check=True) if self._client.attach() else 0

    def freed(self, item: Item) -> None:
        """vLLM keeps it no longer for its request: from now on it is waited for, with all the time that there is."""
        item.apply(Event.FREED)
        if item.state is State.WANTED:
            self._set_deadline(item, self._clock())

    def rewind(self, record: RequestRecord) -> None:
        """The request starts over. What it still waits for it waits for as before; as a new one for what vLLM had."""
        record.rewind()
        for item in record.items.values():
            if item.state is State.WANTED and not item.deadline:
                self._set_deadline(item, self._clock())

    def reconsider(self, items: Sequence[Item]) -> None:
        """Have what was missing for a passing reason, a while ago, asked for once more, where nothing else is left."""
        now = self._clock()
        for item in items:
            outdated = item.state is State.MISSING and now - item.missed_at > RECONSIDER_S
            if outdated and item.reason in OUT_OF_TIME and not (item.has_media or item.kept or item.reconsidered):
                item.apply(Event.VOIDED)
                item.reconsidered = True
                item.deadline = 0.0

    def is_unanswered(self, want: int) -> bool:
        found = self._wants.get(want)
        return found is not None and found.unanswered > 0

    def expire(self, items: Sequence[Item]) -> None:
        """Give up on answers that are later than the node itself allows."""
        now = self._clock()
        if not any(_is_overdue(item, now) for item in items):
            return
        self.hear()  # an engine that was paused has not looked: the answer may have come in time
        for item in items:
            if _is_overdue(item, now):
                self._silent = now - self._heard_at >= GRACE_S
                self._missed(item, "node_silent")

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Take in all that the node has said, after waiting at most `timeout_s` for the first of it. False: nothing."""
        messages = self._client.poll(timeout_s)
        if messages:
            self._heard_at = self._clock()
        for message in messages:
            if isinstance(message, Detached):
                self._detached(message.incarnation)
            else:
                self._take_in(message)
        return bool(messages)

    def announce(self, identities: Sequence[bytes]) -> None:
        """Tell others that these are being encoded here."""
        now = self._clock()
        self._forget_overdue_saves(now)
        if identities:
            self._client.encoding(identities)
            for identity in identities:
                self._on_its_way.pop(identity, None)
                self._on_its_way[identity] = now
                self._held.pop(identity, None)  # the node had it not, and has not said yet what becomes of it

    def is_held(self, identity: bytes) -> bool:
        """Whether the node has told us that it holds this entry. It may have evicted it since."""
        return self._held.get(identity, False)

    def knows(self, identity: bytes) -> bool:
        """Whether the node has told us what became of this entry."""
        return identity in self._held

    # -------------------------------------------------------- leases

    def serves(self, item: Item) -> bool:
        """Whether a lease is held that a load of this item can rest on."""
        return self._leases.serves(item)

    def take(self, item: Item) -> Lease | None:
        """A lease for `item`, its own or another request's, given over to the workers: only they can end it now."""
        lease = self._leases.best(item)
        if lease is None:
            return None
        self._leases.remove(lease)
        if lease.item is not item:
            lease.item.apply(Event.VOIDED)
        if lease.spare:
            self._count_landing(lease.place.nbytes, lease.source, 0.0)
        if lease.place.incarnation == self._client.incarnation:
            self._client.dispatched(lease.place.lease)
        return lease

    def release(self, item: Item) -> None:
        """Give back the item's own lease, if it has one."""
        lease = self._leases.own(item)
        if lease is not None:
            self._leases.remove(lease)
            item.apply(Event.VOIDED)
            self._release(lease.place.incarnation, lease.place.lease)

    def forget(self, record: RequestRecord) -> None:
        """The request needs nothing more: end its leases, and stop waiting for answers."""
        for item in record.items.values():
            self.release(item)
            if item.state is State.WANTED:
                item.apply(Event.VOIDED)
        for number in record.wants:
            want = self._wants.get(number)
            if want is None:
                continue
            want.forgotten = True
            if want.check and want.unanswered:
                continue  # What the node lacks is worth knowing, whoever asked.
            del self._wants[number]
            if want.unanswered and want.incarnation == self._client.incarnation:
                self._client.forget(number)
        record.wants.clear()

    # -------------------------------------------------------- inside

    def _send(self, record: RequestRecord, items: Sequence[Item], *, expect_s: float, check: bool = False) -> int:
        number = self._client.want(
            [WantItem(item.identity, item.rows, item.has_media) for item in items],
            readers=self._readers,
            wait_s=self._config.fetch_timeout_s,
            expect_s=expect_s,
            local_only=check or not self._fetches,
            landing=self._config.landing,
        )
        if number:
            self._wants[number] = _Want(self._client.incarnation, items, check)
            record.wants.append(number)
        return number

    def _set_deadline(self, item: Item, now: float) -> None:
        if item.has_media:
            # While the node is silent, nobody who can help himself waits for it; whoever asks notices when it is back.
            item.deadline = now + (0.0 if self._silent else self._config.fetch_timeout_s + GRACE_S)
        elif not item.deadline:
            item.deadline = now + self._config.fetch_timeout_s + GRACE_S

    def _no_node(self, items: Sequence[Item], now: float) -> None:
        for item in items:
            self._set_deadline(item, now)
            if item.has_media or now >= item.deadline:
                self._missed(item, "detached")

    def _missed(self, item: Item, reason: str) -> None:
        item.apply(Event.MISSED)
        item.reason, item.missed_at = reason, self._clock()
        if reason in ("deadline", "failed") and not item.kept:
            self._counts.add("fetches", "failed", "remote")

    def _take_in(self, message: FromNode) -> None:
        self._silent = False
        if isinstance(message, Landed):
            self._landed(message)
        elif isinstance(message, Missing):
            self._missing(message)
        elif isinstance(message, Saved):
            self._note(message.identity, True)
            self._counts.add("saves", "saved")
            self._counts.add("adverts")
        elif isinstance(message, SaveSkipped):
            self._note(message.identity, False)
            self._counts.add("saves", message.reason)

    def _answered(self, number: int, index: int) -> tuple[_Want, Item] | None:
        want = self._wants.get(number)
        if want is None:
            # Forgotten. The node had not read our Forget when it answered; reading it, it released the lease.
            return None
        want.unanswered -= 1
        if want.forgotten and not want.unanswered:
            del self._wants[number]
        return want, want.items[index]

    def _landed(self, landed: Landed) -> None:
        found = self._answered(landed.want, landed.index)
        if found is None:
            return
        want, item = found
        self._note(item.identity, True)
        expected = State.RESIDENT if want.check else State.WANTED
        if want.forgotten or item.state is not expected:
            self._release(want.incarnation, landed.lease)
            return
        if not _loadable(landed):
            self._release(want.incarnation, landed.lease)
            if not want.check:
                self._missed(item, "layout")
            return
        item.apply(Event.LANDED)
        place = Place.of(want.incarnation, landed)
        spare = want.check or item.kept
        self._leases.add(Lease(item, place, landed.source, spare=spare))
        if not spare:
            self._count_landing(landed.nbytes, landed.source, landed.seconds)

    def _count_landing(self, nbytes: int, source: str, seconds: float) -> None:
        self._counts.add("fetches", "landed", source)
        self._counts.add("fetched_bytes", source, amount=nbytes)
        if source == "remote" and seconds > 0:
            self._counts.observe_fetch(seconds)

    def _missing(self, missing: Missing) -> None:
        found = self._answered(missing.want, missing.index)
        if found is None:
            return
        want, item = found
        if want.check:
            self._forget_overdue_saves(self._clock())
            if missing.reason == "no_source" and item.identity not in self._on_its_way:
                self._held.pop(item.identity, None)
                self.not_in_node[item.identifier] = item.identity
        elif item.state is State.WANTED:
            now = self._clock()
            # The workers of this instance attach by themselves, some time after a new node has come up.
            passing = missing.reason == "no_readers" and now < item.deadline
            if not item.has_media and (passing or item.kept):
                item.apply(Event.VOIDED)
                item.retry_at = now + RETRY_S
            else:
                self._missed(item, missing.reason)

    def _detached(self, incarnation: bytes) -> None:
        for number, want in list(self._wants.items()):
            if want.incarnation == incarnation:
                del self._wants[number]
                for item in want.items:
                    item.checked = False
                    if item.state is State.WANTED:
                        item.apply(Event.VOIDED)
        for lease in self._leases.of(incarnation):
            self._leases.remove(lease)
            lease.item.checked = False
            lease.item.apply(Event.VOIDED)
        self._held.clear()
        self._on_its_way.clear()
        self._silent = False

    def _note(self, identity: bytes, held: bool) -> None:
        self._on_its_way.pop(identity, None)
        self._held.pop(identity, None)
        self._held[identity] = held
        if len(self._held) > REMEMBERED:
            del self._held[next(iter(self._held))]

    def _forget_overdue_saves(self, now: float) -> None:
        """A save of which nothing is heard by now may have met no node."""
        while self._on_its_way and now - next(iter(self._on_its_way.values())) >= ON_ITS_WAY_S:
            del self._on_its_way[next(iter(self._on_its_way))]

    def _release(self, incarnation: bytes, lease: int) -> None:
        if incarnation == self._client.incarnation:
            self._client.release(lease)


def _is_overdue(item: Item, now: float) -> bool:
    return item.state is State.WANTED and now >= item.deadline


def _loadable(landed: Landed) -> bool:
    """Whether a worker can make a tensor of it: a fleet may hold dtypes that this torch does not know."""
    kind = getattr(torch, landed.dtype, None)
    return isinstance(kind, torch.dtype) and landed.nbytes == landed.rows * landed.dim * kind.itemsize
