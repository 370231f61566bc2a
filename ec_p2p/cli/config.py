"""`ec-p2p config`: every setting as it holds for a process started here and now, and where it comes from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from typing import Any

from ec_p2p.cli.settings import ORIGIN, add_arguments, settings_of
from ec_p2p.config import KINDS
from ec_p2p.config_kinds import KeyRing, Size, readable_size
from ec_p2p.config_sources import Loaded, explain_ec_engine_config
from ec_p2p.wire.notation import without_password


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="print every setting and where it comes from")
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with sizes in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="ec-p2p config: %(message)s", stream=sys.stderr)
    loaded = explain_ec_engine_config(settings_of(args), origin=ORIGIN)
    print(as_json(loaded) if args.json else as_text(loaded))
    return 0


def as_json(loaded: Loaded) -> str:
    settings = [
        {"name": name, "value": _without_secret(getattr(loaded.config, name)), "source": source}
        for name, source in loaded.sources.items()
    ]
    return json.dumps({"config_file": loaded.config_file or None, "settings": settings}, indent=2)


def as_text(loaded: Loaded) -> str:
    rows = [(name, _readable(name, getattr(loaded.config, name)), source) for name, source in loaded.sources.items()]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"configuration file: {loaded.config_file or 'none'}", ""]
    lines += [f"{name:{first}}  {value:{second}}  {source}" for name, value, source in rows]
    return "\n".join(lines)


def _without_secret(value: Any) -> Any:
    if isinstance(value, KeyRing):
        return {**dataclasses.asdict(value), "secret": "(hidden)"}
    return [without_password(endpoint) for endpoint in value] if isinstance(value, tuple) else value


def _readable(name: str, value: Any) -> str:
    if isinstance(KINDS[name], Size):
        return readable_size(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, KeyRing):
        return f"public={value.public}"
    if isinstance(value, dict):
        value = ",".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, tuple):
        value = ",".join(map(without_password, value))
    return str(value) or "-"
