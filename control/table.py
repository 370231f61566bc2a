"""The view of who holds what: nodes, their adverts, and the index from identity to holders.

Owns nothing but memory: no sockets, no clock. Must never call back for an advert that is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ec_p2p.control.messages import Advert, InstanceInfo, NodeInfo


class Table:
    """One thread's. `on_change(identity)` follows every advert that appeared, went, or became another;
    `on_node(node, up)` every node that appeared, moved or went. Both are called after the table has changed.
    """

    def __init__(self, on_change: Callable[[bytes], None], on_node: Callable[[NodeInfo, bool], None]) -> None:
        self._on_change = on_change
        self._on_node = on_node
        self._nodes: dict[bytes, NodeInfo] = {}
        self._places: dict[tuple[str, str], bytes] = {}
        self._adverts: dict[bytes, dict[bytes, Advert]] = {}
        self._instances: dict[bytes, list[InstanceInfo]] = {}
        # Tuples, so that the lookup copies nothing it must not and the collector need not visit a million of them.
        self._holders: dict[bytes, tuple[tuple[NodeInfo, Advert], ...]] = {}

    def __len__(self) -> int:
        """Adverts of all nodes."""
        return sum(map(len, self._adverts.values()))

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        """Holders of an entry, in the order they appeared."""
        return list(self._holders.get(identity, ()))

    def nodes(self) -> list[NodeInfo]:
        return list(self._nodes.values())

    def identities(self) -> list[bytes]:
        """Every entry that somebody holds."""
        return list(self._holders)

    def instances(self, incarnation: bytes) -> list[InstanceInfo]:
        """The vLLM engines at a node, as it told last; empty for an unknown one."""
        return self._instances.get(incarnation, [])

    def describe(self, incarnation: bytes, instances: list[InstanceInfo]) -> None:
        """These instances are at a node, from now on. Ignored for an unknown node."""
        if incarnation in self._nodes:
            self._instances[incarnation] = instances

    def held_by(self, incarnation: bytes) -> set[bytes]:
        """What a node advertises; empty for an unknown one."""
        return set(self._adverts.get(incarnation, ()))

    def adverts(self, incarnation: bytes) -> list[Advert]:
        """What a node advertises, in full."""
        return list(self._adverts.get(incarnation, {}).values())

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
        self._adverts[node.incarnation] = {}
        self._on_node(node, True)

    def drop_node(self, incarnation: bytes) -> None:
        node = self._nodes.get(incarnation)
        if node is None:
            return
        self.change(incarnation, (), list(self._adverts[incarnation]))
        del self._nodes[incarnation], self._adverts[incarnation], self._places[node.name, node.address]
        self._instances.pop(incarnation, None)
        self._on_node(node, False)

    def change(self, incarnation: bytes, adverts: Iterable[Advert], withdrawn: Iterable[bytes]) -> None:
        """Withdrawals first, then adverts. Ignored for an unknown node."""
        node = self._nodes.get(incarnation)
        if node is None:
            return
        known = self._adverts[incarnation]
        for identity in withdrawn:
            if known.pop(identity, None) is not None:
                self._unindex(node, identity)
                self._on_change(identity)
        for advert in adverts:
            identity = advert.identity
            before = known.get(identity)
            if before == advert:
                continue
            if before is not None:
                self._unindex(node, identity)
            known[identity] = advert
            self._holders[identity] = (*self._holders.get(identity, ()), (node, advert))
            self._on_change(identity)

    def _unindex(self, node: NodeInfo, identity: bytes) -> None:
        others = tuple(holder for holder in self._holders[identity] if holder[0] is not node)
        if others:
            self._holders[identity] = others
        else:
            del self._holders[identity]
