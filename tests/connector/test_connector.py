"""The class itself: what keeps an engine from starting, and that nothing else ever reaches it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from ec_p2p.config import ConfigError
from ec_p2p.connector import ECP2PConnector
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.media import MediaFields
from ec_p2p.connector.metadata import ECP2PMetadata
from ec_p2p.connector.no_sharing import NoSharing

from .conftest import ROLES, Harness, image, request, step, without_media


def vllm_config(ec_role="ec_both", cache_gb=4.0, **extra):
    """What the connector reads of a VllmConfig, with everything shared that can be."""
    return SimpleNamespace(
        ec_transfer_config=ECTransferConfig(
            ec_connector="ECP2PConnector",
            ec_role=ec_role,
            engine_id="engine",
            ec_connector_extra_config={"namespace": "n", "spawn_node": False, "node_name": "nobody", **extra},
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, prefill_context_parallel_size=1, local_world_size=1, data_parallel_index=0
        ),
        lora_config=None,
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("ec_p2p.connector.connector.SCHEDULER_ATTACH_S", 0.0)
    monkeypatch.setattr("ec_p2p.connector.connector.WORKER_ATTACH_S", 0.0)
    monkeypatch.setattr(MediaFields, "of", classmethod(lambda cls, _: cls(ROLES)))


@pytest.fixture
def make():
    made = []

    def connector(role=ECConnectorRole.SCHEDULER, **settings):
        made.append(ECP2PConnector(vllm_config(**settings), role))
        return made[-1]

    yield connector
    for one in made:
        one.shutdown()
        one.shutdown()


def on(connector, side):
    """`connector`, with a side that talks to a scripted node."""
    connector._scheduler.close()
    connector._scheduler = side
    return connector


@pytest.fixture
def broken(make, node, clock):
    """A scheduler connector whose node's client raises at every call."""
    connector = on(make(), Harness(node, clock, "ec_both").side)

    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("broken")

    for name in ("attach", "want", "poll", "forget", "release", "dispatched", "encoding"):
        setattr(node, name, fail)
    return connector


@pytest.mark.parametrize("role", ECConnectorRole)
@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"fetch_timeout": 3}, "unknown setting 'fetch_timeout'.*'fetch_timeout_s'"),
        ({"fetch_timeout_s": "soon"}, "fetch_timeout_s='soon'"),
        ({"max_local_cpu_size": -3}, "max_local_cpu_size=-3"),
    ],
)
def test_a_bad_setting_refuses_to_start(make, role, extra, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(role, **extra)


def test_settings_come_from_all_sources_but_the_directory_from_vllm_alone(make, monkeypatch, tmp_path):
    made = []

    def refuse(config, *_args, **_kwargs):
        made.append(config)
        raise OSError("the configuration is all that this is about")

    monkeypatch.setattr("ec_p2p.connector.connector.NodeClient", refuse)
    (tmp_path / "lmcache.yaml").write_text("max_local_cpu_size: 5\nec_expect_s: 7\nec_ip: 10.0.0.9\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "lmcache.yaml"))
    monkeypatch.setenv("LMCACHE_EC_GRACE_S", "9")
    monkeypatch.setenv("LMCACHE_EC_PORT", "99")
    make(**{"lmcache.ec_read_timeout_s": 3, "lmcache.ec_port": 98, "ec_port": 97})
    (config,) = made
    assert (config.max_local_cpu_size, config.expect_s, config.grace_s) == (5 << 30, 7.0, 9.0)
    assert config.read_timeout_s == 3.0
    assert (config.ec_ip, config.ec_port) == ("127.0.0.1", 14579)


@pytest.mark.parametrize("role", ECConnectorRole)
def test_a_bad_setting_from_elsewhere_refuses_to_start_too(make, monkeypatch, role):
    monkeypatch.setenv("LMCACHE_EC_TRANSPORT", "rdma")
    with pytest.raises(ConfigError, match=r"transport='rdma'; accepted: .* \(from environment: LMCACHE_EC_TRANSPORT\)"):
        make(role)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "/is/not/there")
    with pytest.raises(ConfigError, match="LMCACHE_CONFIG_FILE='/is/not/there'"):
        make(role)


def test_an_old_vllm_is_refused(make, monkeypatch):
    monkeypatch.delattr(ECConnectorBase, "take_unavailable_requests")
    with pytest.raises(ConfigError, match=r"accepted: vLLM 0\.30"):
        make()


def test_request_local_names_are_said_aloud_once(make, caplog):
    scheduler = make(cache_gb=0)
    worker = make(ECConnectorRole.WORKER, cache_gb=0)
    assert isinstance(scheduler._scheduler, NoSharing)
    assert worker._worker is None
    assert [r.levelname for r in caplog.records if "NOTHING IS SHARED" in r.message] == ["WARNING"]
    r = request("a")
    assert scheduler.ensure_cache_available(r, 0)
    assert not scheduler.has_cache_item("a")
    scheduler.update_state_after_alloc(r, 0)
    assert scheduler.request_finished(r) == (False, None)
    assert scheduler.get_ec_connector_stats().data == {"local_encodes": {"not_shared": 1}}


def test_a_connector_that_cannot_be_made_goes_on_without_sharing(make, monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError("no sockets left")

    monkeypatch.setattr("ec_p2p.connector.connector.NodeClient", fail)
    scheduler, worker = make(), make(ECConnectorRole.WORKER)
    assert scheduler.ensure_cache_available(request("a"), 0)
    assert worker._worker is None
    worker.start_worker_services()
    worker.save_caches({}, "a")


def test_hooks_that_fail_answer_safely(broken):
    r, without = request("a"), request(image("a", data=without_media))
    assert broken.ensure_cache_available(r, 0) is True
    assert broken.has_cache_item("a") is False
    broken.update_state_after_alloc(r, 0)
    meta = broken.build_connector_meta(step())
    assert isinstance(meta, ECP2PMetadata)
    assert broken.ensure_cache_available(without, 0) is False
    assert broken.take_unavailable_requests() == {without.request_id}
    assert broken.request_finished(r) == (False, None)
    assert broken.has_pending_push_work() is False
    assert broken.get_ec_connector_stats() is None
    assert set(broken.counts.take()["hook_errors"]) >= {"ensure_cache_available", "build_connector_meta"}


def test_a_failure_is_logged_once_and_counted_always(broken, caplog):
    for _ in range(5):
        assert broken.ensure_cache_available(request("a"), 0)
    assert len([r for r in caplog.records if "ensure_cache_available failed" in r.message]) == 1
    assert broken.counts.take()["hook_errors"] == {"ensure_cache_available": 5}


def test_even_a_request_that_makes_no_sense_fails_alone(make):
    connector = make()
    nonsense = SimpleNamespace(request_id="r", mm_features=[SimpleNamespace(mm_position=None)])
    assert connector.ensure_cache_available(nonsense, 0) is False
    assert connector.take_unavailable_requests() == {"r"}


def test_a_promised_load_outlives_a_failing_hook(make, node, clock):
    connector = on(make(), Harness(node, clock, "ec_both").side)
    node.holds = {"a": 10}
    r = request("a")
    assert connector.ensure_cache_available(r, 0)
    connector.update_state_after_alloc(r, 0)
    node.poll = None
    assert [identifier for identifier, _ in connector.build_connector_meta(step()).loads] == ["a"]


def test_worker_hooks_that_fail(make):
    worker = make(ECConnectorRole.WORKER)
    worker.bind_connector_metadata(ECP2PMetadata(encodes={"a": b"A" * 32}))
    worker.save_caches({}, "a")
    worker.start_save_caches()
    assert worker.counts.take()["hook_errors"] == {"save_caches": 1}


def test_worker_hooks_without_a_step(make):
    worker = make(ECConnectorRole.WORKER)
    worker.start_load_caches({})
    worker.save_caches({}, "a")
    worker.start_worker_services()
    assert worker.get_finished(set()) == (None, None)
    assert worker.build_connector_worker_meta() is None


def test_consumers_do_not_save(make):
    worker = make(ECConnectorRole.WORKER, ec_role="ec_consumer")
    worker.bind_connector_metadata(ECP2PMetadata(encodes={"a": b"A" * 32}))
    worker.save_caches({}, "a")  # looking for "a" would be an error
    assert worker.counts.take() == {}


def test_every_hook_of_vllm_is_covered():
    """A hook that a later vLLM adds shows up here, and is then thought about."""
    known = {
        "bind_connector_metadata",
        "build_connector_meta",
        "build_connector_worker_meta",
        "build_ec_connector_stats",
        "build_prom_metrics",
        "clear_connector_metadata",
        "ensure_cache_available",
        "get_ec_connector_stats",
        "get_finished",
        "has_cache_item",
        "has_pending_push_work",
        "register_caches",
        "request_finished",
        "save_caches",
        "shutdown",
        "start_load_caches",
        "start_save_caches",
        "start_worker_services",
        "take_unavailable_requests",
        "update_connector_output",
        "update_state_after_alloc",
        "update_state_after_free",
    }
    found = {name for name, _ in inspect.getmembers(ECConnectorBase, callable) if not name.startswith("_")}
    assert found == known
    assert not ECP2PConnector.__abstractmethods__


def test_counts_start_empty(make):
    assert isinstance(make().counts, Counts)
    assert make().get_ec_connector_stats() is None
