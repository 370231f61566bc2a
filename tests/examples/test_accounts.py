"""The demo's bookkeeping: it is satisfied only when servers and nodes agree with what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from accounts import Account, Reading, check_transport, settle
from metrics import Metrics
from processes import Failed, free_port
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

ENCODES, FETCHES, BYTES = (
    "vllm:ec_p2p_local_encodes_total",
    "vllm:ec_p2p_fetches_total",
    "vllm:ec_p2p_fetched_bytes_total",
)
NODE_FETCHES, NODE_BYTES, ANSWERED = (
    "ec_p2p_node_fetches_total",
    "ec_p2p_node_fetched_bytes_total",
    "vllm:request_success_total",
)


def metrics(*values: tuple[str, dict[str, str], float]) -> Metrics:
    return Metrics({(name, frozenset(labels.items())): value for name, labels, value in values})


def fleet() -> Any:
    host1, host2 = (SimpleNamespace(label=f"host{n}", node_name=f"host{n}-ab") for n in (1, 2))
    producer = SimpleNamespace(name="producer", host=host1, role="ec_producer")
    consumer = SimpleNamespace(name="consumer1", host=host2, role="ec_consumer")
    return SimpleNamespace(servers=(producer, consumer), pds=(consumer,), hosts=(host1, host2))


def change(*, consumer: Metrics, host2: Metrics, producer: Metrics | None = None) -> Reading:
    return Reading({"producer": producer or metrics(), "consumer1": consumer}, {"host1": metrics(), "host2": host2})


ONE_ENCODE = metrics((ENCODES, {"reason": "producer"}, 1))
ONE_FETCH = metrics(
    (ANSWERED, {"finished_reason": "length"}, 1),
    (FETCHES, {"outcome": "landed", "source": "remote"}, 1),
    (BYTES, {"source": "remote"}, 640),
)
ONE_READ = metrics(
    (NODE_FETCHES, {"outcome": "landed", "peer": "host1-ab"}, 1), (NODE_BYTES, {"peer": "host1-ab"}, 640)
)
EXPECTED: dict[str, Any] = {"answered": 1, "encoded": ("host1",), "fetched": 1, "at_hand": 0}


def test_agreement_fits() -> None:
    account = Account.of(change(producer=ONE_ENCODE, consumer=ONE_FETCH, host2=ONE_READ), fleet())
    assert account.fits(**EXPECTED)
    assert str(account) == "1 encoded on host1, 1 fetched over NIXL from host1"


def test_what_a_server_claims_and_no_node_has_moved_does_not_fit() -> None:
    account = Account.of(change(producer=ONE_ENCODE, consumer=ONE_FETCH, host2=metrics()), fleet())
    assert not account.fits(**EXPECTED)


def test_bytes_that_differ_do_not_fit() -> None:
    other = metrics(
        (NODE_FETCHES, {"outcome": "landed", "peer": "host1-ab"}, 1), (NODE_BYTES, {"peer": "host1-ab"}, 64)
    )
    account = Account.of(change(producer=ONE_ENCODE, consumer=ONE_FETCH, host2=other), fleet())
    assert not account.fits(**EXPECTED)


def test_a_consumer_that_encodes_is_named() -> None:
    encoding = metrics((ANSWERED, {}, 1), (ENCODES, {"reason": "no_source"}, 1))
    account = Account.of(change(consumer=encoding, host2=metrics()), fleet())
    assert account.encoded == ("consumer1",)
    assert not account.fits(answered=1, encoded=("host2",), fetched=0, at_hand=0)


def test_an_encode_nobody_expected_does_not_fit() -> None:
    twice = metrics((ENCODES, {"reason": "producer"}, 2))
    account = Account.of(change(producer=twice, consumer=ONE_FETCH, host2=ONE_READ), fleet())
    assert not account.fits(**EXPECTED)


def test_failed_fetches_are_not_fetches() -> None:
    failed = metrics((ANSWERED, {}, 1), (FETCHES, {"outcome": "failed", "source": "remote"}, 1))
    account = Account.of(change(consumer=failed, host2=metrics()), fleet())
    assert account.fits(answered=1, encoded=(), fetched=0, at_hand=0)


@pytest.fixture
def live() -> Iterator[SimpleNamespace]:
    """A real /metrics that a test can move."""
    registry = CollectorRegistry()
    encodes = Counter("vllm:ec_p2p_local_encodes", "encodes", ["reason"], registry=registry)
    info = Gauge("ec_p2p_node_info", "info", ["transport"], registry=registry)
    server, thread = start_http_server(port := free_port(), "127.0.0.1", registry)
    url = f"http://127.0.0.1:{port}"
    yield SimpleNamespace(encodes=encodes, info=info, metrics=lambda: Metrics.read(url))
    server.shutdown()
    server.server_close()
    thread.join()


def live_fleet(live: SimpleNamespace) -> Any:
    host = SimpleNamespace(label="host1", node_name="host1-ab", metrics=live.metrics)
    server = SimpleNamespace(name="producer", host=host, role="ec_producer", metrics=live.metrics)
    return SimpleNamespace(servers=(server,), pds=(server,), hosts=(host,))


def test_settling_counts_from_the_earlier_reading_on(live: SimpleNamespace) -> None:
    fleet = live_fleet(live)
    live.encodes.labels("producer").inc(3)
    before = Reading.of(fleet)
    live.encodes.labels("producer").inc()
    account, after = settle(fleet, before, "a request", answered=0, encoded=("host1",), fetched=0, at_hand=0)
    assert account.encoded == ("host1",)
    assert after.servers["producer"].total(ENCODES) == 4


def test_what_never_settles_says_what_the_metrics_say(live: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = live_fleet(live)
    before = Reading.of(fleet)
    live.encodes.labels("producer").inc()
    monkeypatch.setattr("accounts._PATIENCE_S", 0.2)
    with pytest.raises(Failed, match=r"a request: .* should say .*encoded \(\).* they say .*encoded=\('host1',\)"):
        settle(fleet, before, "a request", answered=0, encoded=(), fetched=0, at_hand=0)


def test_another_transport_is_told(live: SimpleNamespace) -> None:
    live.info.labels("zmq").set(1)
    with pytest.raises(Failed, match="the node of host1 moves bytes over zmq, not over nixl"):
        check_transport(live_fleet(live))


def test_metrics_that_nobody_serves_are_told() -> None:
    with pytest.raises(Failed, match="no metrics at http://127"):
        Metrics.read(f"http://127.0.0.1:{free_port()}")
