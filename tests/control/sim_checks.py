"""What must be true of a simulated fleet, whatever happens to it: see `docs/protocol.md`.

The bounds are those of that text; all seconds, with the settings of `sim_parties`.
"""

from __future__ import annotations

from ec_p2p.control.codec import decode
from ec_p2p.control.messages import Advert, Changed, Events, InstanceInfo, NodeInfo, NodeUp

from .sim_fleet import CONNECTED_S, Fleet
from .sim_parties import HEARTBEAT_S, KEYS, TIMEOUT_S, Follower, Host, Node

ASKED_S = 10.0
"""A replica that was not answered before asks again."""
BOUND_S = CONNECTED_S + ASKED_S + TIMEOUT_S + 2 * HEARTBEAT_S
"""After the last harm: everybody is connected, has told or asked, and doubts nothing any more."""
DEAD_S = 5.0
"""A node that is not heard any more is gone from every replica."""
AT_ONCE_S = 0.3
"""Several messages, one after the other."""

Known = tuple[NodeInfo, dict[bytes, Advert], list[InstanceInfo]]
State = dict[bytes, Known]


class Checks:
    """Looks on from the fleet's beginning. Every method raises AssertionError for what must never be."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.network = fleet.network
        self.history: dict[tuple[bytes, int], State] = {}
        self.latest: dict[bytes, State] = {}
        self._position: dict[tuple[int, str], tuple[bytes, int] | None] = {}
        self._held: dict[tuple[int, str], set[tuple[bytes, bytes, int]]] = {}
        self._gone: dict[tuple[int, str], set[tuple[bytes, bytes, int]]] = {}
        self._found: dict[int, dict[tuple[bytes, bytes], float]] = {}
        self.lookups_must_not_fail = False
        self.network.published = self.published
        fleet.followed = self.followed

    def published(self, frames: list[bytes]) -> None:
        """Note what a directory says its state is, before anything is lost."""
        message: Events = decode(frames[2], Events)
        seq = int.from_bytes(frames[1], "big")
        state = dict(self.latest.setdefault(message.epoch, {}))
        for event in message.events:
            if isinstance(event, NodeUp):
                state[event.node.incarnation] = (event.node, {}, [])
            elif isinstance(event, Changed):
                info, adverts, instances = state[event.incarnation]
                adverts = {key: value for key, value in adverts.items() if key not in event.withdrawn}
                adverts.update({advert.identity: advert for advert in event.adverts})
                state[event.incarnation] = (
                    info,
                    adverts,
                    instances if event.instances is None else event.instances,
                )
            else:
                del state[event.incarnation]
        self.latest[message.epoch] = self.history[message.epoch, seq] = state

    def followed(self, follower: Follower) -> None:
        """After every turn of whoever follows."""
        view = follower.view
        for replica in view.replicas:
            key = (id(follower), replica.endpoint)
            if replica.position is not None and (follower.touched or replica.position != self._position.get(key)):
                self._is_right(replica)
            self._position[key] = replica.position
            if follower.touched:
                self._nothing_comes_back(key, replica)
        if follower.touched:
            follower.touched = False
            found = {key: {node.incarnation: advert for node, advert in view.lookup(key)} for key in KEYS}
            assert found == follower.told, "a change was not told"
            assert {node.incarnation: node for node in view.nodes()} == follower.told_nodes, "a node was not told"
            if self.lookups_must_not_fail:
                self._nothing_is_lost(follower, found)

    def _is_right(self, replica) -> None:
        """It says what the directory said at that number, and nothing else but what it doubts."""
        expected = self.history[replica.position]
        found: State = {}
        for info in replica.nodes():
            if replica._follower.doubts_node(info.incarnation) and info.incarnation not in expected:
                continue
            doubted = replica._follower.doubted(info.incarnation)
            adverts = {advert.identity: advert for advert in replica.held_by(info.incarnation)}
            sure = {key: value for key, value in adverts.items() if key not in doubted}
            found[info.incarnation] = (info, sure, replica.instances(info.incarnation))
        assert found == expected, (replica.endpoint, replica.position)

    def _nothing_comes_back(self, key: tuple[int, str], replica) -> None:
        """What a node withdrew, and a replica knew to be withdrawn, it never says again."""
        before = self._held.get(key, set())
        held = {
            (info.incarnation, advert.identity, advert.rows)
            for info in replica.nodes()
            for advert in replica.held_by(info.incarnation)
        }
        gone = self._gone.setdefault(key, set())
        assert not held & gone, (replica.endpoint, held & gone)
        for incarnation, identity, rows in before - held:
            truth = self.fleet.lives[incarnation].held.get(identity)
            if truth is None or truth[0].rows != rows:
                gone.add((incarnation, identity, rows))
        self._held[key] = held

    def _nothing_is_lost(self, follower: Follower, found: dict[bytes, dict[bytes, Advert]]) -> None:
        """What every directory that is followed has told of is found, as long as the node lives and holds it."""
        seen = self._found.setdefault(id(follower), {})
        fresh = [replica for replica in follower.view.replicas if replica.fresh]
        for node in self.fleet.nodes.values():
            incarnation = node.life.info.incarnation
            for identity, since in node.life.since.items():
                if seen.get((incarnation, identity)) != since:
                    told = [dict(replica.lookup(identity)).get(node.life.info) for replica in fresh]
                    if told and all(advert and node.life.held_after(advert, since) for advert in told):
                        seen[incarnation, identity] = since
                elif incarnation not in found[identity]:
                    raise AssertionError(f"{follower.name} does not find {identity[:1].hex()} at {node.name}")

    # -------------------------------------------------------- with time

    def in_time(self) -> None:
        """Whoever had no trouble for long enough is right: nothing is missing, nothing is left over."""
        for follower in self.fleet.followers():
            if follower.process.paused:
                continue
            for host, replica in zip(self.fleet.hosts, follower.view.replicas, strict=True):
                calm = self.fleet.calm_since(follower, host)
                if calm + BOUND_S <= self.network.now:
                    self._is_in_time(host, replica)

    def _is_in_time(self, host: Host, replica) -> None:
        now = self.network.now
        assert replica.position is not None, replica.endpoint
        assert replica.fresh, replica.endpoint
        nodes = {info.incarnation: info for info in replica.nodes()}
        for life in self.fleet.lives.values():
            incarnation = life.info.incarnation
            left = host.name in life.left_cleanly and life.died + AT_ONCE_S <= now
            if left or self.fleet.unheard_since(life, host) + DEAD_S <= now:
                assert incarnation not in nodes, f"{life.info.name} is still there"
        for node in self.fleet.nodes.values():
            if not node.process.paused and self.fleet.calm_since(node, host) + BOUND_S <= now:
                assert node.announcers[self.fleet.hosts.index(host)].connected, node.name
                self._is_told(node, replica, now - BOUND_S)

    def _is_told(self, node: Node, replica, before: float) -> None:
        """What the node has held since `before` is there; what it has not held since is not."""
        incarnation = node.life.info.incarnation
        assert node.life.info in replica.nodes(), node.name
        found = {advert.identity: advert for advert in replica.held_by(incarnation)}
        for identity, (advert, since) in node.life.held.items():
            if since <= before:
                assert found.get(identity) == advert, node.name
        for advert in found.values():
            assert node.life.held_after(advert, before), node.name
        instances, since = node.life.instances
        if since <= before:
            assert replica.instances(incarnation) == instances

    def whole(self) -> None:
        """Nothing is harmed since the bound, and nothing has changed: all say the truth and nothing but it."""
        truth = {
            node.life.info.incarnation: (
                node.life.info,
                {key: advert for key, (advert, _) in node.life.held.items()},
                node.life.instances[0],
            )
            for node in self.fleet.nodes.values()
        }
        for follower in self.fleet.followers():
            for replica in follower.view.replicas:
                assert replica.fresh, (follower.name, replica.endpoint)
                assert replica.position is not None, (follower.name, replica.endpoint)
                assert self.history[replica.position] == truth
                found = {
                    info.incarnation: (
                        info,
                        {advert.identity: advert for advert in replica.held_by(info.incarnation)},
                        replica.instances(info.incarnation),
                    )
                    for info in replica.nodes()
                }
                assert found == truth, (follower.name, replica.endpoint)
            view = follower.view
            assert {node.incarnation: node for node in view.nodes()} == {key: known[0] for key, known in truth.items()}
            for identity in {key for _, adverts, _ in truth.values() for key in adverts}:
                holders = {node.incarnation: advert for node, advert in view.lookup(identity)}
                assert holders == {
                    incarnation: adverts[identity]
                    for incarnation, (_, adverts, _) in truth.items()
                    if identity in adverts
                }
