"""Wants: requests of this host's instances for entries, until each item is answered.

Owns the wants that wait, and the order of the ways that lead to an entry. It must never move bytes: it asks `Sources`
what is where and tells `Staging` and `Fetches` to start, none of which ends before it has come back. An item is
answered exactly once, by Landed or by Missing, which `Answers` says. Where an entry may be is tried in this order:

    NEW --in the arena, right rows--> LANDED
    NEW --on this host's disk--> STAGING --staged--> LANDED, --unreadable, late--> NEW, but for this
    NEW --a node advertises it, readers have landers--> ON_DEVICE --landed--> LANDED, --failed--> NEW, but for this
    NEW --a fetch runs, or a node advertises it--> FETCHING --landed--> LANDED, --failed--> NEW, --failed again, or all
        who advertise it have just been waited for in vain--> HOPELESS
    NEW, HOPELESS --this host has a folder that others may write to--> LOOKING --looked--> as before, but for this
    NEW --somebody encodes it, or a hint promises it--> EXPECTED --stored or advertised--> NEW, --late--> MISSING
    NEW, HOPELESS --nothing of the kind--> MISSING
    NEW, EXPECTED --it can be encoded, and the policy is against fetching it--> MISSING
    any --deadline, no room for it--> MISSING

HOPELESS is NEW without the fetches that it would start, and without the waiting for more of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ec_p2p.control.messages import NodeInfo
from ec_p2p.engine.cpu import Entry, LocalCPUBackend
from ec_p2p.engine.tally import Tally
from ec_p2p.node.answers import Answers
from ec_p2p.node.device_reads import DeviceRead, DeviceReads
from ec_p2p.node.fetch import Fetches, Holder
from ec_p2p.node.fetch_policy import FetchPolicy
from ec_p2p.node.leases import Leases
from ec_p2p.node.messages import OUT_OF_TIME, FromNode, Pending, Want
from ec_p2p.node.sessions import Session
from ec_p2p.node.staging import Staging
from ec_p2p.node.waiting import Waiting, waiting_for


class Sources(Protocol):
    """Where an entry might come from, as the node knows it now."""

    def holders(self, identity: bytes) -> list[Holder]:
        """Other nodes that advertise it, best first."""
        ...

    def encoded_here(self, identity: bytes, instance: str) -> bool:
        """Whether another instance of this host has announced that it is computing it."""
        ...

    def encoders(self, identity: bytes) -> list[NodeInfo]:
        """Other nodes that advertise that it is being computed on their hosts."""
        ...

    def in_vain(self, holder: Holder) -> bool:
        """Whether to try it again would most likely bring nothing: it was waited for in vain just now, or cannot be
        read from at all."""
        ...


_FETCHES = 2
"""How many fetches of an item may fail: the holders that the first tried may be outdated. One, if those who are left
would be waited for as long again."""


class Wants:
    """All unanswered wants of one node. Used by the node's loop only. `on_used(entry)`: somebody needs it again."""

    def __init__(
        self,
        backend: LocalCPUBackend,
        staging: Staging,
        fetches: Fetches,
        device_reads: DeviceReads,
        leases: Leases,
        sources: Sources,
        policy: FetchPolicy,
        counters: Tally,
        on_used: Callable[[Entry], None],
        send: Callable[[Session, FromNode], None],
        readers_ready: Callable[[Session, int], bool],
    ) -> None:
        self._backend = backend
        self._staging = staging
        self._fetches = fetches
        self._device_reads = device_reads
        self._leases = leases
        self._sources = sources
        self._policy = policy
        self._answers = Answers(backend, device_reads, leases, counters, send)
        self._on_used = on_used
        self._send = send
        self._readers_ready = readers_ready
        self._waiting: dict[tuple[int, int], Waiting] = {}
        self._begun: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, session: Session, want: Want, now: float) -> None:
        """Answer what can be answered at once; keep the rest until it lands, fails or is late."""
        if (session.sid, want.want) in self._waiting:
            self.forget(session, want.want)  # an id that is used twice: its items must not be taken for the new ones
        waiting = waiting_for(session, want, now)
        self._waiting[session.sid, want.want] = waiting
        if not self._readers_ready(session, want.readers):
            for index in range(len(want.items)):
                self._answers.missing(waiting, index, "no_readers")
        else:
            self._begin(waiting, now)
        self._answers.await_open(waiting)
        if waiting.open:
            self._begun.append(waiting)
        self._retire(waiting)

    def turn(self, now: float) -> None:
        """Tell what is not answered at once: after everything has begun that it waits for, which is more urgent."""
        begun, self._begun = self._begun, []
        for waiting in begun:
            for index in waiting.open:
                why = self._why(waiting, index)
                self._send(waiting.session, Pending(waiting.want.want, index, why))

    def forget(self, session: Session, want: int) -> None:
        waiting = self._waiting.pop((session.sid, want), None)
        if waiting is not None:
            self._answers.forget(waiting)
        self._leases.forget_want(session.sid, want)

    def forget_session(self, session: Session) -> None:
        for sid, want in [key for key in self._waiting if key[0] == session.sid]:
            self._answers.forget(self._waiting.pop((sid, want)))
        self._leases.end_all(session.sid)

    def wanted(self, identity: bytes) -> bool:
        return self._answers.awaited(identity)

    def changed(self, identity: bytes, now: float) -> None:
        """Something about this entry is new: stored here, advertised elsewhere, or its fetch ended."""
        for waiting, index in self._answers.waiters(identity):
            self._try(waiting, index, now)
            self._retire(waiting)

    def landed(self, landed: Iterable[tuple[Entry, float]], source: str) -> None:
        """Entries, and when their fetches ('remote') or stagings ('disk') were started, have landed: everybody who
        waited gets a lease before anything else may evict one of them."""
        found: dict[Waiting, list[tuple[int, Entry, float | None]]] = {}
        for entry, started_at in landed:
            for waiting, index in self._answers.waiters(entry.identity):
                found.setdefault(waiting, []).append((index, entry, started_at))
        for waiting, items in found.items():
            self._answers.landed(waiting, items, source)
            self._retire(waiting)

    def landed_on_device(self, read: DeviceRead) -> None:
        """The readers of an instance have the entry. Whoever of it waited for that gets a lease: not a want with more
        readers, for they would not find it, nor with fewer, which has a READ of its own."""
        for waiting, index in self._answers.waiters(read.identity, read.instance):
            if index not in waiting.off_device and waiting.want.readers == read.readers:
                self._answers.landed_on_device(waiting, index, read, "remote", time.monotonic() - read.started_at)
                self._retire(waiting)

    def not_on_device(self, instance: str, identity: bytes, now: float) -> None:
        """A reader of the instance does not have it: what remains is the arena."""
        for waiting, index in self._answers.waiters(identity, instance):
            if index not in waiting.off_device:
                waiting.off_device.add(index)
                self._try(waiting, index, now)
                self._retire(waiting)

    def failed(self, identity: bytes, reason: str, now: float) -> None:
        """A fetch has failed: by its holders, which leaves other ways, or for good."""
        waiters = self._waiters_for_the_arena(identity)
        holders = self._sources.holders(identity) if waiters and reason == "failed" else []
        in_vain = bool(holders) and all(map(self._sources.in_vain, holders))
        for waiting, index in waiters:
            if reason == "failed":
                failures = _FETCHES if in_vain else waiting.failures.get(index, 0) + 1
                waiting.failures[index] = failures
                if failures == _FETCHES:
                    waiting.looked.discard(index)  # a holder may have written it there since the look before the fetch
                self._try(waiting, index, now)
            else:
                self._end_or_try(waiting, index, reason, now)
            self._retire(waiting)

    def not_staged(self, identity: bytes, reason: str, now: float) -> None:
        """A staging has failed. What is unreadable here may be elsewhere; what finds no room here never will."""
        for waiting, index in self._waiters_for_the_arena(identity):
            if reason in ("unreadable", "late"):
                self._try(waiting, index, now)
            else:
                self._end_or_try(waiting, index, reason, now)
            self._retire(waiting)

    def tick(self, now: float) -> None:
        """Answer what has waited too long."""
        for waiting in list(self._waiting.values()):
            if now >= waiting.deadline:
                for index in list(waiting.open):
                    self._answers.missing(waiting, index, "deadline")
            elif waiting.expecting and now >= waiting.expect_until:
                waiting.expecting = False
                for index in list(waiting.open):
                    self._try(waiting, index, now)
            self._retire(waiting)

    def deadlines(self) -> Iterable[float]:
        for waiting in self._waiting.values():
            yield waiting.deadline
            if waiting.expecting:
                yield waiting.expect_until

    # -------------------------------------------------------- inside

    def _begin(self, waiting: Waiting, now: float) -> None:
        """Answer what is here, and seek the rest."""
        identities = [item.identity for item in waiting.want.items]
        entries = [self._backend.peek(identity) for identity in identities]
        holders = {
            identity: self._sources.holders(identity)
            for identity, entry in zip(identities, entries, strict=True)
            if entry is None
        }
        fitting = self._refuse_what_cannot_fit(waiting, entries, identities, holders)
        # First what is here: it is leased before a fetch of the others makes room for itself.
        self._answer_here(waiting, [(index, entry) for index in fitting if (entry := entries[index]) is not None])
        absent = [
            index for index in fitting if entries[index] is None and not self._answer_from_devices(waiting, index)
        ]
        spread = len(absent) > 1 and any(len(found) > 1 for found in holders.values())
        # One of them that is wanted twice is fetched once.
        fetched: dict[bytes, list[Holder]] = {}
        for index in absent:
            identity = identities[index]
            if identity in fetched:
                continue
            # Which of several is the best depends on what was chosen for the items before.
            known = self._sources.holders(identity) if spread else holders[identity]
            found = self._seek(waiting, index, known, now)
            if found:
                fetched[identity] = found
                if spread:
                    self._fetches.plan(found[0])
        if fetched:
            self._fetches.start(fetched, now, waiting.deadline)

    def _refuse_what_cannot_fit(
        self,
        waiting: Waiting,
        entries: list[Entry | None],
        identities: list[bytes],
        holders: dict[bytes, list[Holder]],
    ) -> list[int]:
        """Indices worth trying; the others could never be in the arena together with those before them."""
        if len(identities) == 1:
            return [0]  # the fetch itself finds out
        sizes = {
            identity: entry.nbytes if entry else self._known_size(identity, holders[identity])
            for identity, entry in zip(identities, entries, strict=True)
        }
        if self._backend.fits_together(list(sizes.values())):
            return list(range(len(identities)))
        fits = dict(zip(sizes, self._backend.fit_in_order(sizes.values()), strict=True))
        fitting: list[int] = []
        for index, identity in enumerate(identities):
            if fits[identity] or not sizes[identity]:
                fitting.append(index)
            else:
                self._answers.missing(waiting, index, "too_large")
        return fitting

    def _known_size(self, identity: bytes, holders: list[Holder]) -> int:
        """Of an entry that is not in the arena; 0: none is known. Of holders that disagree the one counts that asks for
        the least: what cannot be true is found out by the fetch."""
        filed = self._staging.find(identity)
        if filed is not None:
            return filed.nbytes
        if len(holders) > 1:
            return min(advert.nbytes for _, advert in holders)
        return holders[0][1].nbytes if holders else 0

    def _try(self, waiting: Waiting, index: int, now: float) -> None:
        identity = waiting.want.items[index].identity
        entry = self._backend.peek(identity)
        if entry is not None:
            self._answer_here(waiting, [(index, entry)])
        elif not self._answer_from_devices(waiting, index):
            holders = self._seek(waiting, index, self._sources.holders(identity), now)
            if holders:
                self._fetches.start({identity: holders}, now, waiting.deadline)

    def _end_or_try(self, waiting: Waiting, index: int, reason: str, now: float) -> None:
        """A fetch or staging has ended for good. One that was out of time was so for those who had joined it: who waits
        for something else, an encode for one, has other ways left."""
        if reason in OUT_OF_TIME and now < waiting.deadline:
            self._try(waiting, index, now)
        else:
            self._answers.missing(waiting, index, reason)

    def _seek(self, waiting: Waiting, index: int, holders: list[Holder], now: float) -> list[Holder]:
        """Have the item brought, or wait for whoever makes it, or answer that there is no way. Returns those of the
        `holders` from whom it is to be fetched, which is the caller's part."""
        item = waiting.want.items[index]
        if item.identity in self._fetches:
            self._fetches.extend(item.identity, waiting.deadline)
            return []
        read = self._device_read(waiting, index)
        if read is not None:
            self._device_reads.extend(read, now, waiting.deadline)
            return []
        if self._bring_from_disk(waiting, index, now):
            return []
        failures = waiting.failures.get(index, 0)
        hopeless = failures >= _FETCHES
        if holders and not waiting.want.local_only and not hopeless:
            fitting = [holder for holder in holders if item.rows in (0, holder[1].rows)]
            against = self._policy.against(fitting) if fitting and item.can_encode else ""
            if against:
                self._answers.missing(waiting, index, against)
                return []
            if fitting and index not in waiting.off_device:
                readers = waiting.want.readers
                if self._device_reads.bring(waiting.instance, readers, item.identity, fitting, now, waiting.deadline):
                    return []
                waiting.off_device.add(index)
            if not fitting:
                self._answers.missing(waiting, index, "rows")
            return fitting
        if self._look_into_the_folder(waiting, index):
            return []
        against = "no_source" if hopeless else self._against_waiting(waiting, index)
        if against:
            self._answers.missing(waiting, index, "failed" if failures and against == "no_source" else against)
        return []

    def _answer_here(self, waiting: Waiting, found: list[tuple[int, Entry]]) -> None:
        """Answer items with their entries, which were in the arena already."""
        for _, entry in found:
            self._backend.get(entry.identity)
            self._on_used(entry)
        self._answers.landed(waiting, [(index, entry, None) for index, entry in found], "local")

    def _answer_from_devices(self, waiting: Waiting, index: int) -> bool:
        """Whether the item was answered with the entry in the devices of the readers, where it is there."""
        read = self._device_read(waiting, index)
        if read is None or not read.landed:
            return False
        self._answers.landed_on_device(waiting, index, read, "local", 0.0)
        return True

    def _device_read(self, waiting: Waiting, index: int) -> DeviceRead | None:
        """The READ that the item waits for, or can be answered with."""
        if index in waiting.off_device:
            return None
        return self._device_reads.find(waiting.instance, waiting.want.readers, waiting.want.items[index].identity)

    def _bring_from_disk(self, waiting: Waiting, index: int, now: float) -> bool:
        """Whether the item is on its way from this host's disk; once per item, since what was unreadable stays so."""
        identity = waiting.want.items[index].identity
        if index in waiting.staged and identity not in self._staging:
            return False
        if not self._staging.bring(identity, now, waiting.deadline):
            return False
        waiting.staged.add(index)
        return True

    def _look_into_the_folder(self, waiting: Waiting, index: int) -> bool:
        """Whether the item waits for a look at what others may have written; one look per item."""
        if not self._staging.can_look:
            return False
        identity = waiting.want.items[index].identity
        if index not in waiting.looked:
            waiting.looked.add(index)
            self._staging.look(identity)
        return self._staging.looking(identity)

    def _against_waiting(self, waiting: Waiting, index: int) -> str:
        """Why an item that nobody holds is not waited for; empty when it is."""
        if waiting.expecting or self._encoded_here(waiting, index):
            return ""
        item = waiting.want.items[index]
        encoders = [] if waiting.want.local_only else self._sources.encoders(item.identity)
        if not encoders:
            return "no_source"
        return self._policy.against_waiting(encoders, item.rows) if item.can_encode else ""

    def _encoded_here(self, waiting: Waiting, index: int) -> bool:
        return self._sources.encoded_here(waiting.want.items[index].identity, waiting.instance)

    def _why(self, waiting: Waiting, index: int) -> str:
        identity = waiting.want.items[index].identity
        if identity in self._fetches or self._device_read(waiting, index) is not None:
            return "fetching"
        if identity in self._staging or self._staging.looking(identity):
            return "staging"
        if self._encoded_here(waiting, index):
            return "encoding"
        return "encoding" if not waiting.want.local_only and self._sources.encoders(identity) else "expected"

    def _waiters_for_the_arena(self, identity: bytes) -> list[tuple[Waiting, int]]:
        """Those whom it concerns what becomes of the entry there: the others are about to have it on their devices."""
        return [found for found in self._answers.waiters(identity) if self._device_read(*found) is None]

    def _retire(self, waiting: Waiting) -> None:
        if not waiting.open:
            self._waiting.pop((waiting.session.sid, waiting.want.want), None)
