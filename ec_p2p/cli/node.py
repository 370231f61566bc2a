"""`ec-p2p node`: run the host's node, as a service or spawned by the first connector."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import sys
import tempfile
from typing import Any

from ec_p2p.cli.settings import ORIGIN, add_arguments, settings_of
from ec_p2p.config import Config, ConfigError, make_config
from ec_p2p.config_sources import explain_ec_engine_config
from ec_p2p.control.directories import check_endpoints
from ec_p2p.descriptors import allow_descriptors
from ec_p2p.keys import load_security


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("node", help="run this host's node")
    add_arguments(parser)
    parser.add_argument(
        "--exactly", action="store_true", help="take no setting from a configuration file or from the environment"
    )
    parser.add_argument(
        "--spawned", action="store_true", help="detach, and leave grace_s after the last client; implies --exactly"
    )
    parser.set_defaults(run=run)


def read_settings(args: argparse.Namespace) -> Config:
    """The configuration of this node. Raises ConfigError."""
    settings = settings_of(args)
    if args.exactly or args.spawned:
        # Whoever starts a node leaves out what is at its default: another value must not come in from elsewhere.
        return make_config(settings)
    return explain_ec_engine_config(settings, origin=ORIGIN).config


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s ec-p2p node %(levelname)s %(message)s", stream=sys.stderr
    )
    config = read_settings(args)
    logging.getLogger().setLevel(config.log_level)
    # For what is wrong with them: who starts the node is to see it.
    load_security(config)
    try:
        check_endpoints(config.directories)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    allow_descriptors()
    if args.spawned:
        _detach(config)
    import zmq

    from ec_p2p.engine.cpu import OutOfMemory
    from ec_p2p.node.listening import AlreadyRunning
    from ec_p2p.node.service import Node
    from ec_p2p.transport.interface import TransportError

    try:
        node = Node(config, spawned=args.spawned)
    except AlreadyRunning as error:
        print(f"ec-p2p node: {error}", file=sys.stderr)
        return 0 if args.spawned else 1
    except (OSError, TransportError, OutOfMemory, zmq.ZMQError) as error:
        print(f"ec-p2p node: cannot start: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    # What the node is made of lives as long as it does. To look through it took the garbage collector 5 ms, within a
    # turn of the loop.
    gc.collect()
    gc.freeze()
    node.run()
    return 0


def _detach(config: Config) -> None:
    """Leave the starter's session, process tree, cores and output, before any thread exists.

    Who starts a node must be able to die without it: vLLM kills all descendants when it stops, and whoever reads its
    output waits for the last one that may write to it.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        log = os.open(_log_path(config), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        print(f"ec-p2p node: no log in {_log_path(config)!r}: {error}", file=sys.stderr)
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _log_path(config: Config) -> str:
    if config.log_file:
        return config.log_file
    name = re.sub(r"[^\w.-]", "_", config.name)
    return os.path.join(tempfile.gettempdir(), f"ec-p2p-{os.getuid()}-{name}.log")
