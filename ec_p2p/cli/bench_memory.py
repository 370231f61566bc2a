"""What a benchmark may take of this machine's memory."""

from __future__ import annotations

from ec_p2p.cli.free_memory import free_memory
from ec_p2p.cli.words import size
from ec_p2p.config import ConfigError


def check_memory(option: str, value: object, needed: int) -> None:
    """Raises ConfigError if `needed` bytes, which is what the option's value takes, are not there."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"{option}={value!r} takes {size(needed)} of memory; accepted: what fits the {size(free)} that are free"
        )
