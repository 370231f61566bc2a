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
from ec_p2p.control.messages import NodeInfo
from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import Entry, LocalCPUBackend
from ec_p2p.node import network
from ec_p2p.node.counters import Counters, MetricsServer, Series, arena_gauges, flat
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.fetch import Fetch, Fetches
from ec_p2p.node.leases import Leases
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
from ec_p2p.node.pacing import Pacing
from ec_p2p.node.peers import Peer, Peers
from ec_p2p.node.registration import Registration
from ec_p2p.node.saving import Saving
from ec_p2p.node.sessions import Session, Sessions
from ec_p2p.node.sources import FleetSources
from ec_p2p.node.wants import Wants
from ec_p2p.transport import open_transport

logger = logging.getLogger(__name__)


class Node:
    """A host's node. `run` is its life; `stop` may be called from a signal handler or another thread.

    `spawned` nodes leave when they have had no client for `grace_s`. Raises AlreadyRunning if the name is taken,
    OSError or TransportError if the machine cannot give what the configuration asks for.
    """

    def __init__(self, config: Config, *, spawned: bool = False) -> None:
        self.config = config
        self.incarnation = os.urandom(16)
        self.counters = Counters()
        self._spawned = spawned
        self._stopping = False
        self._closed = False
        self._lonely_since = float("inf")
        with contextlib.ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()
        self._pacing = Pacing()
        self._poller = zmq.Poller()
        self._targets: dict[Any, Any] = {}
        self._watch_again = True

    def _open(self, resources: contextlib.ExitStack) -> None:
        """Make the parts, each after those it needs; `resources` closes them in the opposite order."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        resources.callback(self._context.destroy, linger=0)
        config = self.config
        advertise, bind = network.hosts(config)
        self.arena = Arena.create(config.max_local_cpu_size, config.slab_size)
        resources.callback(self.arena.close)
        # The clients' address is also the lock on the node's name: taken before anything expensive.
        self._sessions = Sessions(
            config, self._describe, self.arena.fd, self._on_message, self._on_client_gone, self._on_bad_frame
        )
        resources.callback(self._sessions.close)
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
        registration = Registration(self.transport, self.incarnation, self.counters)
        self.backend = LocalCPUBackend(
            self.arena, on_slab=registration.on_slab, on_evicted=lambda entry: self._saving.evicted(entry)
        )
        # Opens the first slab: there is a card to hand out, and peers connect, before anything is stored.
        self.backend.release(self.backend.reserve(1))
        self._peers = Peers(
            self._context,
            self.transport,
            self.incarnation,
            bind,
            config.peer_port,
            registration.card,
            self._on_peer_ready,
            self._on_bad_frame,
        )
        resources.callback(self._peers.close)
        self.info = NodeInfo(self.incarnation, config.name, f"tcp://{advertise}:{self._peers.port}")
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
        self._leases = Leases(on_end=lambda: self._fetches.memory_freed())
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
            on_freed=self._fetches.memory_freed,
            on_change=lambda identity: self._wants.changed(identity, time.monotonic()),
        )
        self.sources = FleetSources(self.incarnation, self._links, self._peers, self._saving)
        self._wants = Wants(
            self.backend,
            self._fetches,
            self._leases,
            self.sources,
            self.counters,
            self._sessions.send,
            self._readers_ready,
        )
        self._metrics = MetricsServer(config.metrics_host, config.metrics_port, self.counters, self._gauges)
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
        if self._watch_again:
            self._watch()
        # A transport with sockets wakes the poll; one without has to be asked.
        unheard_since = 0.0 if self.transport.sockets() else self._fetches.newest_transfer_at
        ready = self._pacing.wait(self._poller, unheard_since, self._next_deadline)
        now = time.monotonic()
        for target, _ in ready:
            self._hear(target)
        if self._fetches.transfers or self._fetches.memory_pending:
            self._fetches.progress(now)
        self._links.flush(now)
        if self._pacing.tick_due(now):
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

    def _hear(self, target: Any) -> None:
        """Handle what became readable. Whatever somebody sends, the node goes on."""
        owner = self._targets.get(target)
        try:
            if owner is self._sessions:
                self._watch_again |= self._sessions.on_ready(target)
            elif owner is self._peers:
                self._peers.on_ready(target)
            elif owner is self._links:
                self._links.on_ready(target)
            elif owner is self.transport:
                self.transport.progress()
        except Exception:
            self.counters.add("errors")
            logger.exception("an error of this node, not of its clients; going on")

    def _next_deadline(self, now: float) -> float:
        deadline = self._links.next_tick(now)
        for candidate in self._wants.deadlines():
            deadline = min(deadline, candidate)
        for candidate in self._fetches.deadlines():
            deadline = min(deadline, candidate)
        return deadline

    def _tick(self, now: float) -> None:
        self.transport.progress()
        self._fetches.progress(now)
        self._sessions.tick(now)
        self._peers.tick(now)
        self._links.tick(now)
        self._wants.tick(now)
        self._saving.tick(now)
        # Peers, directories and transports open and close sockets in their ticks; a set comparison is cheap.
        self._watch_again = True
        if self._sessions:
            self._lonely_since = now
        elif self._spawned and now - self._lonely_since >= self.config.grace_s:
            logger.info("no client for %.0f s", self.config.grace_s)
            self._stopping = True

    def _watch(self) -> None:
        self._watch_again = False
        targets: dict[Any, Any] = {}
        for owner in (self._sessions, self._peers, self._links):
            for target in owner.poll_targets():
                targets[target] = owner
        for target in self.transport.sockets():
            targets[target] = self.transport
        if targets.keys() == self._targets.keys():
            self._targets = targets
            return
        # A new poller: an old one may still hold sockets that are closed by now.
        self._targets = targets
        self._poller = zmq.Poller()
        for target in targets:
            self._poller.register(target, zmq.POLLIN)

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
        self._watch_again = True

    def _readers_ready(self, session: Session, readers: int) -> bool:
        """A scheduler may be promised an entry only when those who will copy it have mapped this arena."""
        return session.attach.kind == "tool" or self._sessions.workers_of(session.attach.instance) >= readers

    # -------------------------------------------------------- fetching

    def _on_landed(self, entry: Entry, fetch: Fetch) -> None:
        self._wants.landed(entry, fetch.started_at)
        self._fetches.memory_freed()  # where nobody leased it, it may be evicted again
        if self.config.share_fetched:
            self._saving.advertise(entry)

    def _on_peer_up(self, info: NodeInfo) -> None:
        self._peers.up(info, time.monotonic())
        self._watch_again = True

    def _on_peer_ready(self, peer: Peer) -> None:
        self._watch_again = True  # the transport may have opened a socket
        self._fetches.peer_ready(peer, time.monotonic())

    def _on_peer_gone(self, incarnation: bytes) -> None:
        self._peers.down(incarnation)
        self._watch_again = True
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

    def _gauges(self) -> dict[Series, float]:
        info = {"name": self.config.name, "incarnation": self.incarnation.hex(), "transport": self.transport.kind}
        return {
            **arena_gauges(self.backend),
            ("sessions", ()): len(self._sessions),
            ("leases", ()): len(self._leases),
            ("wants_waiting", ()): len(self._wants),
            ("fetches_in_flight", ()): len(self._fetches),
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
        return Inspection(token, node, self.counters.flat(), flat(self._gauges()), self._peers.names())
