"""`ec-p2p top`: the fleet as it is now, again and again."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ec_p2p.cli.following import Following, NoDirectory, add_following_arguments, config_of
from ec_p2p.cli.keyboard import Keyboard, keyboard
from ec_p2p.cli.local_node import LocalNode
from ec_p2p.cli.top_figures import Figures, Look, figures_as_json, figures_of, look_at
from ec_p2p.config import Config, ConfigError

_PAUSE = 4
"""A look at a million entries takes a while: there is at least so many times as much between two."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("top", help="watch the fleet live")
    add_following_arguments(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: %(default)s)"
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after so many looks; 0: do not")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, for each look")
    parser.set_defaults(run=run, command="top")


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not 0 < args.interval < math.inf:
        raise ConfigError(f"--interval={args.interval!r}; accepted: a positive number of seconds")
    if args.count < 0:
        raise ConfigError(f"--count={args.count!r}; accepted: a number from 0")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _print(args, config) if args.json else _show(args, config)
    except KeyboardInterrupt:
        return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """As ctrl-c does it: the terminal is put back as it was."""
    raise KeyboardInterrupt


def _print(args: argparse.Namespace, config: Config) -> int:
    with Following(config) as following:
        try:
            following.catch_up(args.timeout)
        except NoDirectory as error:
            print(f"ec-p2p top: {error}", file=sys.stderr)
            return 1
        for figures in _looks(following, config, args.interval, args.count):
            print(json.dumps(figures_as_json(figures)), flush=True)
    return 0


def _show(args: argparse.Namespace, config: Config) -> int:
    if not sys.stdout.isatty():
        print("ec-p2p top: the output is no terminal; accepted: a terminal, or --json", file=sys.stderr)
        return 2
    try:
        from rich.live import Live

        from ec_p2p.cli.top_screen import noted, screen
    except ImportError as error:
        print(f"ec-p2p top: {error}; accepted: pip install 'ec-p2p[cli]', or --json", file=sys.stderr)
        return 1
    with (
        Following(config) as following,
        keyboard() as keys,
        noted() as notes,
        Live(screen=True, auto_refresh=False) as live,
    ):
        for figures in _looks(following, config, args.interval, args.count, keys):
            size = os.get_terminal_size(sys.stdout.fileno())
            live.update(screen(figures, size.columns, size.lines, notes.last), refresh=True)
    return 0


def _looks(
    following: Following, config: Config, interval_s: float, count: int, keys: Keyboard | None = None
) -> Iterator[Figures]:
    """One look each `interval_s`, and one at once when a directory has come or gone; `count` in all, if that is not 0.
    Ends, too, when a key says so."""
    if keys is not None:
        following.listen_to(keys.descriptor)
    before: Look | None = None
    due, followed = 0.0, 0
    local = LocalNode(config)
    try:
        for number in itertools.count(1):
            while (now := time.monotonic()) < due and followed == following.followed:
                ready = following.turn(due - now)
                if keys is not None and keys.descriptor in ready and keys.wants_to_end():
                    return
            local.ask(now)
            look = look_at(following.view, local.latest)
            followed = following.followed
            due = time.monotonic() + max(interval_s, _PAUSE * (time.monotonic() - look.at))
            yield figures_of(before, look)
            if number == count:
                return
            before = look
    finally:
        local.close()
