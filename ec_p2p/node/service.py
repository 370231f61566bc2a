"""The node: one process per host, one loop, one thread.

Owns the arena and everything that is made of it, and wires the parts together; each part has its own module and says
there what it owns. Nothing here blocks but the one poll at the head of a turn, and that only while nothing is in
flight.

It leaves in this order: clients are told, the fleet is told, what moves bytes ends, the disk gets what waits for it,
and only then the memory goes, and the name, so that no second node is there beside it.
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
from ec_p2p.control.directories import host_of
from ec_p2p.control.exposition import Exposition
from ec_p2p.control.messages import NodeInfo, StageAnswer, StageRequest
from ec_p2p.control.pulse import Pulse
from ec_p2p.control.security import Gate
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
from ec_p2p.node.loop import Loop, Part
from ec_p2p.node.mailbox import Mailbox
from ec_p2p.node.memory import Memory
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
        self._pulse = Pulse(max(config.node_timeout_s, _HUNG_S))
        with contextlib.ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()
        self._loop = Loop(self._parts(), on_error=lambda: self.counters.add("errors"))

    def _open(self, resources: contextlib.ExitStack) -> None:
        """Make the parts, each after those it needs; `resources` closes them in the opposite order."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        resources.callback(self._context.destroy, linger=0)
        config = self.config
        security = load_security(config)
        advertise, bind = network.hosts(config)
        network.say_who_gets_in(security, [advertise, bind, *map(host_of, config.directories)])
        gate = resources.enter_context(Gate(self._context, security)) if security else None
        # The clients' address is also the lock on the node's name: taken before anything expensive.
        self._sessions = Sessions(
            config,
            lambda: self._status.attached(),
            lambda: self.arena.fd,
            lambda session, message: self._clients.on_message(session, message),
            self._on_client_gone,
            self._on_bad_frame,
        )
        resources.callback(self._sessions.close)
        self._mailbox = Mailbox()
        resources.callback(self._mailbox.close)
        self.storage = StorageManager.of(
            config,
            on_slab=lambda offset, nbytes: self._registration.on_slab(offset, nbytes),
            on_evicted=lambda entry: self._saving.evicted(entry),
            # These three from the disk tier's threads, too.
            on_unpinned=lambda entry: self._mailbox.post(self._memory.freed),
            on_filed=lambda filed: self._mailbox.post(lambda: self._saving.filed(filed.identity)),
            on_lost=lambda identity: self._mailbox.post(lambda: self._saving.lost(identity)),
        )
        resources.callback(self.storage.close, _DRAIN_S)
        self.arena, self.backend = self.storage.arena, self.storage.cpu
        self._memory = Memory(self.backend)
        self.transport = network.transport_of(
            config, self.incarnation, self.arena, self._context, advertise, bind, security
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
            security=security,
        )
        resources.callback(self._peers.close)
        address = f"tcp://{advertise}:{self._peers.port}"
        key = security.public if security else b""
        self.info = NodeInfo(self.incarnation, config.name, address, started_at=int(time.time()), key=key)
        self._leases = Leases()
        self._staging = Staging(
            self.storage,
            self._memory,
            self._mailbox,
            self.counters,
            config.read_timeout_s,
            self._on_staged,
            self._on_not_staged,
            self._on_change,
            lambda identity: self._wants.wanted(identity) or self._stage_requests.wanted(identity),
        )
        resources.callback(self._staging.close)
        self._stage_requests = StageRequests(
            self.backend, self._staging, self.counters, config.read_timeout_s, self._peers.answer
        )
        self._rates = Rates()
        self._fetches = Fetches(
            self._memory,
            self.arena.buffer,
            self.transport,
            self._peers,
            self._rates,
            self.counters,
            config.read_timeout_s,
            self._on_landed,
            lambda identity, reason: self._wants.failed(identity, reason, time.monotonic()),
            lambda identity: self._wants.wanted(identity),
        )
        resources.callback(self._fetches.close)
        self._device_reads = DeviceReads(
            self._sessions,
            self._peers,
            self._rates,
            self.counters,
            config.read_timeout_s,
            lambda read: self._wants.landed_on_device(read),
            lambda instance, identity: self._wants.not_on_device(instance, identity, time.monotonic()),
        )
        self._links = DirectoryLinks(
            self._context,
            config,
            self.info,
            bind,
            on_change=self._on_change,
            on_up=self._on_peer_up,
            on_down=self._on_peer_gone,
            security=security,
        )
        resources.callback(self._links.close)
        disk = self.storage.disk
        self._encode_times = EncodeTimes()
        self._saving = Saving(
            self.backend,
            self._memory,
            self._sessions,
            self._links,
            self.counters,
            self._encode_times,
            # Not what can be read now, which is nothing while the disk hangs or fails: the file is there all the same,
            # and nothing would tell the fleet of it again.
            on_disk=disk.find if disk else lambda identity: None,
            on_stored=self._on_stored,
            on_change=self._on_change,
        )
        self.sources = FleetSources(
            self.info, self._links, self._peers, self._saving, self._rates, self._fetches.outstanding
        )
        self._wants = Wants(
            self.backend,
            self._staging,
            self._fetches,
            self._device_reads,
            self._leases,
            self.sources,
            FetchPolicy(config.fetch_policy, self._rates, self._encode_times),
            self.counters,
            self.storage.offer,
            self._sessions.send,
            self._readers_ready,
        )
        self._status = Status(
            config,
            self.info,
            self.transport,
            self.storage,
            self.counters,
            self._sessions,
            self._leases,
            self._wants,
            self._fetches,
            self._device_reads,
            self._encode_times,
            self._rates,
            self._staging,
            self._peers,
            self._links,
            self._pulse,
            gate,
        )
        self._metrics = Exposition(config.metrics_host, config.metrics_port, self._status.sources, self._status.health)
        resources.callback(self._metrics.close)
        self._status.metrics_port = self._metrics.port
        self._clients = Clients(
            self._sessions, self._wants, self._leases, self._device_reads, self._saving, self._links, self._status
        )
        resources.callback(self._sessions.dismiss)

    def _parts(self) -> list[Part]:
        """In the order of their ticks and turns: first what brings news, then who waits for it, last who tells it."""
        return [
            Part("mailbox", lambda: [self._mailbox.fd], lambda _: self._mailbox.run()),
            Part(
                "transport",
                self.transport.sockets,
                lambda _: self.transport.progress(),
                tick=lambda now: self.transport.progress(),
            ),
            Part(
                "fetches",
                tick=self._fetches.progress,
                turn=self._fetches.turn,
                deadlines=self._fetches.deadlines,
                # A transport with sockets wakes the poll; one without has to be asked.
                unheard_since=lambda: 0.0 if self.transport.sockets() else self._fetches.newest_transfer_at,
            ),
            Part(
                "staging",
                tick=self._staging.progress,
                turn=self._staging.turn,
                deadlines=self._staging.deadlines,
            ),
            Part("device reads", tick=self._device_reads.tick, deadlines=self._device_reads.deadlines),
            Part("memory", turn=self._memory.progress, deadlines=self._memory.deadlines),
            Part("clients", self._sessions.poll_targets, self._hear_client, tick=self._sessions.tick),
            Part("peers", self._peers.poll_targets, self._peers.on_ready, tick=self._peers.tick),
            Part("wants", tick=self._wants.tick, deadlines=self._wants.deadlines, turn=self._wants.turn),
            Part("saving", tick=self._saving.tick),
            Part("life", tick=self._leave_if_lonely),
            Part("pulse", tick=lambda now: self._pulse.beat()),
            Part(
                "directory",
                self._links.poll_targets,
                self._links.on_ready,
                tick=self._links.tick,
                turn=self._links.flush,
                deadlines=lambda: [self._links.next_tick(0.0)],
            ),
            Part("answers", turn=self._sessions.flush, tick=self._sessions.flush),
        ]

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
        self._loop.turn()

    def close(self) -> None:
        """End every session, say goodbye, write what waits for the disk, free everything. Idempotent."""
        if not self._closed:
            self._closed = True
            logger.info("node %s leaves", self.config.name)
            self._resources.close()

    def gauge(self, name: str) -> float:
        """As /metrics has it, of those without labels."""
        return self._status.gauges()[name, ()]

    # -------------------------------------------------------- the loop's parts

    def _hear_client(self, target: Any) -> None:
        if self._sessions.on_ready(target):
            self._loop.watch_again()
            self._clients.tell_instances()

    def _leave_if_lonely(self, now: float) -> None:
        if self._sessions:
            self._lonely_since = now
        elif self._spawned and now - self._lonely_since >= self.config.grace_s:
            logger.info("no client for %.0f s", self.config.grace_s)
            self._stopping = True

    # -------------------------------------------------------- entries: those that came, those that did not

    def _on_change(self, identity: bytes) -> None:
        self._wants.changed(identity, time.monotonic())

    def _on_stored(self, entry: Entry) -> None:
        self._wants.changed(entry.identity, time.monotonic())
        self._stage_requests.staged(entry)

    def _on_landed(self, landed: list[tuple[Entry, float]]) -> None:
        self._wants.landed(landed, "remote")
        for entry, _ in landed:
            self._stage_requests.staged(entry)
            if self.config.share_fetched:
                self._saving.advertise(entry)

    def _on_staged(self, entry: Entry, started_at: float) -> None:
        self._wants.landed([(entry, started_at)], "disk")
        self._stage_requests.staged(entry)
        self._saving.advertise(entry)

    def _on_not_staged(self, identity: bytes, reason: str) -> None:
        self._stage_requests.failed(identity)
        self._wants.not_staged(identity, reason, time.monotonic())

    def _readers_ready(self, session: Session, readers: int) -> bool:
        """A scheduler may be promised an entry only when those who will copy it have mapped this arena."""
        return session.attach.kind == "tool" or self._sessions.workers_of(session.attach.instance) >= readers

    # -------------------------------------------------------- clients and peers

    def _on_client_gone(self, session: Session) -> None:
        self._clients.on_gone(session)
        self._loop.watch_again()

    def _on_stage_request(self, route: bytes, request: StageRequest) -> None:
        self._stage_requests.ask(route, request.identities, time.monotonic())

    def _on_stage_answer(self, incarnation: bytes, answer: StageAnswer) -> None:
        self._fetches.staged(incarnation, answer.identity, answer.advert, time.monotonic())

    def _on_peer_up(self, info: NodeInfo) -> None:
        self._peers.up(info, time.monotonic())
        self._loop.watch_again()

    def _on_peer_ready(self, peer: Peer) -> None:
        self._loop.watch_again()  # the transport may have opened a socket
        self._fetches.peer_ready(peer, time.monotonic())

    def _on_peer_gone(self, incarnation: bytes) -> None:
        self._peers.down(incarnation)
        self._device_reads.peer_gone(incarnation)
        self._rates.forget(incarnation)
        self._loop.watch_again()
        self._fetches.peer_gone(incarnation, time.monotonic())

    def _on_bad_frame(self, where: str, error: BadFrame) -> None:
        self.counters.add("bad_frames", socket=where)
        logger.debug("dropped a frame from a %s: %r", where, error.reason)
