"""Which source wins, and that good settings pass in silence."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.config import DEFAULTS, KINDS, Config
from ec_p2p.config_kinds import (
    GIB,
    Endpoints,
    Folder,
    Keys,
    Kind,
    Name,
    Parameters,
    Port,
    Seconds,
    Size,
    Switch,
    Text,
    Word,
)
from ec_p2p.config_sources import Loaded, explain_ec_engine_config, load_ec_engine_config
from tests.config_sources.layers import INHERITED, LAYERS, explain, source_in

GOOD: dict[str, object] = {
    "node_name": "host1",
    "node_socket": "/run/ec/node",
    "node_group": "staff",
    "spawn_node": False,
    "grace_s": 0,
    "metrics_port": -1,
    "metrics_host": "0.0.0.0",
    "log_file": "/var/log/ec",
    "log_level": "debug",
    "local_cpu": True,
    "max_local_cpu_size": 0.5,
    "slab_size": "64MiB",
    "cache_policy": "gdsf",
    "local_disk": "file:///mnt/ec",
    "max_local_disk_size": "100GiB",
    "disk_queue_size": 1,
    "disk_fsync": True,
    "transport": "zmq",
    "nixl_backend": "Mooncake",
    "nixl_params": {"num_workers": 2, "ucx_devices": "mlx5_0"},
    "ucx_tls": "rc,cuda,sm",
    "landing": "DEVICE",
    "landing_size": "512MiB",
    "fetch_policy": "cheaper",
    "fetch_timeout_s": 1.5,
    "read_timeout_s": 1,
    "expect_s": 0.25,
    "inline_wait_s": 0.0,
    "share_fetched": False,
    "directory": ["tcp://a:1", "tcp://b:2"],
    "embedded_directory": False,
    "directory_pub_port": 5,
    "bind_host": "10.0.0.1",
    "advertise_host": "10.0.0.2",
    "peer_port": 6,
    "heartbeat_s": 2,
    "node_timeout_s": 9,
    "security": "/etc/ec.key",
    "require_encryption": True,
    "namespace": "n-1",
    "window_size": "1MiB",
    "ec_ip": "10.0.0.9",
    "ec_port": 7,
}


def test_nothing_set_anywhere_gives_the_defaults_of_the_design():
    loaded = explain_ec_engine_config(environ={})
    assert loaded == Loaded(Config(), dict.fromkeys(KINDS, "default"), "")
    assert loaded.config.local_cpu is True
    assert loaded.config.max_local_cpu_size == GIB
    assert loaded.config.local_disk == ""
    assert load_ec_engine_config({"local_disk": "/mnt/ec"}, environ={}).max_local_disk_size == 64 * GIB


@pytest.mark.parametrize("layer", LAYERS[1:])
def test_every_setting_can_be_set_in_every_layer_and_nothing_is_said_about_it(tmp_path, caplog, layer):
    caplog.set_level(logging.DEBUG)
    assert list(GOOD) == list(KINDS), "a setting is missing here"
    path = tmp_path / "lmcache.yaml"
    loaded = explain(path, **{layer: GOOD})
    assert loaded.config == Config(**{name: kind.check(GOOD[name]) for name, kind in KINDS.items()})
    assert loaded.sources == {name: source_in(layer, name, path) for name in KINDS}
    assert loaded.config_file == str(path)
    assert caplog.records == []


def test_a_file_of_lmcache_gives_what_lmcache_has_too_and_nothing_is_said_about_the_rest(file, caplog):
    caplog.set_level(logging.DEBUG)
    path = file(
        {
            "chunk_size": 256,
            "local_cpu": True,
            "max_local_cpu_size": 5.0,
            "local_disk": "file:///mnt/nvme/",
            "max_local_disk_size": 100,
            "cache_policy": "lru",
            "remote_url": "redis://a:1",
            "extra_config": {"ec_local_disk": "/no"},
            "transport": "carrier pigeon",
            "heartbeat_s": "never",
            "disk_fsync": True,
        }
    )
    loaded = explain_ec_engine_config(config_file=path, environ={})
    assert loaded.config == Config(
        max_local_cpu_size=5 * GIB, local_disk="/mnt/nvme/", max_local_disk_size=100 * GIB, cache_policy="LRU"
    )
    named = {name: source for name, source in loaded.sources.items() if source != "default"}
    assert named == {name: f"{path}: {name}" for name in ("local_cpu", *INHERITED)}
    assert caplog.records == []


@pytest.mark.parametrize(("lower", "higher"), list(itertools.pairwise(LAYERS)))
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_local_cpu_size", "1MiB", "2MiB"),
        ("local_disk", "/low", "/high"),
        ("max_local_disk_size", 3, 0.25),
        ("cache_policy", "GDSF", "LRU"),
    ],
)
def test_of_two_neighbouring_layers_the_higher_one_wins(tmp_path, lower, higher, name, low, high):
    path = tmp_path / "lmcache.yaml"
    loaded = explain(path, **{lower: {name: low}, higher: {name: high}})
    assert getattr(loaded.config, name) == KINDS[name].check(high)
    assert loaded.sources[name] == source_in(higher, name, path)
    alone = explain(path, **{lower: {name: low}})
    assert getattr(alone.config, name) == KINDS[name].check(low)
    assert alone.sources[name] == source_in(lower, name, path)


def good_values(kind: Kind) -> st.SearchStrategy[Any]:
    match kind:
        case Switch():
            return st.booleans()
        case Size(bare_unit=bare, least=least):
            most = 512 * GIB if bare == GIB else 1 << 50  # an arena has so many slabs of the usual size, and no more
            bytes_ = st.integers(least, most).map("{}B".format)
            bare_ones = st.floats(0.001, 512) if bare == GIB else st.integers(least, most)
            return st.one_of(bytes_, bare_ones, st.sampled_from(["64KiB", "1.5 MiB", "2gib", "0.5TiB"]))
        case Seconds():
            return st.one_of(st.integers(1, 1000), st.floats(0.001, 10**6))
        case Port(least=least):
            return st.integers(least, 65535)
        case Word(choices=choices):
            return st.sampled_from(choices).flatmap(lambda word: st.sampled_from([word, word.upper(), word.lower()]))
        case Text():
            return st.text("abcXYZ019 ._-/:#{}[]'\"\\%é字", min_size=1, max_size=12).filter(str.strip)
        case Name():
            return st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", fullmatch=True)
        case Parameters():
            values = st.one_of(st.text("abc 1:,=字", max_size=5), st.integers(), st.booleans(), st.floats(0, 9))
            return st.dictionaries(st.text("abz_", min_size=1, max_size=5).map("n{}".format), values, max_size=3)
        case Folder():
            return st.sampled_from(["/a", "/a b/c", "file:///a", "/"])
        case Keys():
            return st.sampled_from(["/etc/ec.key", "/run/secrets/a b"])
        case Endpoints():
            some = st.sampled_from(["tcp://a:1", "tcp://[::1]:2", "tcp://10.0.0.1:65535"])
            return st.lists(some, min_size=1, max_size=3)
    raise AssertionError(kind)


# Apart from what depends on another setting, and from the tier that is always on.
BOUND = (
    "node_group",
    "heartbeat_s",
    "node_timeout_s",
    "require_encryption",
    "local_cpu",
    "slab_size",
)
FREE = [name for name in KINDS if name not in BOUND]
CLEARED = [name for name in FREE if getattr(DEFAULTS, name) in ("", (), {})]


def layer_of(name: str) -> st.SearchStrategy[dict[str, object]]:
    names = {"base": INHERITED}.get(name, FREE)
    values = {
        setting: st.one_of(
            good_values(KINDS[setting]), *([st.none()] if name != "environment" or setting in CLEARED else [])
        )
        for setting in names
    }
    return st.lists(st.sampled_from(names), unique=True, max_size=6).flatmap(
        lambda some: st.fixed_dictionaries({setting: values[setting] for setting in some})
    )


@given(layers=st.fixed_dictionaries({name: layer_of(name) for name in LAYERS}))
def test_whatever_is_set_the_highest_layer_wins(tmp_path_factory, layers):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    loaded = explain(path, **layers)
    expected, sources = {}, dict.fromkeys(KINDS, "default")
    for layer in LAYERS:
        for name, value in layers[layer].items():
            if layer == "base" and value is None:
                continue
            expected[name] = getattr(DEFAULTS, name) if value is None else KINDS[name].check(value)
            sources[name] = source_in(layer, name, path)
    assert loaded.config == Config(**expected)
    assert loaded.sources == sources


def test_an_explicit_file_is_read_instead_of_the_one_in_the_environment(file):
    path = file({"ec_transport": "zmq"})
    environ = {"LMCACHE_CONFIG_FILE": "/is/not/there"}
    for explicit in (path, Path(path)):
        assert load_ec_engine_config(config_file=explicit, environ=environ).transport == "zmq"


def test_the_environment_of_this_process_is_read_unless_another_is_given(monkeypatch, file):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", file({"ec_transport": "zmq"}))
    monkeypatch.setenv("LMCACHE_EC_EXPECT_S", "3")
    config = load_ec_engine_config()
    assert (config.transport, config.expect_s) == ("zmq", 3.0)
    assert load_ec_engine_config(environ={}) == Config()


@pytest.mark.parametrize("content", ["", "# nothing but a comment\n", "ec:\n", "{}"])
def test_a_file_may_be_empty(file, content):
    assert load_ec_engine_config(config_file=file(content), environ={}) == Config()


def test_no_file_is_named_by_an_empty_variable():
    assert explain_ec_engine_config(environ={"LMCACHE_CONFIG_FILE": ""}).config_file == ""


def test_what_was_given_is_not_changed():
    extra, environ = {"lmcache.ec_expect_s": 2, "node_name": "a"}, {"LMCACHE_EC_EXPECT_S": "1"}
    load_ec_engine_config(extra, environ=environ)
    assert (extra, environ) == ({"lmcache.ec_expect_s": 2, "node_name": "a"}, {"LMCACHE_EC_EXPECT_S": "1"})
