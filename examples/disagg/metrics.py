"""Reads the /metrics of running processes, and says what changed between two readings."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from processes import Failed
from prometheus_client.parser import text_string_to_metric_families

# Fleets on one machine are reached directly, whatever proxy the environment names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_Series = tuple[str, frozenset[tuple[str, str]]]


class Metrics:
    """One reading: the value of every series. `after - before` is what happened between two readings."""

    def __init__(self, series: Mapping[_Series, float]) -> None:
        self._series = series

    @classmethod
    def read(cls, url: str) -> Metrics:
        """Raises Failed when nobody answers at `url`/metrics."""
        try:
            with DIRECT.open(f"{url}/metrics", timeout=10) as answer:
                families = text_string_to_metric_families(answer.read().decode())
        except OSError as error:
            raise Failed(f"no metrics at {url}/metrics: {error}") from None
        return cls({(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples})

    def __sub__(self, before: Metrics) -> Metrics:
        return Metrics({series: value - before._series.get(series, 0.0) for series, value in self._series.items()})

    def total(self, name: str, **labels: str) -> int:
        """Sum over all series of this name that carry these labels; 0 where there are none."""
        wanted = set(labels.items())
        return round(sum(value for (series, has), value in self._series.items() if series == name and wanted <= has))

    def by(self, label: str, name: str, **labels: str) -> dict[str, int]:
        """The same sum for each value of `label`, without those that are 0."""
        sums: dict[str, float] = defaultdict(float)
        for (series, has), value in self._series.items():
            if series == name and set(labels.items()) <= has:
                sums[dict(has).get(label, "")] += value
        return {key: round(value) for key, value in sums.items() if value}
