"""The node: one process per host, one loop, one thread.

Owns the loop's order, and when the node ends. Nothing here blocks but the one poll at the head of a turn, and that only
while nothing is in flight.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from ec_p2p.config import Config
from ec_p2p.node import figures
from ec_p2p.node.loop import Loop, Part
from ec_p2p.node.wiring import Wiring

logger = logging.getLogger(__name__)


class Node:
    """A host's node. `run` is its life; `stop` may be called from a signal handler or another thread.

    `spawned` nodes leave when they have had no client for `grace_s`. Raises AlreadyRunning if the name is taken,
    OSError or TransportError if the machine cannot give what the configuration asks for.
    """

    def __init__(self, config: Config, *, spawned: bool = False) -> None:
        self.config = config
        self._spawned = spawned
        self._stopping = False
        self._closed = False
        self._lonely_since = float("inf")
        self.wiring = Wiring(config, watch_again=lambda: self._loop.watch_again())
        try:
            self._loop = Loop(self._parts(), on_error=lambda: self.wiring.counters.add("errors"))
        except BaseException:
            self.wiring.close()
            raise

    def run(self) -> None:
        """Serve until `stop`, or until a spawned node has been lonely for long enough; then close."""
        wired = self.wiring
        logger.info(
            "node %s: incarnation %s, transport %s, peers at %s, arena %d MiB, %s",
            self.config.name,
            wired.info.incarnation.hex()[:8],
            wired.transport.kind,
            wired.info.address,
            wired.arena.nbytes >> 20,
            figures.where(wired.metrics.port),
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
            self.wiring.close()

    # -------------------------------------------------------- inside

    def _parts(self) -> list[Part]:
        """In the order of their ticks and turns: first what brings news, then who waits for it, last who tells it."""
        wired = self.wiring
        return [
            Part("mailbox", lambda: [wired.mailbox.fd], lambda _: wired.mailbox.run()),
            Part(
                "transport",
                wired.transport.sockets,
                lambda _: wired.transport.progress(),
                tick=lambda now: wired.transport.progress(),
            ),
            Part(
                "fetches",
                tick=wired.fetches.progress,
                turn=wired.fetches.turn,
                deadlines=wired.fetches.deadlines,
                # A transport with sockets wakes the poll; one without has to be asked.
                unheard_since=lambda: 0.0 if wired.transport.sockets() else wired.fetches.newest_transfer_at,
            ),
            Part(
                "staging",
                tick=wired.staging.progress,
                turn=wired.staging.turn,
                deadlines=wired.staging.deadlines,
            ),
            Part("device reads", tick=wired.device_reads.tick, deadlines=wired.device_reads.deadlines),
            Part("memory", turn=wired.memory.progress, deadlines=wired.memory.deadlines),
            Part("clients", wired.sessions.poll_targets, self._hear_client, tick=wired.sessions.tick),
            Part("peers", wired.peers.poll_targets, wired.peers.on_ready, tick=wired.peers.tick),
            Part("wants", tick=wired.wants.tick, deadlines=wired.wants.deadlines, turn=wired.wants.turn),
            Part("saving", tick=wired.saving.tick),
            Part("life", tick=self._leave_if_lonely),
            Part("peer counts", tick=wired.peer_counts.tick),
            Part("pulse", tick=lambda now: wired.pulse.beat()),
            Part(
                "directory",
                wired.links.poll_targets,
                wired.links.on_ready,
                tick=wired.links.tick,
                turn=wired.links.flush,
                deadlines=lambda: [wired.links.next_tick(0.0)],
            ),
            Part("answers", turn=wired.sessions.flush, tick=wired.sessions.flush),
        ]

    def _hear_client(self, target: Any) -> None:
        if self.wiring.sessions.on_ready(target):
            self._loop.watch_again()
            self.wiring.clients.tell_instances()

    def _leave_if_lonely(self, now: float) -> None:
        if self.wiring.sessions:
            self._lonely_since = now
        elif self._spawned and now - self._lonely_since >= self.config.grace_s:
            logger.info("no client for %.0f s", self.config.grace_s)
            self._stopping = True
