"""Several directories seen as one: the union of their replicas.

Owns the replicas. No consensus is needed, because an advert belongs to exactly one incarnation, which tells every
directory the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ec_p2p.control.directories import replicate
from ec_p2p.control.interface import Pollable, Replicates
from ec_p2p.control.messages import Advert, NodeInfo
from ec_p2p.control.security import Security
from ec_p2p.control.sockets import Context


class View:
    """Driven like a replica. Replicas that lost their directory do not count while another is settled, and count again
    when they are settled themselves. While none is, those that counted last go on to, and all that are fresh.

    `on_change(identity)` is called when what `lookup` says of it may have changed, up to once per directory.
    `on_node(node, up)` is called with True when a node appears or moves, with False when no directory that counts knows
    it any more.
    """

    def __init__(
        self,
        context: Context,
        endpoints: Iterable[str],
        *,
        on_change: Callable[[bytes], None] = lambda identity: None,
        on_node: Callable[[NodeInfo, bool], None] = lambda node, up: None,
        node_timeout_s: float = 4.0,
        security: Security | None = None,
    ) -> None:
        self._on_change = on_change
        self._on_node = on_node
        self._nodes: dict[bytes, NodeInfo] = {}
        self._nodes_changed = False
        self.replicas: tuple[Replicates, ...] = tuple(
            replicate(
                context,
                endpoint,
                on_change=on_change,
                on_node=self._note_node,
                node_timeout_s=node_timeout_s,
                security=security,
            )
            for endpoint in endpoints
        )
        self._counting = self.replicas
        self._owner: dict[Pollable, Replicates] = {
            socket: replica for replica in self.replicas for socket in replica.sockets
        }

    @property
    def sockets(self) -> tuple[Pollable, ...]:
        return tuple(self._owner)

    @property
    def fresh(self) -> bool:
        """At least one directory's copy is up to date."""
        return any(replica.fresh for replica in self.replicas)

    @property
    def counting(self) -> tuple[Replicates, ...]:
        """The replicas that count: `lookup` and `nodes` say what these say."""
        return self._counting

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        """Who holds the entry; of a node that two directories describe differently, the newest generation."""
        if len(self._counting) == 1:
            return self._counting[0].lookup(identity)
        newest: dict[bytes, tuple[NodeInfo, Advert]] = {}
        for replica in self._counting:
            for holder in replica.lookup(identity):
                incarnation = holder[0].incarnation
                known = newest.get(incarnation)
                if known is None or holder[1].generation > known[1].generation:
                    newest[incarnation] = holder
        return list(newest.values())

    def nodes(self) -> list[NodeInfo]:
        return list(self._nodes.values())

    def on_readable(self, socket: Pollable) -> None:
        self._owner[socket].on_readable(socket)
        self._count()

    def tick(self, now: float) -> float:
        """Seconds until the next call is wanted."""
        wait_s = min(replica.tick(now) for replica in self.replicas)
        self._count()
        return wait_s

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    def _note_node(self, node: NodeInfo, up: bool) -> None:
        self._nodes_changed = True

    def _count(self) -> None:
        """Choose the replicas that count, and tell what that, or their changes, did. What was not told, as a callback
        raised, is told at the next turn."""
        before, self._counting = self._counting, self._choose()
        if self._counting != before:
            self._nodes_changed = True
            try:
                for replica in set(self._counting) ^ set(before):
                    for identity in replica.identities():
                        self._on_change(identity)
            except BaseException:
                self._counting = before
                raise
        if self._nodes_changed:
            self._tell_nodes()
            self._nodes_changed = False

    def _choose(self) -> tuple[Replicates, ...]:
        # A copy that was lost long ago is no help: of dead nodes it knows what nobody else remembers.
        settled = {replica for replica in self.replicas if replica.settled}
        fresh = {replica for replica in self.replicas if replica.fresh}
        before = set(self._counting)
        chosen = settled | (fresh & before) if settled else fresh | before
        return tuple(replica for replica in self.replicas if replica in chosen)

    def _tell_nodes(self) -> None:
        """`_nodes` is what was told, whatever a callback makes of it."""
        known = {node.incarnation: node for replica in self._counting for node in replica.nodes()}
        for incarnation, node in list(self._nodes.items()):
            if incarnation not in known:
                del self._nodes[incarnation]
                self._on_node(node, False)
        for incarnation, node in known.items():
            if self._nodes.get(incarnation) != node:
                self._nodes[incarnation] = node
                self._on_node(node, True)
