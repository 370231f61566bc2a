"""`ec-p2p ls`: the nodes of a fleet, their instances, and how much each holds."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from ec_p2p.cli import words
from ec_p2p.cli.fleet import STATES, NodeRow, as_json, rows_of
from ec_p2p.cli.following import Following, NoDirectory, add_following_arguments, config_of


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("ls", help="list the nodes of the fleet and what they hold")
    add_following_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, command="ls")


def run(args: argparse.Namespace) -> int:
    with Following(config_of(args)) as following:
        try:
            silent = following.catch_up(args.timeout)
        except NoDirectory as error:
            print(f"ec-p2p ls: {error}", file=sys.stderr)
            return 1
        rows = rows_of(following.view)
        followed = [replica.endpoint for replica in following.view.replicas if replica.endpoint not in silent]
    now = time.time()
    if args.json:
        nodes = [as_json(row, now) for row in rows]
        print(json.dumps({"directories": {"followed": followed, "silent": silent}, "nodes": nodes}, indent=2))
    else:
        print(as_text(rows, now))
    if silent:
        print(f"ec-p2p ls: no answer from {', '.join(silent)}", file=sys.stderr)
    return 0


def as_text(rows: Sequence[NodeRow], now: float) -> str:
    """`now` is Unix time."""
    lines: list[str] = []
    if rows:
        header = ("NODE", "ADDRESS", "STATE", "AGE", *(word.upper() for word in STATES.values()), "BYTES")
        table = words.columns(
            [header, *(_cells(row, now) for row in rows)], right=(False, False, False, True, True, True, True, True)
        )
        instances = iter(words.columns(_instance_cells(rows), right=(False, False, False)))
        lines.append(table[0])
        for line, row in zip(table[1:], rows, strict=True):
            lines.append(line)
            lines += [f"  {next(instances)}" for _ in row.instances]
    lines.append(summary(rows))
    return "\n".join(lines)


def summary(rows: Sequence[NodeRow]) -> str:
    """Such as '2 nodes, 1 instance, 1293 entries, 10.3 GiB'."""
    counts = (
        (len(rows), "node"),
        (sum(len(row.instances) for row in rows), "instance"),
        (sum(row.held for row in rows), "entry"),
    )
    held = words.size(sum(row.held_bytes for row in rows))
    return ", ".join([*(words.counted(number, thing) for number, thing in counts), held])


def _cells(row: NodeRow, now: float) -> tuple[str, ...]:
    age = row.age_s(now)
    return (
        words.shown(row.info.name),
        words.shown(row.info.address),
        row.state,
        "-" if age is None else words.age(age),
        *(str(row.entries[word]) for word in STATES.values()),
        words.size(row.held_bytes),
    )


def _instance_cells(rows: Sequence[NodeRow]) -> list[tuple[str, str, str]]:
    return [
        (words.shown(instance.name), words.shown(instance.role), f"namespace {words.short(instance.namespace)}")
        for row in rows
        for instance in row.instances
    ]
