import json

import pytest

from ec_p2p.config import GIB, Config, ConfigError, as_settings, make_config, parse_size


def test_nothing_set_gives_the_defaults():
    assert make_config({}) == Config()
    assert make_config({}).max_local_cpu_size == GIB


def test_an_unknown_setting_is_refused_and_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"'max_local_cpu_sze' \(value 2\).*'max_local_cpu_size'"):
        make_config({"max_local_cpu_sze": 2})


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(1, GIB), (0.5, GIB // 2), ("2", 2 * GIB), ("512MiB", 512 << 20), ("512 mib", 512 << 20), ("65536B", 65536)],
)
def test_arena_sizes_are_gib_or_carry_a_unit(value, nbytes):
    assert make_config({"max_local_cpu_size": value}).max_local_cpu_size == nbytes


def test_other_sizes_are_bytes_or_carry_a_unit():
    config = make_config({"slab_size": 1 << 20, "window_size": "1MiB"})
    assert (config.slab_size, config.window_size) == (1 << 20, 1 << 20)


@pytest.mark.parametrize("value", ["lots", -3, 0, "-1GiB", "5 parsecs", None, [1], True, float("inf"), float("nan")])
def test_a_bad_size_names_the_key_the_value_and_what_is_accepted(value):
    with pytest.raises(ConfigError, match=r"(?s)max_local_cpu_size=.*accepted: .*GiB"):
        make_config({"max_local_cpu_size": value})
    with pytest.raises(ConfigError, match="bytes"):
        parse_size("slab_size", value, bare_unit=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transport", "rdma"),
        ("log_level", "LOUD"),
        ("fetch_timeout_s", 0),
        ("fetch_timeout_s", -1),
        ("read_timeout_s", float("nan")),
        ("expect_s", -0.1),
        ("peer_port", 70000),
        ("ec_port", 0),
        ("directory", "somewhere:1"),
        ("directory", ["tcp://a:1", "b"]),
        ("directory", [1]),
        ("grace_s", "long"),
        ("spawn_node", "yes"),
        ("node_name", 5),
        ("node_timeout_s", 0.5),
        ("node_group", "staff"),
        ("node_name", "n" * 201),
        ("node_socket", "/tmp/" + "n" * 100),
        ("max_local_cpu_size", "1KiB"),
        ("slab_size", 4096),
        ("directory", "ipc://directory"),
        ("directory", "tcp://host"),
    ],
)
def test_a_bad_value_names_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        make_config({key: value})


def test_one_directory_or_several():
    assert make_config({"ec_ip": "10.0.0.1", "ec_port": 5}).directories == ("tcp://10.0.0.1:5",)
    assert make_config({"directory": "tcp://a:1"}).directories == ("tcp://a:1",)
    assert make_config({"directory": ["tcp://a:1", "tcp://b:2"]}).directories == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"node_name": "host1", "max_local_cpu_size": 0.25, "slab_size": "64MiB", "window_size": 4096},
        {"directory": ["tcp://a:1", "tcp://b:2"], "ec_port": 99, "share_fetched": False, "expect_s": 0},
    ],
)
def test_a_configuration_survives_being_written_down(settings):
    config = make_config(settings)
    assert make_config(json.loads(json.dumps(as_settings(config)))) == config
