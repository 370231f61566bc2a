"""Which implementation speaks to a directory: chosen by the scheme of its endpoint, here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from ec_p2p.control.announcer import Announcer
from ec_p2p.control.interface import Announces, Replicates
from ec_p2p.control.messages import NodeInfo
from ec_p2p.control.replica import Replica
from ec_p2p.control.security import Security
from ec_p2p.control.sockets import Context
from ec_p2p.control.valkey_announcer import ValkeyAnnouncer
from ec_p2p.control.valkey_replica import ValkeyReplica
from ec_p2p.control.valkey_server import parse
from ec_p2p.wire.notation import without_password


def announce_to(
    context: Context,
    endpoint: str,
    node: NodeInfo,
    *,
    heartbeat_s: float = 1.0,
    timeout_s: float = 4.0,
    security: Security | None = None,
) -> Announces:
    """Tell the directory at `endpoint` what `node` holds. `security` is for ZMQ only.

    Raises ValueError for an endpoint that is none; BadEndpoint, which is one, also without the library for it.
    """
    if not is_zmq(endpoint):
        return ValkeyAnnouncer(endpoint, without_password(endpoint), node, heartbeat_s=heartbeat_s, timeout_s=timeout_s)
    return Announcer(context, endpoint, node, heartbeat_s=heartbeat_s, timeout_s=timeout_s, security=security)


def replicate(
    context: Context,
    endpoint: str,
    *,
    on_change: Callable[[bytes], None] = lambda identity: None,
    on_node: Callable[[NodeInfo, bool], None] = lambda node, up: None,
    node_timeout_s: float = 4.0,
    security: Security | None = None,
) -> Replicates:
    """Follow the directory at `endpoint`.

    `on_change(identity)` is called for every advert that appeared, changed or went, `on_node(node, up)` for every node
    that appeared, moved or went. `security` is for ZMQ only. Raises ValueError for an endpoint that is none;
    BadEndpoint, which is one, also without the library for it.
    """
    if not is_zmq(endpoint):
        return ValkeyReplica(
            endpoint, without_password(endpoint), on_change=on_change, on_node=on_node, node_timeout_s=node_timeout_s
        )
    return Replica(
        context, endpoint, on_change=on_change, on_node=on_node, node_timeout_s=node_timeout_s, security=security
    )


def check_endpoints(endpoints: Iterable[str]) -> None:
    """Raises BadEndpoint for one that cannot be used here, because it is none or a library is missing."""
    for endpoint in endpoints:
        if not is_zmq(endpoint):
            parse(endpoint)


def is_zmq(endpoint: str) -> bool:
    """Whether it is a process of this project, over ZMQ. Else it is a Valkey or Redis server."""
    return "://" not in endpoint or endpoint.startswith("tcp://")


def host_of(endpoint: str) -> str:
    """Name or address of the directory's host, without brackets."""
    return urlsplit(endpoint).hostname or ""
