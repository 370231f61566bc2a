"""What a value may be in each source, and how a bad one is refused."""

from __future__ import annotations

import logging
import re

import pytest

from ec_p2p.config import Config, ConfigError
from ec_p2p.config_kinds import GIB
from ec_p2p.config_sources import load_ec_engine_config
from tests.config_sources.layers import LAYERS, as_text, explain, source_in

BAD: list[tuple[str, object]] = [
    ("max_local_cpu_size", "lots"),
    ("max_local_cpu_size", -3),
    ("max_local_cpu_size", "1KiB"),
    ("max_local_disk_size", "lots"),
    ("max_local_disk_size", -3),
    ("cache_policy", "NOPE"),
    ("local_disk", "cache"),
    ("local_disk", "file://cache"),
    ("local_disk", "/a,/b"),
]
BAD_OF_OURS: list[tuple[str, object]] = [
    *BAD,
    ("max_local_cpu_size", 0),
    ("max_local_disk_size", 0),
    ("disk_queue_size", 0),
    ("cache_policy", "LFU"),
    ("local_cpu", "perhaps"),
    ("spawn_node", 2),
    ("fetch_timeout_s", "soon"),
    ("fetch_timeout_s", 0),
    ("peer_port", "http"),
    ("peer_port", 65536),
    ("directory", ["tcp://a:1", "somewhere"]),
    ("transport", ""),
    ("nixl_backend", "libplugin_UCX.so; true"),
    ("nixl_params", "num_workers"),
    ("nixl_params", {"num_workers": [2]}),
    ("log_level", "LOUD"),
    ("node_name", "n" * 201),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_bad_value_names_key_value_source_and_what_is_accepted(tmp_path, layer):
    path = tmp_path / "lmcache.yaml"
    for name, value in BAD if layer == "base" else BAD_OF_OURS:
        shown = re.escape(repr(value))
        if layer == "environment":
            # As it was written, or as it was read.
            shown = rf"('{re.escape(as_text(value))}'|{re.escape(str(value))}(\.0)?)"
        with pytest.raises(ConfigError) as caught:
            explain(path, **{layer: {name: value}})
        message = str(caught.value)
        assert re.match(rf"{name}={shown}; accepted: .+ \(from .+\)$", message), message
        assert message.endswith(f"(from {source_in(layer, name, path)})"), message


@pytest.mark.parametrize("layer", LAYERS[1:-1])
def test_a_bad_value_is_an_error_even_where_a_higher_layer_has_a_good_one(tmp_path, layer):
    with pytest.raises(ConfigError, match="fetch_timeout_s"):
        explain(tmp_path / "lmcache.yaml", **{layer: {"fetch_timeout_s": "soon"}, "plain": {"fetch_timeout_s": 5}})


def test_what_lmcache_accepts_and_this_cache_does_not_can_be_overridden(tmp_path):
    base = {"local_disk": "/mnt/a,/mnt/b", "cache_policy": "NOPE"}
    loaded = explain(
        tmp_path / "lmcache.yaml", base=base, nested={"local_disk": None}, prefixed={"cache_policy": "LRU"}
    )
    assert loaded.config == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("1", True),
        ("YES", True),
        (" on ", True),
        ("False", False),
        ("0", False),
        ("no", False),
        ("off", False),
    ],
)
def test_the_environment_says_yes_and_no_in_many_words(text, value):
    assert load_ec_engine_config(environ={"LMCACHE_EC_SHARE_FETCHED": text}).share_fetched is value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("GRACE_S", "1e2", 100.0),
        ("PEER_PORT", "14581", 14581),
        ("MAX_LOCAL_CPU_SIZE", "2.5", 5 * GIB // 2),
        ("MAX_LOCAL_CPU_SIZE", "512MiB", 512 << 20),
        ("SLAB_SIZE", "1048576", 1 << 20),
        ("NIXL_PARAMS", '{"num_workers": 2, "ucx_devices": "mlx5_0"}', {"num_workers": "2", "ucx_devices": "mlx5_0"}),
        ("DIRECTORY", "tcp://a:1", ("tcp://a:1",)),
        ("DIRECTORY", "tcp://a:1, tcp://b:2", ("tcp://a:1", "tcp://b:2")),
        ("NODE_NAME", "7", "7"),
        ("LOG_LEVEL", "warning", "WARNING"),
        ("LOCAL_DISK", "file:///mnt/ec", "/mnt/ec"),
    ],
)
def test_text_in_the_environment_is_typed_by_the_setting(name, text, value):
    assert getattr(load_ec_engine_config(environ={f"LMCACHE_EC_{name}": text}), name.lower()) == value


@pytest.mark.parametrize("nothing", ["", " ", "none", "None", "null"])
def test_the_environment_can_clear_what_is_empty_by_default(tmp_path, nothing):
    prefixed = {"local_disk": "/mnt/ec", "directory": ["tcp://a:1"], "namespace": "n", "nixl_params": {"a": "b"}}
    loaded = explain(tmp_path / "lmcache.yaml", prefixed=prefixed, environment=dict.fromkeys(prefixed, nothing))
    assert loaded.config == Config()
    assert loaded.sources["local_disk"] == "environment: LMCACHE_EC_LOCAL_DISK"
    for name in ("METRICS_PORT", "MAX_LOCAL_DISK_SIZE", "TRANSPORT", "SPAWN_NODE"):
        with pytest.raises(ConfigError, match=rf"{name.lower()}={nothing!r}"):
            load_ec_engine_config(environ={f"LMCACHE_EC_{name}": nothing})


def test_null_goes_back_to_the_default(tmp_path):
    below = {"local_disk": "/mnt/kv", "max_local_cpu_size": 5}
    for layer in ("prefixed", "nested", "lmcache", "plain"):
        loaded = explain(tmp_path / "lmcache.yaml", base=below, **{layer: dict.fromkeys(below)})
        assert loaded.config == Config()


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_ec_engine_config(environ={"LMCACHE_EC_LOCAL_DISK": "~/ec"}).local_disk == "/home/somebody/ec"


def test_the_first_tier_stays_on(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    loaded = explain(tmp_path / "lmcache.yaml", base={"local_cpu": False})
    assert loaded.config.local_cpu is True
    assert loaded.sources["local_cpu"] == "default"
    assert caplog.records == []
    for layer in LAYERS[1:]:
        assert explain(tmp_path / "lmcache.yaml", **{layer: {"local_cpu": False}}).config.local_cpu is True
        record = caplog.records.pop()
        assert record.levelno == logging.INFO
        assert "local_cpu is off, but the first tier is always on" in record.getMessage().lower()
        assert caplog.records == []


@pytest.mark.parametrize("policy", ["LFU", "fifo", "MRU"])
def test_policies_that_only_lmcache_has_fall_back(tmp_path, caplog, policy):
    caplog.set_level(logging.INFO)
    loaded = explain(tmp_path / "lmcache.yaml", base={"cache_policy": policy})
    assert (loaded.config.cache_policy, loaded.sources["cache_policy"]) == ("LRU", "default")
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"{policy} is a policy of LMCache's; here it is LRU" in record.getMessage()


def test_a_size_that_lmcache_takes_for_unset_is_unset(tmp_path):
    for unset in (0, 0.0, "0", None):
        base = {"max_local_cpu_size": unset, "local_disk": "/mnt/kv", "max_local_disk_size": unset}
        assert explain(tmp_path / "lmcache.yaml", base=base).config == Config(local_disk="/mnt/kv")


def test_settings_that_contradict_each_other_name_their_sources(tmp_path):
    path = tmp_path / "lmcache.yaml"
    with pytest.raises(ConfigError) as caught:
        explain(path, prefixed={"heartbeat_s": 5}, environment={"node_timeout_s": 4.5})
    assert source_in("prefixed", "heartbeat_s", path) in str(caught.value)
    assert source_in("environment", "node_timeout_s", path) in str(caught.value)
    with pytest.raises(ConfigError, match=r"node_group from ec_connector.*, node_socket from default"):
        explain(path, plain={"node_group": "staff"})
