"""How what a node counts and measures is served.

Owns the /metrics endpoint. Names are `ec_p2p_node_<name>`; counters get Prometheus' `_total`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ec_p2p.engine.tally import Labels, Series

logger = logging.getLogger(__name__)


def flat(values: Mapping[Series, float]) -> dict[str, float]:
    """'fetches{outcome=landed,peer=host1}' -> value, for tools and tests."""
    return {
        name + ("{" + ",".join(f"{key}={text}" for key, text in labels) + "}" if labels else ""): value
        for (name, labels), value in values.items()
    }


Measured = Callable[[], dict[Series, float]]
"""The values at the time of the call. Called by the thread that serves /metrics, too."""


class MetricsServer:
    """The node's /metrics. Absent prometheus_client, there is none and a line in the log says so."""

    def __init__(self, host: str, port: int, counts: Measured, gauges: Measured) -> None:
        self.port = 0
        self._server: Any = None
        self._thread: Any = None
        if port < 0:
            return
        try:
            import prometheus_client
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError:
            logger.warning("prometheus_client is not installed: this node serves no /metrics (pip install ec-p2p[cli])")
            return

        class Collector:
            def collect(self) -> Iterator[Any]:
                samples = [(CounterMetricFamily, list(counts().items())), (GaugeMetricFamily, list(gauges().items()))]
                for family, values in samples:
                    by_name: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
                    for (name, labels), value in values:
                        by_name[name].append((labels, value))
                    for name, series in by_name.items():
                        keys = [key for key, _ in series[0][0]]
                        metric = family(f"ec_p2p_node_{name}", f"ec-p2p node: {name.replace('_', ' ')}", labels=keys)
                        for labels, value in series:
                            metric.add_metric([text for _, text in labels], value)
                        yield metric

        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(Collector())
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            logger.warning("no /metrics: cannot listen on %s:%d: %s", host, port, error)
            return
        self.port = self._server.server_port

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
