"""`ec-p2p` as a process: run to its end, or kept running."""

from __future__ import annotations

import os
import subprocess
import sys


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ec_p2p.cli", *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's, and of LMCache's variables only these."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith("LMCACHE_")}
    return {**clean, **variables}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(**variables))
