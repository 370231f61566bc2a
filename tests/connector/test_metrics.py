"""The counts, on their way through vLLM into its own /metrics."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorLogging, ECConnectorProm

from ec_p2p.connector import ECP2PConnector
from ec_p2p.connector.counts import COUNTERS, Counts
from ec_p2p.connector.metrics import ECP2PStats

CONFIG = SimpleNamespace(
    ec_transfer_config=SimpleNamespace(ec_connector="ECP2PConnector", ec_connector_module_path="ec_p2p.connector")
)


@pytest.fixture
def registry(monkeypatch):
    """vLLM registers with the process-wide registry; here it gets one of its own."""
    mine = CollectorRegistry(auto_describe=True)
    for name, kind in (("_counter_cls", Counter), ("_histogram_cls", Histogram), ("_gauge_cls", Gauge)):
        monkeypatch.setattr(
            ECConnectorProm, name, staticmethod(lambda *a, _kind=kind, **k: _kind(*a, registry=mine, **k))
        )
    return mine


def sample(registry, name, **labels):
    return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def prom(engines=(0,)):
    return ECConnectorProm(CONFIG, ["model_name", "engine"], {engine: ["m", str(engine)] for engine in engines})


def test_every_metric_has_its_name_in_the_text(registry):
    prom()
    text = prometheus_client.generate_latest(registry).decode()
    for family in COUNTERS:
        assert f"# TYPE vllm:ec_p2p_{family}_total counter" in text
    assert "# TYPE vllm:ec_p2p_fetch_seconds histogram" in text
    assert 'vllm:ec_p2p_lookups_total{engine="0",model_name="m",outcome="remote"} 0.0' in text


def test_what_is_counted_arrives(registry):
    metrics = prom(engines=(0, 1))
    counts = Counts()
    counts.add("lookups", "remote", amount=2)
    counts.add("fetches", "landed", "remote")
    counts.add("fetched_bytes", "remote", amount=81920)
    counts.add("adverts")
    counts.observe_fetch(0.004)
    for _ in range(2):
        metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(counts.take())), 0)
    metrics.observe({"lookups": {"remote": 5}}, 1)
    assert sample(registry, "vllm:ec_p2p_lookups_total", outcome="remote") == 2
    assert sample(registry, "vllm:ec_p2p_lookups_total", outcome="remote", engine="1") == 5
    assert sample(registry, "vllm:ec_p2p_fetches_total", outcome="landed", source="remote") == 1
    assert sample(registry, "vllm:ec_p2p_fetched_bytes_total", source="remote") == 81920
    assert sample(registry, "vllm:ec_p2p_adverts_total") == 1
    assert sample(registry, "vllm:ec_p2p_fetch_seconds_count") == 1
    assert sample(registry, "vllm:ec_p2p_fetch_seconds_bucket", le="0.005") == 1
    assert sample(registry, "vllm:ec_p2p_fetch_seconds_bucket", le="0.0025") == 0


def test_what_cannot_be_recorded_does_not_end_the_front_end(registry, caplog):
    metrics = prom()
    metrics.observe({"lookups": {"remote,extra": 1}}, 0)
    metrics.observe({"lookups": {"remote": 1}}, 7)
    metrics.observe({"from_a_newer_version": {"x": 1}}, 0)
    assert len(caplog.records) == 2


def test_vllms_log_line():
    lines = []
    logging = ECConnectorLogging(CONFIG.ec_transfer_config)
    logging.observe({"lookups": {"remote": 1}, "adverts": {"": 1}, "fetch_seconds": [0.001, 0.003]})
    logging.observe({"lookups": {"remote": 2, "missing": 1}, "fetch_seconds": [0.002]})
    logging.log(lambda text, values: lines.append(text % values))
    logging.log(lambda text, values: lines.append(text % values))
    assert lines == [
        "EC Transfer metrics: lookups_remote=3, lookups_missing=1, adverts=1, fetch_p50_ms=2.0",
    ]


def test_stats_are_handed_out_once_and_travel():
    counts = Counts()
    counts.add("saves", "saved")
    first, second = ECP2PStats(data=counts.take()), ECP2PStats(data=counts.take())
    assert (first.is_empty(), second.is_empty(), bool(second)) == (False, True, False)
    assert pickle.loads(pickle.dumps(first)).data == {"saves": {"saved": 1}}
    assert first.aggregate(ECP2PStats(data={"saves": {"saved": 2, "layout": 1}})).data == {
        "saves": {"saved": 3, "layout": 1}
    }
    first.reset()
    assert first.is_empty()
    assert ECP2PConnector.build_ec_connector_stats(None).is_empty()
