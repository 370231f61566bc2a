"""`ec-p2p directory`: a directory of its own, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from types import FrameType

import zmq

from ec_p2p.control.directories import host_of
from ec_p2p.control.directory import Directory
from ec_p2p.control.directory_figures import source_of
from ec_p2p.control.exposition import Exposition
from ec_p2p.control.sockets import split_endpoint
from ec_p2p.descriptors import allow_descriptors
from ec_p2p.keys import security_of
from ec_p2p.node.network import say_who_gets_in

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("directory", help="run a directory: it tells every node who holds what")
    parser.add_argument("--bind", default="tcp://0.0.0.0:14579", help="endpoint for nodes (default: %(default)s)")
    parser.add_argument(
        "--pub-port",
        type=int,
        default=None,
        help="port on which changes are published; 0: any free one (default: the port after that of --bind)",
    )
    parser.add_argument(
        "--node-timeout",
        type=float,
        default=4.0,
        help="seconds after which a silent node is gone (default: %(default)s)",
    )
    parser.add_argument("--security", metavar="FILE", default="", help="key file: only members can connect")
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of /metrics and /healthz; 0: any free one, -1: none (default: %(default)s)",
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", metavar="HOST", help="(default: %(default)s)")
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="INFO", help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=args.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if not 0 < args.node_timeout < float("inf"):
        return _refuse(f"--node-timeout={args.node_timeout!r}; accepted: a positive number of seconds")
    if not -1 <= args.metrics_port < 65536:
        return _refuse(f"--metrics-port={args.metrics_port!r}; accepted: a port number from -1 to 65535")
    security = security_of(os.path.abspath(args.security) if args.security else "", "--security")
    try:
        pub_port = _next_port(args.bind) if args.pub_port is None else args.pub_port
        if not 0 <= pub_port < 65536:
            return _refuse(f"--pub-port={pub_port!r}; accepted: a port number from 0 to 65535")
        # Followers that wait no longer for a directory than it does for nodes must not miss it.
        heartbeat_s = min(1.0, args.node_timeout / 4)
        directory = Directory(
            args.bind, pub_port, node_timeout_s=args.node_timeout, heartbeat_s=heartbeat_s, security=security
        )
    except (ValueError, zmq.ZMQError) as error:
        return _refuse(f"--bind={args.bind!r} --pub-port={args.pub_port!r}: {error}")

    allow_descriptors()

    def stop(signum: int, frame: FrameType | None) -> None:
        directory.stop()

    say_who_gets_in(security, [host_of(directory.endpoint)])
    source = source_of(directory)
    figures = Exposition(args.metrics_host, args.metrics_port, lambda: [source], directory.pulse.health)
    with directory, figures:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print(f"directory listens on {directory.endpoint}, publishes on port {directory.pub_port}", file=sys.stderr)
        if figures.port:
            print(f"/metrics and /healthz are at {args.metrics_host}:{figures.port}", file=sys.stderr)
        directory.run()
    return 0


def _next_port(endpoint: str) -> int:
    """As an embedded directory does it. Any free port where the endpoint leaves its own open."""
    _, port = split_endpoint(endpoint)
    return int(port) + 1 if port not in ("*", "0") else 0


def _refuse(reason: str) -> int:
    print(f"ec-p2p directory: {reason}", file=sys.stderr)
    return 2
