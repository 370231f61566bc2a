"""`ec-p2p bench`: measurements, each against its own limit in the same run."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ec_p2p.cli import bench_columns
from ec_p2p.cli.ending import ended_by_signals
from ec_p2p.cli.free_memory import free_memory
from ec_p2p.cli.words import size
from ec_p2p.config import ConfigError
from ec_p2p.config_kinds import Size

_MOST_ITEMS = 256
"""What fits the message in which a client asks for them, by far."""
_MOST_ROUNDS = 1_000_000
_MOST_KEYS = 100_000_000
_KEY_BYTES = 1 << 10
"""Memory that a key takes while the index is measured, at most."""
_MOST_OF_A_TRACE = 1_000_000
"""Items, and requests: of more each policy's turn takes many minutes."""
_MOST_INSTANCES = 1_000_000_000
"""What limits them is how many files may be open."""
_NUMBER = re.compile(r"[0-9]{1,18}")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine")
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    fetch = _add(benches, "fetch", "fetch between two nodes, against a raw READ and a memcpy", bench_columns.FETCH)
    fetch.add_argument("--transport", default="nixl", choices=("nixl", "zmq"), help="(default: %(default)s)")
    fetch.add_argument(
        "--items",
        default="1",
        metavar="N,N,...",
        help=f"fetch each size as so many entries, at most {_MOST_ITEMS} (default: %(default)s)",
    )
    fetch.add_argument("--device", help="measure the way of each entry on to this device, too: cpu, cuda or cuda:N")
    fetch.add_argument(
        "--landing",
        default="host",
        choices=("host", "device"),
        help="with --device: where entries land, see the setting (default: %(default)s)",
    )
    fetch.set_defaults(run=run_fetch)
    engine = _add(
        benches, "engine", "put, get, borrow and disk, against a memcpy and plain file I/O", bench_columns.ENGINE
    )
    engine.add_argument(
        "--index-keys",
        default="1000000",
        metavar="N",
        help="measure an index of so many; 0: do not (default: %(default)s)",
    )
    engine.add_argument("--folder", help="where files are written and read (default: the folder for temporary files)")
    engine.set_defaults(run=run_engine)
    for bench in (fetch, engine):
        bench.add_argument(
            "--sizes",
            default="64KiB,1MiB,4MiB,16MiB,64MiB",
            metavar="SIZE,SIZE,...",
            help="payload sizes (default: %(default)s)",
        )
        bench.add_argument(
            "--repeat", default="60", metavar="N", help="measurements of each kind and size (default: %(default)s)"
        )
    directory = _add(
        benches, "directory", "what the control plane takes in, and how soon it is seen", bench_columns.DIRECTORY
    )
    directory.add_argument("--quick", action="store_true", help="small sizes, short times: to see that it runs")
    directory.add_argument(
        "--instances",
        metavar="N,N,...",
        help="instead: what the directory costs with so many instances, such as 1,10,100,1000",
    )
    directory.set_defaults(run=run_directory)
    policy = _add(benches, "policy", "hit ratios of the eviction policies, on a made-up trace", bench_columns.POLICY)
    policy.add_argument("--requests", default="30000", metavar="N", help="length of a trace (default: %(default)s)")
    policy.add_argument("--items", default="5000", metavar="N", help="size of the catalogue (default: %(default)s)")
    policy.set_defaults(run=run_policy)
    for bench in (fetch, engine, directory, policy):
        bench.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _add(benches: Any, name: str, what: str, columns: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benches.add_parser(
        name,
        help=what,
        description=what,
        epilog=columns,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


@ended_by_signals()
def run_engine(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_engine import LEAST_BYTES, memory_for, run

    sizes = _sizes(args.sizes, LEAST_BYTES)
    repeat = _number("--repeat", args.repeat, 1, _MOST_ROUNDS)
    keys = _number("--index-keys", args.index_keys, 0, _MOST_KEYS)
    _check_memory("--sizes", args.sizes, memory_for(max(sizes)))
    _check_memory("--index-keys", args.index_keys, keys * _KEY_BYTES)
    return run(sizes, repeat, keys, args.folder, as_json=args.json)


@ended_by_signals()
def run_fetch(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_fetch import Way, memory_for, run

    sizes = _sizes(args.sizes)
    items = _numbers("--items", args.items, _MOST_ITEMS)
    repeat = _number("--repeat", args.repeat, 1, _MOST_ROUNDS)
    _check_memory("--sizes", args.sizes, memory_for(sizes, items))
    device = None if args.device is None else _device(args.device)
    if args.landing == "device" and (device is None or args.transport != "nixl"):
        raise ConfigError("--landing=device; accepted: with --device, and with --transport nixl")
    return run(sizes, items, Way(args.transport, device, args.landing), repeat, as_json=args.json)


@ended_by_signals()
def run_directory(args: argparse.Namespace) -> int:
    if args.instances is not None:
        from ec_p2p.cli.bench_instances import run as run_instances

        return run_instances(
            _numbers("--instances", args.instances, _MOST_INSTANCES), 0.5 if args.quick else 10.0, as_json=args.json
        )
    from ec_p2p.cli.bench_directory import FULL, QUICK, run

    return run(QUICK if args.quick else FULL, as_json=args.json)


@ended_by_signals()
def run_policy(args: argparse.Namespace) -> int:
    from ec_p2p.cli.bench_policy import run

    requests = _number("--requests", args.requests, 1, _MOST_OF_A_TRACE)
    return run(requests, _number("--items", args.items, 1, _MOST_OF_A_TRACE), as_json=args.json)


def _sizes(text: str, least: int = 1) -> list[int]:
    kind = Size(least=least)
    try:
        return [kind.check(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes={text!r}; accepted, separated by commas: {kind.accepted}") from None


def _number(option: str, text: str, least: int, most: int) -> int:
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise ConfigError(f"{option}={text!r}; accepted: a number from {least} to {most}")
    return int(text)


def _numbers(option: str, text: str, most: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(_NUMBER.fullmatch(part) and 1 <= int(part) <= most for part in parts):
        raise ConfigError(f"{option}={text!r}; accepted: numbers from 1 to {most}, separated by commas")
    return [int(part) for part in parts]


def _check_memory(option: str, value: object, needed: int) -> None:
    """Raises ConfigError if `needed` bytes, which is what the option's value takes, are not there."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"{option}={value!r} takes {size(needed)} of memory; accepted: what fits the {size(free)} that are free"
        )


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
