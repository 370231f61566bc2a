"""The connector's counts as vLLM's statistics and as Prometheus metrics in vLLM's own /metrics.

Owns the translation only. It must never raise: both ends run where an error would end the engine or its front end.
"""

from __future__ import annotations

import logging
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from ec_p2p.connector.counts import COUNTERS, FETCH_SECONDS, FETCH_SECONDS_TEXT, Data, merge

logger = logging.getLogger("vllm.ec_p2p")

PREFIX = "vllm:ec_p2p_"
SECONDS_BUCKETS = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]

_KNOWN_LABELS = {
    "lookups": (("local",), ("disk",), ("remote",), ("encoder_cache",), ("missing",)),
    "fetches": (("landed", "local"), ("landed", "disk"), ("landed", "remote"), ("failed", "remote")),
    "fetched_bytes": (("local",), ("disk",), ("remote",)),
    "saves": (("saved",),),
    "adverts": ((),),
}
"""Series that exist from the start, at 0: a rate over them is right from the first event on."""


class ECP2PStats(ECConnectorStats):  # type: ignore[misc]
    """What travels with a step's output from the scheduler to the front end."""

    data: Data

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECP2PStats) -> ECP2PStats:
        merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def __bool__(self) -> bool:
        return bool(self.data)

    def reduce(self) -> dict[str, int | float]:
        """One figure per series, for vLLM's log line."""
        figures: dict[str, int | float] = {}
        for family, series in self.data.items():
            if family == FETCH_SECONDS:
                figures["fetch_p50_ms"] = round(sorted(series)[len(series) // 2] * 1000, 3)
                continue
            for key, amount in series.items():
                figures["_".join([family, *key.split(",")]).rstrip("_")] = amount
        return figures


class ECP2PPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """Counters and the histogram, one series per engine and label values."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters: dict[str, Any] = {
            name: counter(name=PREFIX + name, documentation=family.text, labelnames=[*labelnames, *family.labels])
            for name, family in COUNTERS.items()
        }
        self._seconds: Any = histogram(
            name=PREFIX + FETCH_SECONDS,
            documentation=FETCH_SECONDS_TEXT,
            buckets=SECONDS_BUCKETS,
            labelnames=labelnames,
        )
        for values in per_engine_labelvalues.values():
            self._seconds.labels(*values)
            for name, known in _KNOWN_LABELS.items():
                for labels in known:
                    self._counters[name].labels(*values, *labels)

    def observe(self, transfer_stats_data: Data, engine_idx: int = 0) -> None:
        try:
            self._observe(transfer_stats_data, self._engines[engine_idx])
        except Exception:
            logger.exception("metrics of the encoder cache could not be recorded: %r", transfer_stats_data)

    def _observe(self, data: Data, engine: list[object]) -> None:
        for name, series in data.items():
            if name == FETCH_SECONDS:
                child = self._seconds.labels(*engine)
                for seconds in series:
                    child.observe(seconds)
            elif name in self._counters:
                for key, amount in series.items():
                    labels = key.split(",") if COUNTERS[name].labels else []
                    self._counters[name].labels(*engine, *labels).inc(amount)
