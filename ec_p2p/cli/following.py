"""How a command comes to know what the directories know: it follows them, as a node does, for as long as it runs.

Owns the ZMQ context and the view of the directories. It announces nothing: no directory, and no node, knows of it.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from typing import Any

import zmq

from ec_p2p.cli.settings import ORIGIN, add_arguments, settings_of
from ec_p2p.config import Config, ConfigError
from ec_p2p.config_sources import explain_ec_engine_config
from ec_p2p.control.sockets import new_context
from ec_p2p.control.view import View
from ec_p2p.keys import load_security

_OTHERS_S = 1.0
"""Once one directory is followed, the others are not waited for in silence longer than this."""
_AT_MOST = 20
"""Times the timeout: a fleet whose snapshots never get through must not be waited for forever."""
_TURN_S = 0.1


class NoDirectory(Exception):
    """No directory answers. The text names those that were asked."""


def add_following_arguments(parser: argparse.ArgumentParser) -> None:
    """Which directories, and how long to wait for them."""
    add_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="wait so long for one that says nothing (default: %(default)s)",
    )


def config_of(args: argparse.Namespace) -> Config:
    """The configuration, from all sources. Raises ConfigError. What is logged from now on goes to stderr."""
    logging.basicConfig(level=logging.WARNING, format=f"ec-p2p {args.command}: %(message)s", stream=sys.stderr)
    if not 0 < args.timeout < math.inf:
        raise ConfigError(f"--timeout={args.timeout!r}; accepted: a positive number of seconds")
    return explain_ec_engine_config(settings_of(args), origin=ORIGIN).config


class Following:
    """Follows all directories of `config`. One thread's; ends with `close`."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for keys, or a kind of directory, that cannot be used here."""
        self._security = load_security(config)
        self._context = new_context()
        try:
            self.view = View(
                self._context, config.directories, node_timeout_s=config.node_timeout_s, security=self._security
            )
        except ValueError as error:
            self._context.destroy(linger=0)
            raise ConfigError(str(error)) from None
        self._poller = zmq.Poller()
        for socket in self.view.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.view.close()
        self._context.term()

    def listen_to(self, descriptor: int) -> None:
        """Also wake up, in `turn`, for this one."""
        self._poller.register(descriptor, zmq.POLLIN)

    def turn(self, longest_s: float) -> set[Any]:
        """Wait for news of the directories, at most so long, and take it in. Returns what could be read."""
        wait_s = min(longest_s, self.view.tick(time.monotonic()))
        ready = {target for target, _ in self._poller.poll(math.ceil(max(0.0, wait_s) * 1000))}
        for socket in ready.intersection(self.view.sockets):
            self.view.on_readable(socket)
        return ready

    @property
    def followed(self) -> int:
        """How many directories the view is in step with."""
        return sum(replica.fresh for replica in self.view.replicas)

    def catch_up(self, timeout_s: float) -> list[str]:
        """Return once the view is what the directories know; then the endpoints of those that do not answer.

        Waits as long as a directory goes on telling what it knows, `timeout_s` for one that says nothing, and less for
        the others once one is followed. Raises NoDirectory when there is none.
        """
        started = moved = time.monotonic()
        answered: set[str] = set()
        known: list[int] = []
        while True:
            now = time.monotonic()
            answered |= {replica.endpoint for replica in self.view.replicas if replica.position is not None}
            told = [len(replica) + replica.fresh for replica in self.view.replicas]
            if told != known:
                known, moved = told, now
            if all(replica.fresh for replica in self.view.replicas):
                return []
            patience_s = min(_OTHERS_S, timeout_s) if self.view.fresh else timeout_s
            if now - moved > patience_s or now - started > _AT_MOST * timeout_s:
                break
            self.turn(min(_TURN_S, patience_s))
        silent = [replica.endpoint for replica in self.view.replicas if not replica.fresh]
        if not self.view.fresh:
            if not answered:
                locked = " with these keys" if self._security else ""
                raise NoDirectory(f"no directory answered{locked} within {timeout_s:g} s at {', '.join(silent)}")
            endpoints = ", ".join(sorted(answered))
            raise NoDirectory(f"what {endpoints} publishes did not arrive within {timeout_s:g} s: is that port open?")
        return silent
