"""Where an entry might come from: what the directory's replica, the peers and this host's own encodes say together.

Owns the order in which holders are tried. It must never start anything.
"""

from __future__ import annotations

import zlib

from ec_p2p.control.messages import EntryState
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.fetch import Holder
from ec_p2p.node.peers import Peers, PeerState
from ec_p2p.node.saving import Saving


class FleetSources:
    """The `Sources` of a node. Used by its loop only."""

    def __init__(self, incarnation: bytes, links: DirectoryLinks, peers: Peers, saving: Saving) -> None:
        self._incarnation = incarnation
        self._links = links
        self._peers = peers
        self._saving = saving

    def holders(self, identity: bytes) -> list[Holder]:
        """Other nodes that hold the entry: those with it in memory first, those that can be read now first among them,
        each reader in an order of its own, so that a popular entry is not read from one holder only."""
        found = [
            (info, advert)
            for info, advert in self._links.lookup(identity)
            if advert.state != EntryState.PENDING and info.incarnation != self._incarnation
        ]
        if len(found) > 1:
            found.sort(key=self._rank)
        return found

    def encoded_here(self, identity: bytes, instance: str) -> bool:
        return self._saving.encoded_by_another(identity, instance)

    def encoded_elsewhere(self, identity: bytes) -> bool:
        return any(
            advert.state == EntryState.PENDING and info.incarnation != self._incarnation
            for info, advert in self._links.lookup(identity)
        )

    def _rank(self, holder: Holder) -> tuple[bool, bool, int]:
        info, advert = holder
        peer = self._peers.get(info.incarnation)
        return (
            advert.state == EntryState.DISK,
            peer is None or peer.state is not PeerState.READY,
            zlib.crc32(self._incarnation + info.incarnation),
        )
