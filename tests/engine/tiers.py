"""What tests see of a first tier that nobody else needs to."""

from __future__ import annotations

from ec_p2p.engine.cpu import Entry, LocalCPUBackend


def entries_of(cpu: LocalCPUBackend) -> list[Entry]:
    """Every entry that can be found, oldest first. Nobody stores or removes meanwhile."""
    return list(cpu._index.values())
