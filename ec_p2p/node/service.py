"""The node: one process per host, one loop, one thread.

Owns the arena and everything that is made of it, and wires the parts together; each part has its own module and says
there what it owns. Nothing here blocks but the one poll at the head of a turn, and that only while nothing is in
flight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

import zmq

from ec_p2p.config import Config
from ec_p2p.control.codec import BadFrame
from ec_p2p.control.messages import InstanceInfo, NodeInfo, StageAnswer, StageRequest
from ec_p2p.engine.cpu import Entry
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Series, Tally
from ec_p2p.node import network
from ec_p2p.node.counters import MetricsServer, flat
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.fetch import Fetch, Fetches
from ec_p2p.node.instances import instances_of
from ec_p2p.node.leases import Leases
from ec_p2p.node.loop import Loop, Part
from ec_p2p.node.mailbox import Mailbox
from ec_p2p.node.messages import (
    CLIENT_PROTOCOL_VERSION,
    Attached,
    CloseWindow,
    Commit,
    Dispatched,
    Encoding,
    Forget,
    Inspect,
    Inspection,
    OpenWindow,
    Release,
    SaveSkipped,
    Sync,
    Synced,
    ToNode,
    Want,
)
from ec_p2p.node.peers import Peer, Peers
from ec_p2p.node.registration import Registration
from ec_p2p.node.saving import Saving
from ec_p2p.node.sessions import Session, Sessions
from ec_p2p.node.sources import FleetSources
from ec_p2p.node.stage_requests import StageRequests
from ec_p2p.node.staging import Staging
from ec_p2p.node.wants import Wants
from ec_p2p.transport import open_transport

logger = logging.getLogger(__name__)

_DRAIN_S = 20.0
"""How long a leaving node writes to disk what waits for it: within the 30 s that Kubernetes gives."""


class Node:
    """A host's node. `run` is its life; `stop` may be called from a signal handler or another thread.

    `spawned` nodes leave when they have had no client for `grace_s`. Raises AlreadyRunning if the name is taken,
    OSError or TransportError if the machine cannot give what the configuration asks for.
    """

    def __init__(self, config: Config, *, spawned: bool = False) -> None:
        self.config = config
        self.incarnation = os.urandom(16)
        self.counters = Tally()
        self._spawned = spawned
        self._stopping = False
        self._closed = False
        self._lonely_since = float("inf")
        with contextlib.ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()
        parts = [
            Part(self._sessions.poll_targets, self._hear_client),
            Part(self._peers.poll_targets, self._peers.on_ready),
            Part(self._links.poll_targets, self._links.on_ready),
            Part(self.transport.sockets, lambda _: self.transport.progress()),
            Part(lambda: [self._mailbox.fd], lambda _: self._mailbox.run()),
        ]
        self._loop = Loop(parts, on_error=lambda: self.counters.add("errors"))

    def _open(self, resources: contextlib.ExitStack) -> None:
        """Make the parts, each after those it needs; `resources` closes them in the opposite order."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        resources.callback(self._context.destroy, linger=0)
        config = self.config
        advertise, bind = network.hosts(config)
        # The clients' address is also the lock on the node's name: taken before anything expensive.
        self._sessions = Sessions(
            config, self._describe, lambda: self.arena.fd, self._on_message, self._on_client_gone, self._on_bad_frame
        )
        resources.callback(self._sessions.close)
        self._mailbox = Mailbox()
        resources.callback(self._mailbox.close)
        self.storage = StorageManager.of(
            config,
            on_slab=lambda offset, nbytes: self._registration.on_slab(offset, nbytes),
            on_evicted=lambda entry: self._saving.evicted(entry),
            # These three from the disk tier's threads, too.
            on_unpinned=lambda entry: self._mailbox.post(self._memory_freed),
            on_filed=lambda filed: self._mailbox.post(lambda: self._saving.filed(filed.identity)),
            on_lost=lambda identity: self._mailbox.post(lambda: self._saving.lost(identity)),
        )
        resources.callback(self.storage.close, _DRAIN_S)
        self.arena, self.backend = self.storage.arena, self.storage.cpu
        self.transport = open_transport(
            config.transport,
            self.incarnation.hex(),
            self.arena.base,
            self.arena.nbytes,
            context=self._context,
            bind_host=bind,
            advertise_host=advertise,
        )
        resources.callback(self.transport.close)
        self._registration = Registration(self.transport, self.incarnation, self.counters)
        # Opens the first slab: there is a card to hand out, and peers connect, before anything is stored.
        self.backend.release(self.backend.reserve(1))
        self._peers = Peers(
            self._context,
            self.transport,
            self.incarnation,
            bind,
            config.peer_port,
            self._registration.card,
            self._on_peer_ready,
            self._on_stage_request,
            self._on_stage_answer,
            self._on_bad_frame,
        )
        resources.callback(self._peers.close)
        address = f"tcp://{advertise}:{self._peers.port}"
        self.info = NodeInfo(self.incarnation, config.name, address, started_at=int(time.time()))
        self._instances: list[InstanceInfo] = []
        self._links = DirectoryLinks(
            self._context,
            config,
            self.info,
            bind,
            on_change=lambda identity: self._wants.changed(identity, time.monotonic()),
            on_up=self._on_peer_up,
            on_down=self._on_peer_gone,
        )
        resources.callback(self._links.close)
        self._leases = Leases()
        self._staging = Staging(
            self.storage,
            self._mailbox,
            self.counters,
            config.read_timeout_s,
            self._on_staged,
            self._on_not_staged,
            lambda identity: self._wants.changed(identity, time.monotonic()),
        )
        resources.callback(self._staging.close)
        self._stage_requests = StageRequests(
            self.backend, self._staging, self.counters, config.read_timeout_s, self._peers.answer
        )
        self._fetches = Fetches(
            self.backend,
            self.arena.buffer,
            self.transport,
            self._peers,
            self.counters,
            config.read_timeout_s,
            self._on_landed,
            lambda identity, reason: self._wants.failed(identity, reason, time.monotonic()),
            lambda identity: self._wants.wanted(identity),
        )
        resources.callback(self._fetches.close)
        self._saving = Saving(
            self.backend,
            self._sessions,
            self._links,
            self.counters,
            # Not Staging.find, which says no while the disk hangs: the file is there all the same.
            on_disk=self.storage.find_on_disk,
            on_freed=self._memory_freed,
            on_change=lambda identity: self._wants.changed(identity, time.monotonic()),
        )
        self.sources = FleetSources(self.incarnation, self._links, self._peers, self._saving)
        self._wants = Wants(
            self.backend,
            self._staging,
            self._fetches,
            self._leases,
            self.sources,
            self.counters,
            self.storage.offer,
            self._sessions.send,
            self._readers_ready,
        )
        self._metrics = MetricsServer(config.metrics_host, config.metrics_port, self._counts, self._gauges)
        resources.callback(self._metrics.close)

    # -------------------------------------------------------- life

    def run(self) -> None:
        """Serve until `stop`, or until a spawned node has been lonely for long enough; then close."""
        logger.info(
            "node %s: incarnation %s, transport %s, peers at %s, arena %d MiB, /metrics on port %d",
            self.config.name,
            self.incarnation.hex()[:8],
            self.transport.kind,
            self.info.address,
            self.arena.nbytes >> 20,
            self._metrics.port,
        )
        # From now on: coming up may take longer than a short grace.
        self._lonely_since = time.monotonic()
        try:
            while not self._stopping:
                self.turn()
        finally:
            self.close()

    def stop(self) -> None:
        self._stopping = True

    def turn(self) -> None:
        """One turn of the loop: wait for something to do, at most until the next deadline, and do it."""
        # A transport with sockets wakes the poll; one without has to be asked.
        unheard_since = 0.0 if self.transport.sockets() else self._fetches.newest_transfer_at
        ready = self._loop.wait(unheard_since, self._next_deadline)
        now = time.monotonic()
        for target in ready:
            self._loop.hear(target)
        if self._fetches.transfers or self._fetches.memory_pending:
            self._fetches.progress(now)
        if self._staging.memory_pending:
            self._staging.progress(now)
        self._links.flush(now)
        if self._loop.tick_due(now):
            self._tick(now)

    def close(self) -> None:
        """Say goodbye, end every session, free everything. Idempotent."""
        if not self._closed:
            self._closed = True
            logger.info("node %s leaves", self.config.name)
            self._resources.close()

    @property
    def peers_ready(self) -> int:
        """How many peers' cards have been taken in."""
        return self._peers.ready_count()

    # -------------------------------------------------------- the loop's parts

    def _hear_client(self, target: Any) -> None:
        if self._sessions.on_ready(target):
            self._loop.watch_again()
            self._tell_instances()

    def _tell_instances(self) -> None:
        instances = instances_of(session.attach for session in self._sessions.all())
        if instances != self._instances:
            self._instances = instances
            self._links.describe(instances)

    def _next_deadline(self, now: float) -> float:
        deadline = self._links.next_tick(now)
        for candidate in self._wants.deadlines():
            deadline = min(deadline, candidate)
        for candidate in self._fetches.deadlines():
            deadline = min(deadline, candidate)
        for candidate in self._staging.deadlines():
            deadline = min(deadline, candidate)
        return deadline

    def _tick(self, now: float) -> None:
        self.transport.progress()
        self._fetches.progress(now)
        self._staging.progress(now)
        self._sessions.tick(now)
        self._peers.tick(now)
        self._links.tick(now)
        self._wants.tick(now)
        self._saving.tick(now)
        # Peers, directories and transports open and close sockets in their ticks; a set comparison is cheap.
        self._loop.watch_again()
        if self._sessions:
            self._lonely_since = now
        elif self._spawned and now - self._lonely_since >= self.config.grace_s:
            logger.info("no client for %.0f s", self.config.grace_s)
            self._stopping = True

    # -------------------------------------------------------- what clients say

    def _on_message(self, session: Session, message: ToNode) -> None:
        now = time.monotonic()
        match message:
            case Want():
                self._wants.start(session, message, now)
            case Forget():
                self._wants.forget(session, message.want)
            case Dispatched():
                self._leases.dispatched(message.lease, session.sid)
            case Release() if message.reader < 0:
                self._leases.drop(message.lease, session.sid)
            case Release():
                self._leases.read_by(message.lease, session.attach.instance, message.reader)
            case Encoding():
                self._saving.encoding(session, message.identities, now)
            case OpenWindow():
                self._saving.open_window(session, message)
            case CloseWindow():
                self._saving.close_window(session, message.window)
            case Commit():
                self._saving.commit(session, message)
            case SaveSkipped():
                self._saving.skipped(session, message)
            case Sync():
                self._links.flush(now)
                self._sessions.send(session, Synced(message.token))
            case Inspect():
                self._sessions.send(session, self._inspection(message.token))

    def _on_client_gone(self, session: Session) -> None:
        self._wants.forget_session(session)
        if session.attach.kind == "worker":
            self._leases.reader_gone(session.attach.instance, session.attach.rank)
        self._saving.session_gone(session)
        self._loop.watch_again()

    def _readers_ready(self, session: Session, readers: int) -> bool:
        """A scheduler may be promised an entry only when those who will copy it have mapped this arena."""
        return session.attach.kind == "tool" or self._sessions.workers_of(session.attach.instance) >= readers

    # -------------------------------------------------------- fetching and staging

    def _on_landed(self, entry: Entry, fetch: Fetch) -> None:
        self._wants.landed(entry, "remote", fetch.started_at)
        self._memory_freed()  # where nobody leased it, it may be evicted again
        if self.config.share_fetched:
            self._saving.advertise(entry)

    def _on_staged(self, entry: Entry, started_at: float) -> None:
        self._wants.landed(entry, "disk", started_at)
        self._memory_freed()
        self._stage_requests.staged(entry)
        self._saving.advertise(entry)

    def _on_not_staged(self, identity: bytes, reason: str) -> None:
        self._stage_requests.failed(identity)
        self._wants.not_staged(identity, reason, time.monotonic())
        self._memory_freed()

    def _on_stage_request(self, route: bytes, request: StageRequest) -> None:
        self._stage_requests.ask(route, request.identities, time.monotonic())

    def _on_stage_answer(self, incarnation: bytes, answer: StageAnswer) -> None:
        self._fetches.staged(incarnation, answer.identity, answer.advert, time.monotonic())

    def _memory_freed(self) -> None:
        self._fetches.memory_freed()
        self._staging.memory_freed()

    def _on_peer_up(self, info: NodeInfo) -> None:
        self._peers.up(info, time.monotonic())
        self._loop.watch_again()

    def _on_peer_ready(self, peer: Peer) -> None:
        self._loop.watch_again()  # the transport may have opened a socket
        self._fetches.peer_ready(peer, time.monotonic())

    def _on_peer_gone(self, incarnation: bytes) -> None:
        self._peers.down(incarnation)
        self._loop.watch_again()
        self._fetches.peer_gone(incarnation, time.monotonic())

    # -------------------------------------------------------- being seen

    def _on_bad_frame(self, where: str, error: BadFrame) -> None:
        self.counters.add("bad_frames", socket=where)
        logger.debug("dropped a frame from a %s: %r", where, error.reason)

    def _describe(self) -> Attached:
        return Attached(
            CLIENT_PROTOCOL_VERSION,
            self.incarnation,
            self.config.name,
            self.arena.nbytes,
            self.arena.slab_bytes,
            self.backend.largest_entry,
            self._metrics.port,
        )

    def _counts(self) -> dict[Series, float]:
        return self.counters.values() | self.storage.counts()

    def _gauges(self) -> dict[Series, float]:
        info = {"name": self.config.name, "incarnation": self.incarnation.hex(), "transport": self.transport.kind}
        return {
            **self.storage.gauges(),
            ("sessions", ()): len(self._sessions),
            ("leases", ()): len(self._leases),
            ("wants_waiting", ()): len(self._wants),
            ("fetches_in_flight", ()): len(self._fetches),
            ("stagings_in_flight", ()): len(self._staging),
            ("quarantined_bytes", ()): self._fetches.quarantined_bytes,
            ("peers_ready", ()): self._peers.ready_count(),
            ("directory_connected", ()): self._links.connected,
            ("info", tuple(info.items())): 1,
        }

    def _inspection(self, token: int) -> Inspection:
        node = {
            "incarnation": self.incarnation.hex(),
            "name": self.config.name,
            "address": self.info.address,
            "transport": self.transport.kind,
            "metrics_port": str(self._metrics.port),
            "directory": ",".join(self.config.directories),
            "pid": str(os.getpid()),
        }
        return Inspection(token, node, flat(self._counts()), flat(self._gauges()), self._peers.names())
