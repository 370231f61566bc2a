"""The ports that a node with these settings would listen on, each bound for a moment.

All of them at once, in the node's order and as the node does it: so they cannot be in each other's way unseen.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, closing
from typing import NamedTuple

import zmq

from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.cli.doctor.host_node import HostNode
from ec_p2p.config import Config, ConfigError
from ec_p2p.control.sockets import Context, new_context, open_socket
from ec_p2p.node.network import hosts

LOOPBACK = "127.0.0.1"


def bind_host(config: Config) -> str:
    """What the node's sockets bind to; empty where that cannot be told, of which another finding says why."""
    try:
        return hosts(config)[1]
    except ConfigError:
        return ""


class Bound(NamedTuple):
    """Why a port cannot be bound; None: it can, or need not be."""

    peer: OSError | None
    directory: OSError | None
    """Of the directory that a node here would host, where nobody else does."""
    publications: OSError | None
    """Of the same; tried where the former can be bound."""
    metrics: OSError | None


def bind(config: Config, host: HostNode) -> Bound:
    """Try all of them but those that the node which runs here has already."""
    peer, metrics = _held_by(host)
    with ExitStack() as opened:
        context = new_context()
        opened.callback(context.destroy, linger=0)
        of_peers = of_directory = of_publications = of_metrics = None
        if config.peer_port not in (0, peer):
            of_peers = _try_zmq(opened, context, bind_host(config) or LOOPBACK, config.peer_port)
        if not config.directory and config.embedded_directory:
            of_directory = _try_zmq(opened, context, config.ec_ip, config.ec_port)
            if of_directory is None:
                of_publications = _try_zmq(opened, context, config.ec_ip, publications_port(config))
        if config.metrics_port not in (-1, 0, metrics):
            of_metrics = _try_http(opened, config.metrics_host, config.metrics_port)
        return Bound(of_peers, of_directory, of_publications, of_metrics)


def peer_port(config: Config, host: HostNode, bound: Bound) -> Finding:
    at = bind_host(config) or LOOPBACK
    return _finding("peer_port", config.peer_port, at, bound.peer, host, "the node does not start")


def metrics_port(config: Config, host: HostNode, bound: Bound) -> Finding:
    if config.metrics_port == -1:
        return ok("metrics_port", "-1: there is no /metrics and no /healthz")
    lost = "the node has no /metrics and no /healthz"
    return _finding("metrics_port", config.metrics_port, config.metrics_host, bound.metrics, host, lost)


def publications_port(config: Config) -> int:
    """Where a node here would publish the changes of the directory that it hosts."""
    return config.directory_pub_port or config.ec_port + 1


def who_has(port: int) -> str:
    return f"`ss -ltnp 'sport = :{port}'` tells who has it"


def _finding(name: str, port: int, address: str, trouble: OSError | None, host: HostNode, lost: str) -> Finding:
    if not port:
        return ok(name, "0: any free one")
    if trouble is None:
        return ok(name, f"{port} is free, or this host's node has it")
    says = f"{port} cannot be bound at {address} ({trouble.strerror})"
    if host.trouble and trouble.errno == errno.EADDRINUSE:
        return note(name, f"{says}: perhaps the node that does not answer has it", who_has(port))
    mend = f"{who_has(port)}; choose another, or 0 for any free one"
    return problem(name, f"{says}: {lost}", mend)


def _held_by(host: HostNode) -> tuple[int, int]:
    """(peer_port, metrics_port) of the node that runs here; 0 for none."""
    if host.answer is None:
        return 0, 0
    node = host.answer.node
    return int(node["address"].rpartition(":")[2]), int(node["metrics_port"])


def _try_zmq(opened: ExitStack, context: Context, host: str, port: int) -> OSError | None:
    endpoint = f"tcp://{host}:{port}"
    try:
        opened.enter_context(closing(open_socket(context, zmq.ROUTER, endpoint))).bind(endpoint)
    except zmq.ZMQError as error:
        return OSError(error.errno, zmq.strerror(error.errno or 0))
    return None


def _try_http(opened: ExitStack, host: str, port: int) -> OSError | None:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        probe = opened.enter_context(closing(socket.socket(found[0][0], socket.SOCK_STREAM)))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
    except OSError as error:
        return error
    return None
