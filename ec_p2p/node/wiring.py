"""How the parts of a node are put together, and how they hear of each other.

Owns the parts: the order in which they are made and closed, and who is told of what has happened in one of them. Must
never keep anything but them: each part has its own module, and says there what it owns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable

from ec_p2p.config import Config
from ec_p2p.control.codec import BadFrame
from ec_p2p.control.directories import host_of
from ec_p2p.control.exposition import Exposition
from ec_p2p.control.messages import NodeInfo, StageAnswer, StageRequest
from ec_p2p.control.pulse import Pulse
from ec_p2p.control.security import Gate
from ec_p2p.control.sockets import new_context
from ec_p2p.engine.cpu import Entry
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Tally
from ec_p2p.keys import load_security
from ec_p2p.node import network
from ec_p2p.node.clients import Clients
from ec_p2p.node.device_reads import DeviceReads
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.fetch import Fetches
from ec_p2p.node.fetch_policy import EncodeTimes, FetchPolicy
from ec_p2p.node.leases import Leases
from ec_p2p.node.mailbox import Mailbox
from ec_p2p.node.memory import Memory
from ec_p2p.node.peer_counts import PeerCounts
from ec_p2p.node.peers import Peer, Peers
from ec_p2p.node.rates import Rates
from ec_p2p.node.registration import Registration
from ec_p2p.node.saving import Saving
from ec_p2p.node.sessions import Session, Sessions
from ec_p2p.node.sources import FleetSources
from ec_p2p.node.stage_requests import StageRequests
from ec_p2p.node.staging import Staging
from ec_p2p.node.status import Status
from ec_p2p.node.wants import Wants

logger = logging.getLogger(__name__)

_DRAIN_S = 20.0
"""How long a leaving node writes to disk what waits for it: within the 30 s that Kubernetes gives."""
_HUNG_S = 2.0
"""A loop that turns does so several times within this."""


class Wiring:
    """All that a node consists of but its loop. Belongs to the thread of that.

    `watch_again()` is called when there may be other sockets to wait for. Raises as `Node` does.

    It is closed in this order: clients are told, the fleet is told, what moves bytes ends, the disk gets what waits for
    it, and only then the memory goes, and the name, so that no second node is there beside it.
    """

    def __init__(self, config: Config, watch_again: Callable[[], None]) -> None:
        self.config = config
        self.incarnation = os.urandom(16)
        self.counters = Tally()
        self.pulse = Pulse(max(config.node_timeout_s, _HUNG_S))
        self._watch_again = watch_again
        with contextlib.ExitStack() as resources:
            self._make(resources)
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Idempotent."""
        self._resources.close()

    def _make(self, resources: contextlib.ExitStack) -> None:
        """Each part after those it needs; `resources` closes them in the opposite order."""
        config, incarnation, counters = self.config, self.incarnation, self.counters
        context = new_context()
        resources.callback(context.destroy, linger=0)
        security = load_security(config)
        advertise, bind = network.hosts(config)
        network.say_who_gets_in(security, [advertise, bind, *map(host_of, config.directories)])
        gate = resources.enter_context(Gate(context, security)) if security else None
        # The clients' address is also the lock on the node's name: taken before anything expensive.
        self.sessions = Sessions(
            config,
            lambda: self.status.attached(),
            lambda: self.arena.fd,
            lambda session, message: self.clients.on_message(session, message),
            self._on_client_gone,
            self._on_bad_frame,
        )
        resources.callback(self.sessions.close)
        self.mailbox = Mailbox()
        resources.callback(self.mailbox.close)
        self.storage = StorageManager.of(
            config,
            on_slab=lambda offset, nbytes: self.registration.on_slab(offset, nbytes),
            on_evicted=lambda entry: self.saving.evicted(entry),
            # These three from the disk tier's threads, too.
            on_unpinned=lambda entry: self.mailbox.post(self.memory.freed),
            on_filed=lambda filed: self.mailbox.post(lambda: self.saving.filed(filed.identity)),
            on_lost=lambda identity: self.mailbox.post(lambda: self.saving.lost(identity)),
        )
        resources.callback(self.storage.close, _DRAIN_S)
        self.arena, self.backend = self.storage.arena, self.storage.cpu
        self.memory = Memory(self.backend)
        self.transport = network.transport_of(config, incarnation, self.arena, context, advertise, bind, security)
        resources.callback(self.transport.close)
        self.registration = Registration(self.transport, incarnation, counters)
        # Opens the first slab: there is a card to hand out, and peers connect, before anything is stored.
        self.backend.release(self.backend.reserve(1))
        self.peers = Peers(
            context,
            self.transport,
            incarnation,
            bind,
            config.peer_port,
            self.registration.card,
            self._on_peer_ready,
            self._on_stage_request,
            self._on_stage_answer,
            self._on_bad_frame,
            security=security,
        )
        resources.callback(self.peers.close)
        address = f"tcp://{advertise}:{self.peers.port}"
        key = security.public if security else b""
        self.info = NodeInfo(incarnation, config.name, address, started_at=int(time.time()), key=key)
        self.peer_counts = PeerCounts(counters, self.peers.names)
        self.leases = Leases()
        self.staging = Staging(
            self.storage,
            self.memory,
            self.mailbox,
            counters,
            config.read_timeout_s,
            self._on_staged,
            self._on_not_staged,
            self._on_change,
            lambda identity: self.wants.wanted(identity) or self.stage_requests.wanted(identity),
        )
        resources.callback(self.staging.close)
        self.stage_requests = StageRequests(
            self.backend, self.staging, counters, config.read_timeout_s, self.peers.answer
        )
        self.rates = Rates()
        self.fetches = Fetches(
            self.memory,
            self.arena.buffer,
            self.transport,
            self.peers,
            self.rates,
            counters,
            config.read_timeout_s,
            self._on_landed,
            lambda identity, reason: self.wants.failed(identity, reason, time.monotonic()),
            lambda identity: self.wants.wanted(identity),
        )
        resources.callback(self.fetches.close)
        self.device_reads = DeviceReads(
            self.sessions,
            self.peers,
            self.rates,
            counters,
            config.read_timeout_s,
            lambda read: self.wants.landed_on_device(read),
            lambda instance, identity: self.wants.not_on_device(instance, identity, time.monotonic()),
        )
        self.links = DirectoryLinks(
            context,
            config,
            self.info,
            bind,
            on_change=self._on_change,
            on_up=self._on_peer_up,
            on_down=self._on_peer_gone,
            security=security,
        )
        resources.callback(self.links.close)
        disk = self.storage.disk
        self.encode_times = EncodeTimes()
        self.saving = Saving(
            self.backend,
            self.memory,
            self.sessions,
            self.links,
            counters,
            self.encode_times,
            # Not what can be read now, which is nothing while the disk hangs or fails: the file is there all the same,
            # and nothing would tell the fleet of it again.
            on_disk=disk.find if disk else lambda identity: None,
            on_stored=self._on_stored,
            on_change=self._on_change,
        )
        self.sources = FleetSources(
            self.info, self.links, self.peers, self.saving, self.rates, self.fetches.outstanding
        )
        self.wants = Wants(
            self.backend,
            self.staging,
            self.fetches,
            self.device_reads,
            self.leases,
            self.sources,
            FetchPolicy(config.fetch_policy, self.rates, self.encode_times),
            counters,
            self.storage.offer,
            self.sessions.send,
            self._readers_ready,
        )
        self.status = Status(
            config,
            self.info,
            self.transport,
            self.storage,
            counters,
            self.sessions,
            self.leases,
            self.wants,
            self.fetches,
            self.device_reads,
            self.encode_times,
            self.rates,
            self.staging,
            self.peers,
            self.links,
            self.pulse,
            gate,
        )
        self.metrics = Exposition(config.metrics_host, config.metrics_port, self.status.sources, self.status.health)
        resources.callback(self.metrics.close)
        self.status.metrics_port = self.metrics.port
        self.clients = Clients(
            self.sessions, self.wants, self.leases, self.device_reads, self.saving, self.links, self.status
        )
        resources.callback(self.sessions.dismiss)

    # -------------------------------------------------------- entries: those that came, those that did not

    def _on_change(self, identity: bytes) -> None:
        self.wants.changed(identity, time.monotonic())

    def _on_stored(self, entry: Entry) -> None:
        self.wants.changed(entry.identity, time.monotonic())
        self.stage_requests.staged(entry)

    def _on_landed(self, landed: list[tuple[Entry, float]]) -> None:
        self.wants.landed(landed, "remote")
        for entry, _ in landed:
            self.stage_requests.staged(entry)
            if self.config.share_fetched:
                self.saving.advertise(entry)

    def _on_staged(self, entry: Entry, started_at: float) -> None:
        self.wants.landed([(entry, started_at)], "disk")
        self.stage_requests.staged(entry)
        self.saving.advertise(entry)

    def _on_not_staged(self, identity: bytes, reason: str) -> None:
        self.stage_requests.failed(identity)
        self.wants.not_staged(identity, reason, time.monotonic())

    def _readers_ready(self, session: Session, readers: int) -> bool:
        """A scheduler may be promised an entry only when those who will copy it have mapped this arena."""
        return session.attach.kind == "tool" or self.sessions.workers_of(session.attach.instance) >= readers

    # -------------------------------------------------------- clients and peers

    def _on_client_gone(self, session: Session) -> None:
        self.clients.on_gone(session)
        self._watch_again()

    def _on_stage_request(self, route: bytes, request: StageRequest) -> None:
        self.stage_requests.ask(route, request.identities, time.monotonic())

    def _on_stage_answer(self, incarnation: bytes, answer: StageAnswer) -> None:
        self.fetches.staged(incarnation, answer.identity, answer.advert, time.monotonic())

    def _on_peer_up(self, info: NodeInfo) -> None:
        self.peers.up(info, time.monotonic())
        self._watch_again()

    def _on_peer_ready(self, peer: Peer) -> None:
        self._watch_again()  # the transport may have opened a socket
        self.fetches.peer_ready(peer, time.monotonic())

    def _on_peer_gone(self, incarnation: bytes) -> None:
        self.peers.down(incarnation)
        self.device_reads.peer_gone(incarnation)
        self.rates.forget(incarnation)
        self._watch_again()
        self.fetches.peer_gone(incarnation, time.monotonic())

    def _on_bad_frame(self, where: str, error: BadFrame) -> None:
        self.counters.add("bad_frames", socket=where)
        logger.debug("dropped a frame from a %s: %r", where, error.reason)
