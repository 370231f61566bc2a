"""What happened in this process since it was last asked.

Owns the names of the connector's metrics and their labels. It must never know vLLM or Prometheus: vLLM's own metrics do
not exist in every version, and counting must not fail where they do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    """One metric: its labels, and what it says to people."""

    labels: tuple[str, ...]
    text: str


COUNTERS = {
    "lookups": Family(("outcome",), "Media items looked up, by where their embedding was found."),
    "fetches": Family(("outcome", "source"), "Embeddings asked from the node and waited for, by outcome and source."),
    "fetched_bytes": Family(("source",), "Bytes of embeddings that the node provided."),
    "local_encodes": Family(("reason",), "Media items encoded on this instance, by why they were not loaded."),
    "saves": Family(("outcome",), "Encoder outputs offered to the node, by outcome."),
    "adverts": Family((), "Encoder outputs of this instance that became visible to others."),
    "failed_requests": Family(("reason",), "Requests failed because an embedding was nowhere and its media not here."),
    "hook_errors": Family(("hook",), "Errors inside the connector that the engine did not see."),
}
FETCH_SECONDS = "fetch_seconds"
FETCH_SECONDS_TEXT = "Seconds from the start of a fetch from another node to its landing."

Data = dict[str, Any]
"""`{family: {"label,label": count}, "fetch_seconds": [seconds]}`: plain enough for MessagePack."""


class Counts:
    """Deltas, handed out once. Used by one thread."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[str, float]] = {}
        self._seconds: list[float] = []

    def add(self, family: str, *labels: str, amount: float = 1) -> None:
        """`labels` in the order of COUNTERS[family].labels."""
        series = self._counters.setdefault(family, {})
        key = ",".join(labels)
        series[key] = series.get(key, 0) + amount

    def observe_fetch(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def take(self) -> Data:
        """Everything since the last call; empty if there is nothing."""
        data: Data = dict(self._counters)
        if self._seconds:
            data[FETCH_SECONDS] = self._seconds
        self._counters = {}
        self._seconds = []
        return data


def merge(into: Data, more: Data) -> None:
    for family, found in more.items():
        if family == FETCH_SECONDS:
            into.setdefault(FETCH_SECONDS, []).extend(found)
            continue
        series = into.setdefault(family, {})
        for key, amount in found.items():
            series[key] = series.get(key, 0) + amount
