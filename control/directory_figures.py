"""What a directory shows of itself at /metrics.

Owns the names. Reads what may be read from any thread.
"""

from __future__ import annotations

import time

from ec_p2p.control.directory import Directory
from ec_p2p.control.exposition import Series, Source
from ec_p2p.control.messages import EntryState

PREFIX = "ec_p2p_directory"
_COUNTS = {
    "adverts": "adverts that nodes have told, those that changed one included",
    "withdrawals": "withdrawals that nodes have told",
    "publishes": "messages published, heartbeats included",
    "slow_subscribers": "times that a subscriber's queue was full: it misses what comes until it has read",
    "bad_frames": "messages that made no sense",
    "refused": "hellos, goodbyes and snapshot requests refused: another protocol version, or another's node",
    "keys_refused": "connections turned away for their keys",
    "unsent": "answers not sent, as the other side was gone or did not read",
    "snapshots": "snapshots begun",
    "snapshots_sent": "snapshots sent in full",
    "snapshots_given_up": "snapshots given up, as the replica did not read or too many others waited",
    "snapshot_bytes": "bytes of snapshots sent",
    "snapshot_seconds": "seconds that the snapshots sent in full took, from the first chunk to the last",
}
_GAUGES = {
    "nodes": "nodes that are up",
    "entries": "entries that nodes hold, by where they are",
    "subscribers": "those that changes are published to: one for each node, and tools",
    "seq": "number of the last change published",
    "uptime_seconds": "seconds since the start",
    "info": "1",
}
_STATES = {EntryState.RESIDENT: "memory", EntryState.DISK: "disk", EntryState.PENDING: "pending"}


def source_of(directory: Directory) -> Source:
    """The figures of `directory`, which has just been made."""
    began = time.monotonic()

    def counts() -> dict[Series, float]:
        stats = {**directory.stats(), "snapshot_seconds": directory.snapshot_seconds}
        return {(name, ()): stats[name] for name in _COUNTS}

    def gauges() -> dict[Series, float]:
        stats = directory.stats()
        entries = directory.entries_by_state()
        return {
            ("nodes", ()): stats["nodes"],
            **{("entries", (("state", word),)): entries[state] for state, word in _STATES.items()},
            ("subscribers", ()): stats["subscribers"],
            ("seq", ()): stats["seq"],
            ("uptime_seconds", ()): time.monotonic() - began,
            ("info", (("endpoint", directory.endpoint), ("epoch", directory.epoch.hex()))): 1,
        }

    return Source(PREFIX, "ec-p2p directory", counts, gauges, _COUNTS | _GAUGES)
