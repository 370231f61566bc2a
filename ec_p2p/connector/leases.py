"""The leases that this scheduler holds and has not handed to its workers.

Owns the index by what a load needs: identifier and rows. It says nothing to the node.
"""

from __future__ import annotations

from ec_p2p.connector.request_state import Item
from ec_p2p.node.tensors import Place


class Lease:
    """A landed entry that is pinned for us. `spare`: vLLM has the item, so it is a fetch only if it is used."""

    __slots__ = ("item", "place", "source", "spare")

    def __init__(self, item: Item, place: Place, source: str, *, spare: bool) -> None:
        self.item = item
        self.place = place
        self.source = source
        self.spare = spare


class Leases:
    def __init__(self) -> None:
        self._by_need: dict[tuple[str, int], list[Lease]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_need.values()))

    def add(self, lease: Lease) -> None:
        self._by_need.setdefault(_need(lease.item), []).append(lease)

    def remove(self, lease: Lease) -> None:
        need = _need(lease.item)
        self._by_need[need].remove(lease)
        if not self._by_need[need]:
            del self._by_need[need]

    def serves(self, item: Item) -> bool:
        return self.best(item) is not None

    def best(self, item: Item) -> Lease | None:
        """One that serves the item: its own, else another request's. Who can encode takes none from who cannot."""
        leases = self._by_need.get(_need(item), [])
        others = (lease for lease in leases if lease.item.has_media or not item.has_media)
        return self.own(item) or next(others, None)

    def own(self, item: Item) -> Lease | None:
        return next((lease for lease in self._by_need.get(_need(item), ()) if lease.item is item), None)

    def of(self, incarnation: bytes) -> list[Lease]:
        return [
            lease for leases in self._by_need.values() for lease in leases if lease.place.incarnation == incarnation
        ]


def _need(item: Item) -> tuple[str, int]:
    return item.identifier, item.rows
