"""`ec-p2p bench`: measurements, each against its own limit in the same run."""

from __future__ import annotations

import argparse
from typing import Any

from ec_p2p.config import parse_size


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine")
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    fetch = benches.add_parser("fetch", help="fetch between two nodes, against a raw READ and a memcpy")
    fetch.add_argument("--transport", default="nixl", choices=("nixl", "zmq"))
    fetch.set_defaults(run=run_fetch)
    engine = benches.add_parser("engine", help="put, get, borrow and disk, against a memcpy and plain file I/O")
    engine.add_argument("--index-keys", type=int, default=1_000_000, help="measure an index of so many; 0: do not")
    engine.add_argument("--folder", help="where files are written and read (default: the folder for temporary files)")
    engine.set_defaults(run=run_engine)
    for bench in (fetch, engine):
        bench.add_argument("--sizes", default="64KiB,1MiB,4MiB,16MiB,64MiB", help="comma-separated payload sizes")
        bench.add_argument("--repeat", type=int, default=60, help="measurements of each kind and size")
        bench.add_argument("--json", action="store_true", help="print one JSON object (p50 figures)")
    policy = benches.add_parser("policy", help="hit ratios of the eviction policies, on a made-up trace")
    policy.add_argument("--requests", type=int, default=30_000, help="length of the trace")
    policy.add_argument("--items", type=int, default=5_000, help="size of the catalogue")
    policy.add_argument("--json", action="store_true", help="print one JSON object")
    policy.set_defaults(run=run_policy)


def run_engine(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_engine import run

    return run(_sizes(args), args.repeat, args.index_keys, args.folder, as_json=args.json)


def run_fetch(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_fetch import run

    return run(_sizes(args), args.transport, args.repeat, as_json=args.json)


def run_policy(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_policy import run

    return run(args.requests, args.items, as_json=args.json)


def _sizes(args: argparse.Namespace) -> list[int]:
    return [parse_size("--sizes", text, bare_unit=1) for text in args.sizes.split(",")]
