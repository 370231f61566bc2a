"""What a node tells of itself: to a client that attaches, to a tool that inspects it, and at /metrics.

Owns nothing: it asks the parts. It must never change what it looks at, and is called by the thread that serves
/metrics, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ec_p2p.config import Config
from ec_p2p.control.exposition import Source
from ec_p2p.control.messages import NodeInfo
from ec_p2p.control.pulse import Pulse
from ec_p2p.control.security import Gate
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Series, Tally
from ec_p2p.node import figures
from ec_p2p.node.counters import flat
from ec_p2p.node.device_reads import DeviceReads
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.fetch import Fetches
from ec_p2p.node.fetch_policy import EncodeTimes
from ec_p2p.node.inspection import summed_over
from ec_p2p.node.leases import Leases
from ec_p2p.node.messages import CLIENT_PROTOCOL_VERSION, Attached, Inspection
from ec_p2p.node.peers import Peers
from ec_p2p.node.rates import Rates
from ec_p2p.node.sessions import Sessions
from ec_p2p.node.staging import Staging
from ec_p2p.node.wants import Wants
from ec_p2p.transport import Transport
from ec_p2p.wire.notation import without_password


@dataclass(slots=True)
class Status:
    """The parts of one node that have something to tell."""

    config: Config
    info: NodeInfo
    transport: Transport
    storage: StorageManager
    counters: Tally
    sessions: Sessions
    leases: Leases
    wants: Wants
    fetches: Fetches
    device_reads: DeviceReads
    encode_times: EncodeTimes
    rates: Rates
    staging: Staging
    peers: Peers
    links: DirectoryLinks
    pulse: Pulse
    gate: Gate | None
    """None: there are no keys."""
    metrics_port: int = 0
    """Where /metrics is, once it is served."""

    def attached(self) -> Attached:
        return Attached(
            CLIENT_PROTOCOL_VERSION,
            self.info.incarnation,
            self.config.name,
            self.storage.arena.nbytes,
            self.storage.arena.slab_bytes,
            self.storage.cpu.largest_entry,
            self.metrics_port,
        )

    def inspection(self, token: int) -> Inspection:
        node = {
            "incarnation": self.info.incarnation.hex(),
            "name": self.config.name,
            "address": self.info.address,
            "transport": self.transport.kind,
            "metrics_port": str(self.metrics_port),
            "directory": ",".join(map(without_password, self.config.directories)),
            "pid": str(os.getpid()),
        }
        # Not by peer: it is one datagram.
        counts = summed_over("peer", self.counts(), self.counters.forgotten())
        return Inspection(token, node, flat(counts), flat(self.gauges()), self.peers.names())

    def sources(self) -> list[Source]:
        """For /metrics: this node's, and those of the directory that it hosts, if it does."""
        own = Source(figures.PREFIX, figures.TITLE, self._all_counts, self._all_gauges, figures.HELP)
        return [own, *self.links.hosted_figures]

    def health(self) -> tuple[bool, str]:
        """For /healthz. A node without a directory is well: it serves this host, and starting it anew helps nobody."""
        healthy, text = self.pulse.health()
        answering, all_of_them = self.links.connected, len(self.config.directories)
        return healthy, f"{text}\ndirectories that answer: {answering} of {all_of_them}"

    def counts(self) -> dict[Series, float]:
        """What has happened so far; what has not is left out."""
        own: dict[Series, float] = {}
        if self.gate is not None:
            own["keys_refused", ()] = self.gate.refused
        if self.transport.bad_frames:
            own["bad_frames", (("socket", "transport"),)] = self.transport.bad_frames
        return self.counters.values() | self.storage.counts() | own

    def _all_counts(self) -> dict[Series, float]:
        return {(name, ()): 0.0 for name in figures.PLAIN_COUNTS} | self.counts()

    def _all_gauges(self) -> dict[Series, float]:
        return self.gauges() | self._gauges_of_peers()

    def _gauges_of_peers(self) -> dict[Series, float]:
        """Two for each peer at most, and none of those that are gone. An inspection, which is one datagram, goes
        without."""
        found: dict[Series, float] = {}
        known = [(peer.info, of_it) for key, of_it in self.rates.measured() if (peer := self.peers.get(key))]
        for info, of_it in sorted(known, key=lambda pair: pair[0].started_at):  # of one name the newest holds
            label = (("peer", info.name),)
            if of_it.latency_s is not None:
                found["peer_latency_seconds", label] = of_it.latency_s
            if of_it.bytes_per_s is not None:
                found["peer_bytes_per_second", label] = of_it.bytes_per_s
        return found

    def gauges(self) -> dict[Series, float]:
        """What is the case now."""
        info = {
            "name": self.config.name,
            "incarnation": self.info.incarnation.hex(),
            "transport": self.transport.kind,
        }
        return {
            **self.storage.gauges(),
            ("sessions", ()): len(self.sessions),
            ("leases", ()): len(self.leases),
            ("wants_waiting", ()): len(self.wants),
            ("fetches_in_flight", ()): len(self.fetches),
            ("landers", ()): self.sessions.landers,
            ("device_entries", ()): len(self.device_reads),
            ("device_quarantined_bytes", ()): self.device_reads.quarantined_bytes,
            ("stagings_in_flight", ()): len(self.staging),
            ("quarantined_bytes", ()): self.fetches.quarantined_bytes,
            ("encode_seconds_per_row", ()): self.encode_times.seconds_per_row or 0.0,
            ("peers_ready", ()): self.peers.ready_count(),
            ("directory_connected", ()): self.links.connected,
            ("info", tuple(info.items())): 1,
        }
