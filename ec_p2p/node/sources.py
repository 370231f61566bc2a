"""Where an entry might come from: what the directory's replica, the peers and this host's own encodes say together.

Owns the order in which holders are tried. It must never start anything.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ec_p2p.control.messages import EntryState, NodeInfo
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.fetch import Holder
from ec_p2p.node.peers import Peers, PeerState
from ec_p2p.node.rates import Rates
from ec_p2p.node.saving import Saving


class _Rank(NamedTuple):
    """The lower the better, from the first to the last."""

    nbytes: int
    """Holders that disagree about an entry cannot all be right: what asks for the least memory is found out first."""
    only_on_disk: bool
    cannot_be_read_now: bool
    failed_lately: bool
    on_another_host: bool
    doublings: int
    """Of the time that the READ may take, what is in flight from there included. A holder that was not measured
    lately comes before those that were, until something is on its way from there: that is how it gets measured."""
    turn: int
    """An order of this reader's own, so that a popular entry is not read from one holder by all."""


class FleetSources:
    """The `Sources` of a node. Used by its loop only. `outstanding(incarnation)` are bytes in flight from there."""

    def __init__(
        self,
        info: NodeInfo,
        links: DirectoryLinks,
        peers: Peers,
        saving: Saving,
        rates: Rates,
        outstanding: Callable[[bytes], int],
    ) -> None:
        self._incarnation = info.incarnation
        self._host = _host(info)
        self._links = links
        self._peers = peers
        self._saving = saving
        self._rates = rates
        self._outstanding = outstanding

    def holders(self, identity: bytes) -> list[Holder]:
        """Other nodes that hold the entry, the best first."""
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

    def encoders(self, identity: bytes) -> list[NodeInfo]:
        """Other nodes on whose hosts the entry is being computed."""
        return [
            info
            for info, advert in self._links.lookup(identity)
            if advert.state == EntryState.PENDING and info.incarnation != self._incarnation
        ]

    def in_vain(self, holder: Holder) -> bool:
        incarnation = holder[0].incarnation
        peer = self._peers.get(incarnation)
        return self._rates.silent_lately(incarnation) or (peer is not None and peer.state is PeerState.UNUSABLE)

    def _rank(self, holder: Holder) -> _Rank:
        info, advert = holder
        incarnation = info.incarnation
        peer = self._peers.get(incarnation)
        outstanding = self._outstanding(incarnation)
        expected_s = self._rates.expected_s(incarnation, advert.nbytes + outstanding)
        if expected_s is None and outstanding:
            expected_s = self._rates.usual_s(advert.nbytes + outstanding)
        return _Rank(
            advert.nbytes,
            advert.state == EntryState.DISK,
            peer is None or peer.state is not PeerState.READY,
            self._rates.distrusted(incarnation),
            _host(info) != self._host,
            # Whole doublings: what differs by less is noise, and would send everybody to the same holder.
            0 if expected_s is None else max(1, math.frexp(expected_s * 1e6)[1]),
            zlib.crc32(self._incarnation + incarnation),
        )


def _host(info: NodeInfo) -> str:
    """Of 'tcp://host:port'. Nodes that advertise the same host share its memory bus, and no network lies between."""
    return info.address.rpartition(":")[0]
