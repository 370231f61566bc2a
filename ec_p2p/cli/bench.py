"""`ec-p2p bench`: measurements, each against its own limit in the same run."""

from __future__ import annotations

import argparse
from typing import Any

from ec_p2p.config import ConfigError, parse_size

_MOST_ITEMS = 256
"""What fits the message in which a client asks for them, by far."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine")
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    fetch = benches.add_parser("fetch", help="fetch between two nodes, against a raw READ and a memcpy")
    fetch.add_argument("--transport", default="nixl", choices=("nixl", "zmq"))
    fetch.add_argument("--items", default="1", help="comma-separated: fetch each size as so many entries")
    fetch.add_argument("--device", help="measure the way of each entry on to this device, too: cpu, cuda or cuda:N")
    fetch.add_argument(
        "--landing",
        default="host",
        choices=("host", "device"),
        help="with --device: where entries land (see the setting)",
    )
    fetch.set_defaults(run=run_fetch)
    engine = benches.add_parser("engine", help="put, get, borrow and disk, against a memcpy and plain file I/O")
    engine.add_argument("--index-keys", type=int, default=1_000_000, help="measure an index of so many; 0: do not")
    engine.add_argument("--folder", help="where files are written and read (default: the folder for temporary files)")
    engine.set_defaults(run=run_engine)
    for bench in (fetch, engine):
        bench.add_argument("--sizes", default="64KiB,1MiB,4MiB,16MiB,64MiB", help="comma-separated payload sizes")
        bench.add_argument("--repeat", type=int, default=60, help="measurements of each kind and size")
        bench.add_argument("--json", action="store_true", help="print one JSON object (p50 figures)")
    directory = benches.add_parser("directory", help="what the control plane takes in, and how soon it is seen")
    directory.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    directory.add_argument(
        "--instances",
        metavar="N,N,...",
        help="instead: what the directory costs with so many instances, such as 1,10,100,1000",
    )
    directory.add_argument("--json", action="store_true", help="print one JSON object")
    directory.set_defaults(run=run_directory)
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

    items = _counts("--items", args.items)
    if max(items) > _MOST_ITEMS:
        raise ConfigError(f"--items={args.items!r}; accepted: at most {_MOST_ITEMS} in one want")
    device = None if args.device is None else _device(args.device)
    if args.landing == "device" and (device is None or args.transport != "nixl"):
        raise ConfigError("--landing=device; accepted: with --device, and with --transport nixl")
    return run(_sizes(args), items, args.transport, args.repeat, device, args.landing, as_json=args.json)


def run_directory(args: argparse.Namespace) -> int:
    if args.instances is not None:
        from ec_p2p.cli.bench_instances import run as run_instances

        return run_instances(_counts("--instances", args.instances), 0.5 if args.quick else 10.0, as_json=args.json)
    from ec_p2p.cli.bench_directory import FULL, QUICK, run

    return run(QUICK if args.quick else FULL, as_json=args.json)


def run_policy(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_policy import run

    return run(args.requests, args.items, as_json=args.json)


def _sizes(args: argparse.Namespace) -> list[int]:
    return [parse_size("--sizes", text, bare_unit=1) for text in args.sizes.split(",")]


def _device(text: str) -> str:
    from ec_p2p.node.device import device_for

    name = "cuda:0" if text == "cuda" else text
    try:
        kind = device_for(name).kind
    except RuntimeError as error:
        raise ConfigError(f"--device={text!r}; accepted: cpu, cuda or cuda:N: {error}") from None
    if not kind:
        raise ConfigError(f"--device={text!r}; accepted: cpu, cuda or cuda:N")
    return name


def _counts(option: str, text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise ConfigError(f"{option}={text!r}; accepted: numbers from 1, separated by commas")
    return counts
