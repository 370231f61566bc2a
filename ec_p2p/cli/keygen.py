"""`ec-p2p keygen`: a key pair for a fleet, or for one process of it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ec_p2p.config import ConfigError
from ec_p2p.keys import new_key_file

_HOW_TO_USE = """\
One pair for the whole fleet: copy the file to every host, readable by the user of the nodes only, and give
  vLLM            "ec_connector_extra_config": {{"security": "{file}"}}
  a node          ec-p2p node --set security={file}
  a directory     ec-p2p directory --security {file}
A pair for each process: make one on each host, and write into each file, beside its own pair,
  allow: [...]    the public keys of all members
  directory: ...  the public key of the directories
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("keygen", help="make a key pair, so that only members can connect")
    parser.add_argument("--out", metavar="FILE", help="write the key file there, with mode 0600 (default: print it)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    public, text = new_key_file()
    if args.out is None:
        print(text, end="")
        print(_HOW_TO_USE.format(file="/path/to/file"), end="", file=sys.stderr)
        return 0
    path = os.path.abspath(args.out)
    _write_new(path, text)
    print(f"{path} has a new pair, mode 0600. Its public key: {public}\n")
    print(_HOW_TO_USE.format(file=path), end="")
    return 0


def _write_new(path: str, text: str) -> None:
    """Raises ConfigError; never touches a file that is there: without its keys its owner is locked out."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--out={path!r}: {error.strerror}; accepted: the name of a new file") from None
    with open(descriptor, "w") as file:
        file.write(text)
