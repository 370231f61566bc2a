"""`ec-p2p find`: who holds one media item's embedding."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ec_p2p.cli import words
from ec_p2p.cli.fleet import STATES, namespaces_of, rows_of
from ec_p2p.cli.following import Following, NoDirectory, add_following_arguments, config_of
from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.identity import entry_identity

_IDENTITY = re.compile(r"[0-9a-fA-F]{64}")


class Holder(NamedTuple):
    node: NodeInfo
    advert: Advert
    namespace: str | None
    """In which the item was found. None: its identity was given."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("find", help="tell who holds an item")
    parser.add_argument("mm_hash", metavar="MM_HASH", help="vLLM's identifier of the item, or 64 digits of an identity")
    parser.add_argument(
        "--namespace",
        metavar="NS",
        help="look in this one; the beginning of one that instances tell is enough (default: look in all of them)",
    )
    add_following_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, command="find")


def run(args: argparse.Namespace) -> int:
    with Following(config_of(args)) as following:
        try:
            silent = following.catch_up(args.timeout)
        except NoDirectory as error:
            print(f"ec-p2p find: {error}", file=sys.stderr)
            return 1
        namespaces = chosen(namespaces_of(rows_of(following.view)), args.namespace)
        named = identities(args.mm_hash, namespaces)
        holders = [
            Holder(node, advert, namespace)
            for identity, namespace in named.items()
            for node, advert in following.view.lookup(identity)
        ]
    if args.json:
        print(as_json(args.mm_hash, namespaces, holders))
    elif holders:
        print(as_text(holders))
    else:
        print(f"ec-p2p find: nobody holds {args.mm_hash!r}; {_where(named, namespaces)}", file=sys.stderr)
    if silent:
        print(f"ec-p2p find: no answer from {', '.join(silent)}", file=sys.stderr)
    return 0 if holders else 1


def chosen(told: Sequence[str], given: str | None) -> list[str]:
    """The namespaces to look in. `told` are those of the instances; a `given` one need not be among them."""
    if given is None:
        return list(told)
    return [given, *(namespace for namespace in told if given and namespace != given and namespace.startswith(given))]


def identities(mm_hash: str, namespaces: Sequence[str]) -> dict[bytes, str | None]:
    """What the item may be called, and the namespace in which it is called so.

    64 hex digits are an identity, and may be an identifier too: vLLM's own look like that.
    """
    named: dict[bytes, str | None] = {entry_identity(namespace, mm_hash): namespace for namespace in namespaces}
    if _IDENTITY.fullmatch(mm_hash):
        named.setdefault(bytes.fromhex(mm_hash), None)
    return named


def as_json(mm_hash: str, namespaces: Sequence[str], holders: Sequence[Holder]) -> str:
    found = [
        {
            "node": node.name,
            "address": node.address,
            "incarnation": node.incarnation.hex(),
            "state": STATES[EntryState(advert.state)],
            "rows": advert.rows,
            "dim": advert.dim,
            "dtype": advert.dtype,
            "bytes": advert.nbytes,
            "identity": advert.identity.hex(),
            "namespace": namespace,
        }
        for node, advert, namespace in holders
    ]
    return json.dumps({"mm_hash": mm_hash, "namespaces": namespaces, "holders": found}, indent=2)


def as_text(holders: Sequence[Holder]) -> str:
    header = ("NODE", "ADDRESS", "STATE", "SHAPE", "DTYPE", "BYTES", "NAMESPACE")
    rows = [
        (
            words.shown(node.name),
            words.shown(node.address),
            STATES[EntryState(advert.state)],
            f"{advert.rows}x{advert.dim}" if advert.rows else "-",
            words.shown(advert.dtype) if advert.rows else "-",
            words.size(advert.nbytes),
            "-" if namespace is None else words.short(namespace),
        )
        for node, advert, namespace in holders
    ]
    return "\n".join(words.columns([header, *rows], right=(False, False, False, False, False, True, False)))


def _where(named: dict[bytes, str | None], namespaces: Sequence[str]) -> str:
    if not named:
        return "no instance tells its namespace, so give one with --namespace"
    as_identity = "as an identity" if None in named.values() else ""
    in_namespaces = f"in namespace {', '.join(map(words.short, namespaces))}" if namespaces else ""
    return f"looked for it {' and '.join(filter(None, (in_namespaces, as_identity)))}"
