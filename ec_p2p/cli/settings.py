"""Settings on a command line: `--settings`, `--set`, `--name`, `--directory`.

Owns how the words become settings, in rising precedence; whether they are accepted is the configuration's business.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ec_p2p.config import ConfigError
from ec_p2p.config_kinds import shown

ORIGIN = "command line"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="node_name (default: the host name)")
    parser.add_argument("--settings", default="{}", metavar="JSON", help="settings, as in ec_connector_extra_config")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting; may be given several times"
    )
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        metavar="ENDPOINT",
        help="a directory, such as tcp://10.0.0.1:14579; may be given several times (default: as configured)",
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings in these arguments, unchecked. Raises ConfigError for what is no setting at all."""
    try:
        settings = json.loads(args.settings)
    except ValueError as error:
        raise ConfigError(f"--settings={shown(args.settings)} is not JSON ({error}); accepted: an object") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--settings={shown(settings)}; accepted: a JSON object")
    for pair in args.set:
        key, found, text = pair.partition("=")
        if not found:
            raise ConfigError(f"--set {shown(pair)}; accepted: KEY=VALUE")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text  # plain words need no quotes
    if args.name:
        settings["node_name"] = args.name
    if args.directory:
        settings["directory"] = args.directory
    return settings
