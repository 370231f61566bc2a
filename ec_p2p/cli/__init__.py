"""The `ec-p2p` command.

Owns the list of subcommands; each lives in a module of its own that offers `add_parser` and is imported only to build
the parser, so nothing here imports torch, vllm or nixl before the subcommand needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ec_p2p import __version__
from ec_p2p.config import ConfigError


def build_parser() -> argparse.ArgumentParser:
    from ec_p2p.cli import bench, config, directory, doctor, find, keygen, ls, node, top

    parser = argparse.ArgumentParser(prog="ec-p2p", description="Peer-to-peer encoder cache for vLLM.")
    parser.add_argument("--version", action="version", version=f"ec-p2p {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (node, directory, ls, find, top, config, doctor, keygen, bench):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. Bad settings end in one line on stderr and status 2."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`); what is still buffered must not fail at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        print(f"ec-p2p: {error}", file=sys.stderr)
        return 2
    return status
