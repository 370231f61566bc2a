"""The view of who holds what: nodes, their adverts, and the index from identity to holders.

Owns nothing but memory: no sockets, no clock. Must never call back for an advert that is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ec_p2p.control.messages import Advert, InstanceInfo, NodeInfo


# gc=False: the garbage collector then does not visit a dictionary of them either, however large.
class _Holder(msgspec.Struct, frozen=True, gc=False):
    """Who holds an entry. As a value of the index it is the first that appeared, with those that came after it."""

    node: NodeInfo
    advert: Advert
    others: tuple[_Holder, ...] = ()


class Table:
    """One thread's. `on_change(identity)` follows every advert that appeared, went, or became another;
    `on_node(node, up)` every node that appeared, moved or went. Both are called after the table has changed.
    """

    def __init__(self, on_change: Callable[[bytes], None], on_node: Callable[[NodeInfo, bool], None]) -> None:
        self._on_change = on_change
        self._on_node = on_node
        self._nodes: dict[bytes, NodeInfo] = {}
        self._places: dict[tuple[str, str], bytes] = {}
        self._held: dict[bytes, dict[bytes, _Holder]] = {}
        self._instances: dict[bytes, list[InstanceInfo]] = {}
        # Memory is what a lookup waits for, so all it needs hangs on one entry of one dictionary.
        self._index: dict[bytes, _Holder] = {}

    def __len__(self) -> int:
        """Adverts of all nodes."""
        return sum(map(len, self._held.values()))

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        """Holders of an entry, in the order in which their adverts came."""
        first = self._index.get(identity)
        if first is None:
            return []
        if not first.others:
            return [(first.node, first.advert)]
        return [(holder.node, holder.advert) for holder in (first, *first.others)]

    def nodes(self) -> list[NodeInfo]:
        return list(self._nodes.values())

    def identities(self) -> list[bytes]:
        """Every entry that somebody holds."""
        return list(self._index)

    def instances(self, incarnation: bytes) -> list[InstanceInfo]:
        """The vLLM engines at a node, as it told last; empty for an unknown one."""
        return self._instances.get(incarnation, [])

    def describe(self, incarnation: bytes, instances: list[InstanceInfo]) -> None:
        """These instances are at a node, from now on. Ignored for an unknown node."""
        if incarnation in self._nodes:
            self._instances[incarnation] = instances

    def held_by(self, incarnation: bytes) -> set[bytes]:
        """What a node advertises; empty for an unknown one."""
        return set(self._held.get(incarnation, ()))

    def adverts(self, incarnation: bytes) -> list[Advert]:
        """What a node advertises, in full."""
        return [holder.advert for holder in self._held.get(incarnation, {}).values()]

    def put_node(self, node: NodeInfo) -> None:
        """Know this node at this address, keeping its adverts if it was known so already.

        Another incarnation with this name and address is dead and goes.
        """
        if self._nodes.get(node.incarnation) == node:
            return
        predecessor = self._places.get((node.name, node.address))
        if predecessor is not None:
            self.drop_node(predecessor)
        self.drop_node(node.incarnation)
        self._nodes[node.incarnation] = node
        self._places[node.name, node.address] = node.incarnation
        self._held[node.incarnation] = {}
        self._on_node(node, True)

    def drop_node(self, incarnation: bytes) -> None:
        node = self._nodes.get(incarnation)
        if node is None:
            return
        self.change(incarnation, (), list(self._held[incarnation]))
        del self._nodes[incarnation], self._held[incarnation], self._places[node.name, node.address]
        self._instances.pop(incarnation, None)
        self._on_node(node, False)

    def change(self, incarnation: bytes, adverts: Iterable[Advert], withdrawn: Iterable[bytes]) -> None:
        """Withdrawals first, then adverts. Ignored for an unknown node."""
        node = self._nodes.get(incarnation)
        if node is None:
            return
        held = self._held[incarnation]
        gone = [identity for identity in withdrawn if held.pop(identity, None) is not None]
        for identity in gone:
            others = self._others(identity, node)
            if others:
                self._index[identity] = _chain(others)
            else:
                del self._index[identity]
        brought = {advert.identity: _Holder(node, advert) for advert in adverts}
        changed: Iterable[bytes] = brought
        if self._index.keys().isdisjoint(brought.keys()):
            # Nobody holds any of it yet: so a fresh replica is told of a million entries, without a loop of Python.
            held.update(brought)
            self._index.update(brought)
        else:
            changed = [identity for identity, holder in brought.items() if self._put(held, identity, holder)]
        for identity in gone:
            self._on_change(identity)
        for identity in changed:
            self._on_change(identity)

    def _put(self, held: dict[bytes, _Holder], identity: bytes, holder: _Holder) -> bool:
        """One advert of the node whose entries are `held`. False: it is as it was."""
        first = self._index.get(identity)
        if first is None or (first.node is holder.node and not first.others):
            if first is not None and first.advert == holder.advert:
                return False
            self._index[identity] = holder
        else:
            before = held.get(identity)
            if before is not None and before.advert == holder.advert:
                return False
            self._index[identity] = _chain([*self._others(identity, holder.node), holder])
        held[identity] = holder
        return True

    def _others(self, identity: bytes, node: NodeInfo) -> list[_Holder]:
        """Who but this node holds an entry, by the index."""
        first = self._index.get(identity)
        if first is None:
            return []
        return [holder for holder in (first, *first.others) if holder.node is not node]


def _chain(holders: list[_Holder]) -> _Holder:
    """Value of the index for these holders, of which there is at least one."""
    first, *others = holders
    return _Holder(first.node, first.advert, tuple(others))
