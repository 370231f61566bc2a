"""First contact with a peer, before a request needs it.

Owns one tiny READ per peer that has just become readable. Wiring up a connection takes tens of milliseconds and both
ends' help; done here, no fetch pays for it. Nobody looks at the bytes.
"""

from __future__ import annotations

import logging

from ec_p2p.node.peers import KNOCK_S, Peer, Peers
from ec_p2p.transport.interface import Reading, Span, State, Transport, TransportError

logger = logging.getLogger(__name__)

_BYTES = 64


class FirstContacts:
    """READs of a few bytes, for the sake of the connection. `scratch` is an arena offset that nothing else uses."""

    def __init__(self, transport: Transport, peers: Peers, scratch: int) -> None:
        self._transport = transport
        self._peers = peers
        self._scratch = scratch
        self._readings: list[tuple[Reading, Peer, float]] = []

    def __len__(self) -> int:
        return len(self._readings)

    def begin(self, peer: Peer, now: float) -> None:
        if peer.registered < _BYTES:
            return
        self._peers.knock(peer)
        try:
            reading = self._transport.read(peer.key, (Span(0, self._scratch, _BYTES),))
        except TransportError as error:
            logger.info("first contact with %s: %s", peer.info.name, error)
            return
        self._readings.append((reading, peer, now + KNOCK_S))

    def progress(self, now: float) -> None:
        self._readings = [contact for contact in self._readings if not self._ended(*contact, now)]

    def close(self) -> None:
        for reading, _, _ in self._readings:
            reading.release()
        self._readings.clear()

    def _ended(self, reading: Reading, peer: Peer, until: float, now: float) -> bool:
        state = reading.poll()
        if state is State.POSTED and now < until:
            return False
        if state is State.DONE:
            logger.info("connected to node %s", peer.info.name)
        else:
            logger.info("no connection to node %s yet; the first fetch makes one", peer.info.name)
        # Kept until the library lets go, although nobody waits any more: the scratch bytes stay its own.
        return reading.release()
