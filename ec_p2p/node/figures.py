"""What the figures of a node mean, in the words of its /metrics.

Owns the names; docs/operations.md explains the same ones at length, with their labels.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "ec_p2p_node"
TITLE = "ec-p2p node"

PLAIN_COUNTS: Mapping[str, str] = {
    "device_read_bytes": "payload that landed on devices, each one counted",
    "device_quarantined": "entries that landers put into quarantine, in the memory of their devices",
    "saves": "entries stored by the instances of this host",
    "saved_bytes": "payload of the entries that the instances of this host stored",
    "adverts": "entries advertised, fetched ones included",
    "evictions": "entries evicted from the arena",
    "staged_bytes": "payload of entries brought from the disk into the arena",
    "staging_seconds": "time that bringing entries from the disk took, waits included",
    "windows_refused": "times that there was no room for a worker's window",
    "bad_commits": "commits that could not be true",
    "quarantined": "landings in the arena put into quarantine",
    "slabs_refused": "times that the arena could not grow, as a slab could not be registered",
    "errors": "errors of the node itself, which went on",
}
"""Without labels, so they can be there from the start: the first event is a change from 0 for Prometheus, too."""

LABELLED_COUNTS: Mapping[str, str] = {
    "wants": "items asked for by instances, by answer",
    "fetches": "READs of entries from a peer, by outcome",
    "fetched_bytes": "payload that landed from a peer",
    "device_reads": "entries that were to land on devices, by outcome",
    "transfers": "READs posted, of payloads or of records, each of one or many entries",
    "saves_skipped": "outputs of encoders that were not stored, by reason",
    "stagings": "entries to be brought from the disk, by outcome",
    "stage_requests": "entries that other nodes asked to have brought from the disk, by outcome",
    "bad_frames": "messages that made no sense, by socket",
    "keys_refused": "connections turned away for their keys",
}

DISK_COUNTS: Mapping[str, str] = {
    "disk_writes": "files written",
    "disk_written_bytes": "bytes of the files written, headers included",
    "disk_reads": "reads of files, by outcome",
    "disk_reads_refused": "times that an entry was looked for, or read, while reads are not tried",
    "disk_read_bytes": "payload read and verified",
    "disk_skipped": "entries that stay in memory only, by reason",
    "disk_errors": "what the operating system refused, by operation and error",
    "disk_evictions": "files removed to make room",
    "disk_damaged": "files found damaged",
    "disk_swept": "temp files of dead writers removed",
}

GAUGES: Mapping[str, str] = {
    "entries": "entries held in the arena",
    "arena_bytes": "the arena's memory, by kind; pinned is part of used",
    "quarantined_bytes": "memory of late READs that may yet write, part of reserved",
    "encode_seconds_per_row": "what encoding has taken lately on this host, by row of its outputs; 0 before the first",
    "sessions": "attached clients: one for each scheduler, worker and lander",
    "landers": "workers that can land entries on their devices",
    "device_entries": "entries on devices, or on their way there",
    "device_quarantined_bytes": "memory of devices that late READs may yet write",
    "leases": "entries pinned for instances",
    "wants_waiting": "wants with items that are not answered yet",
    "fetches_in_flight": "entries being fetched into the arena",
    "stagings_in_flight": "entries being brought from the disk",
    "disk_entries": "entries known to be on the disk",
    "disk_bytes": "the disk tier's files, what is queued to be written, and its capacity",
    "disk_breaker": "1 while an operation of the disk is tried only now and then",
    "peers_ready": "other nodes that can be read from",
    "peer_latency_seconds": "what small READs from this peer have taken lately",
    "peer_bytes_per_second": "what large READs from this peer have delivered lately",
    "directory_connected": "directories that answer",
    "info": "1",
}

HELP: Mapping[str, str] = {**PLAIN_COUNTS, **LABELLED_COUNTS, **DISK_COUNTS, **GAUGES}


def where(metrics_port: int) -> str:
    """For the logs."""
    return f"/metrics on port {metrics_port}" if metrics_port else "no /metrics"
