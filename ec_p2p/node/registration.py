"""What peers may read: the slabs registered with the transport, and the card that says so.

Owns the card and its revision. Slabs are registered when they are first used, because registering for RDMA pins memory.
"""

from __future__ import annotations

import logging

from ec_p2p.control.messages import PROTOCOL_VERSION, Card
from ec_p2p.engine.extents import SlabRefused
from ec_p2p.engine.tally import Tally
from ec_p2p.transport import Transport, TransportError

logger = logging.getLogger(__name__)


class Registration:
    """`on_slab` is the backend's hook; `card` what the peers' port hands out."""

    def __init__(self, transport: Transport, incarnation: bytes, counters: Tally) -> None:
        self._transport = transport
        self._counters = counters
        self._card = Card(PROTOCOL_VERSION, incarnation, transport.kind, 0, 0, b"")

    def card(self) -> Card:
        return self._card

    def on_slab(self, offset: int, nbytes: int) -> None:
        """Raises SlabRefused where the transport cannot register it: usually the limit on locked memory."""
        try:
            self._transport.register(offset, nbytes)
        except TransportError as error:
            if not self._counters.get("slabs_refused"):
                logger.error("the arena cannot grow beyond %d MiB: %s", offset >> 20, error)
            self._counters.add("slabs_refused")
            raise SlabRefused(str(error)) from error
        card = self._card
        self._card = Card(
            card.version, card.incarnation, card.transport, card.revision + 1, offset + nbytes, self._transport.card()
        )
