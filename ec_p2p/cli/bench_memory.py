"""What a benchmark may take of this machine's memory."""

from __future__ import annotations

from pathlib import Path

from ec_p2p.cli.words import size
from ec_p2p.config import ConfigError


def free_memory() -> int:
    """Bytes that the machine can give without taking them from anybody."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo does not say how much memory is free")


def check_memory(option: str, value: object, needed: int) -> None:
    """Raises ConfigError if `needed` bytes, which is what the option's value takes, are not there."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"{option}={value!r} takes {size(needed)} of memory; accepted: what fits the {size(free)} that are free"
        )
