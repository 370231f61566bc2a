import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.config import KINDS, Config, ConfigError, as_settings, check_value, make_config, parse_size
from ec_p2p.config_kinds import GIB, Size, readable_size


def test_nothing_set_gives_the_defaults():
    assert make_config({}) == Config()
    assert make_config({}).max_local_cpu_size == GIB


def test_an_unknown_setting_is_refused_and_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"'max_local_cpu_sze' \(value 2\).*'max_local_cpu_size'"):
        make_config({"max_local_cpu_sze": 2})


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("1099511627775B", (1 << 40) - 1),
        (1, GIB),
        (0.5, GIB // 2),
        ("2", 2 * GIB),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("65536B", 65536),
    ],
)
def test_arena_sizes_are_gib_or_carry_a_unit(value, nbytes):
    assert make_config({"max_local_cpu_size": value, "slab_size": "1GiB"}).max_local_cpu_size == nbytes


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
        ("nixl_backend", ""),
        ("nixl_backend", "../plugin"),
        ("nixl_backend", "n" * 65),
        ("nixl_backend", 5),
        ("nixl_params", "num_workers=2"),
        ("nixl_params", ["num_workers"]),
        ("nixl_params", {"num_workers": None}),
        ("nixl_params", {"num_workers": {}}),
        ("nixl_params", {"num workers": 2}),
        ("nixl_params", {5: "2"}),
        ("nixl_params", {"a": "b\0"}),
        ("nixl_params", {"a": "n" * 4097}),
        ("ucx_tls", ["rc"]),
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
        ("directory", "tcp://host:65536"),
        ("directory", "tcp://a:1 tcp://b:2"),
        ("directory", "valkey://host"),
        ("directory", "valkey://host:0/fleet"),
        ("directory", "valkey://host:1/fleet/2"),
        ("directory", "valkey://host:1/fleet?db=2"),
        ("directory", "valkey://host:1/fleet?ssl_ca_certs=/ca.pem"),
        ("directory", {}),
        ("local_cpu", "off"),
        ("local_disk", "cache"),
        ("local_disk", "./cache"),
        ("local_disk", "file://cache"),
        ("local_disk", "file://"),
        ("local_disk", "~nobody-of-this-name/cache"),
        ("local_disk", "/a,/b"),
        ("local_disk", 5),
        ("max_local_disk_size", "lots"),
        ("max_local_disk_size", 0),
        ("cache_policy", "LFU"),
        ("cache_policy", None),
        ("disk_queue_size", 0),
        ("disk_queue_size", 0.5),
        ("disk_fsync", "yes"),
        ("metrics_port", -2),
        ("peer_port", "1"),
        ("peer_port", True),
        ("grace_s", True),
        ("grace_s", 10**400),
        ("namespace", "a\0b"),
        ("namespace", "\ud800"),
    ],
)
def test_a_bad_value_names_its_key_itself_and_what_is_accepted(key, value):
    with pytest.raises(ConfigError, match=rf"^{key}={re.escape(repr(value))}.*accepted: .+"):
        make_config({key: value})


def test_an_arena_has_not_more_slabs_than_a_card_can_tell_of():
    """A card that is too large is never read: to its peers such a node would be there, and yet not."""
    most = {"max_local_cpu_size": f"{2048 * (64 << 10)}B", "slab_size": 64 << 10}
    assert make_config(most).slab_size == 64 << 10
    with pytest.raises(ConfigError, match=r"^slab_size=65536 with max_local_cpu_size=134217729; accepted: 65537 bytes"):
        make_config({**most, "max_local_cpu_size": f"{2048 * (64 << 10) + 1}B"})


def test_every_default_is_a_value_that_is_accepted():
    for name, kind in KINDS.items():
        default = getattr(Config(), name)
        assert check_value(name, f"{default}B" if isinstance(kind, Size) else default) == default


@pytest.mark.parametrize("value", ["gdsf", "Gdsf", "GDSF"])
def test_words_may_be_written_in_either_case(value):
    assert make_config({"cache_policy": value}).cache_policy == "GDSF"


def test_the_first_tier_is_always_on():
    assert make_config({"local_cpu": False}).local_cpu is True


@pytest.mark.parametrize(
    ("value", "folder"),
    [("", ""), ("/var/cache/ec", "/var/cache/ec"), ("file:///mnt/ec/", "/mnt/ec/"), ("~/ec", "/home/somebody/ec")],
)
def test_the_folder_of_the_disk_tier(monkeypatch, value, folder):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert make_config({"local_disk": value}).local_disk == folder


def test_one_directory_or_several():
    assert make_config({"ec_ip": "10.0.0.1", "ec_port": 5}).directories == ("tcp://10.0.0.1:5",)
    assert make_config({"directory": "tcp://a:1"}).directories == ("tcp://a:1",)
    assert make_config({"directory": ["tcp://a:1", "tcp://b:2"]}).directories == ("tcp://a:1", "tcp://b:2")
    assert make_config({"directory": "tcp://a:1, tcp://b:2"}).directories == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize(
    "endpoint",
    [
        "valkey://host:6379",
        "redis://host:6379/fleet-1",
        "valkeys://user:p%40ss@[::1]:6379/a.b_c",
        "rediss://:word@host:1/x?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem",
        "valkey://user@host:1?password_file=/run/secrets/valkey",
    ],
)
def test_a_directory_may_be_a_server_that_others_run(endpoint):
    assert make_config({"directory": [endpoint, "tcp://a:1"]}).directories == (endpoint, "tcp://a:1")
    assert make_config({"directory": f"{endpoint}, tcp://a:1"}).directories == (endpoint, "tcp://a:1")


def test_parameters_of_a_library_are_text_whatever_yaml_made_of_them():
    given = {"num_workers": 2, "ratio": 0.5, "use_uring": True, "use_aio": False, "ucx_devices": "mlx5_0", "empty": ""}
    config = make_config({"nixl_params": given})
    assert config.nixl_params == {
        "num_workers": "2",
        "ratio": "0.5",
        "use_uring": "true",
        "use_aio": "false",
        "ucx_devices": "mlx5_0",
        "empty": "",
    }
    assert make_config({}).nixl_params is not make_config({}).nixl_params


def test_passwords_are_not_quoted():
    with pytest.raises(ConfigError) as caught:
        make_config({"directory": ["valkey://me:hunter2@host:99999/x"]})
    assert str(caught.value).startswith("directory=['valkey://...@host:99999/x']; accepted: ")


def test_where_encryption_is_required_such_a_server_is_reached_over_tls():
    keys = {"require_encryption": True, "security": "/keys"}
    assert make_config({**keys, "directory": "valkeys://host:1"}).require_encryption
    for endpoint in ("valkey://host:1", "redis://me:hunter2@host:1"):
        with pytest.raises(
            ConfigError, match=r"^require_encryption=True with directory=.*; accepted: 'valkeys://'"
        ) as caught:
            make_config({**keys, "directory": ["tcp://a:1", endpoint]})
        assert caught.value.names == ("require_encryption", "directory")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"node_name": "host1", "max_local_cpu_size": 0.25, "slab_size": "64MiB", "window_size": 4096},
        {"local_disk": "/var/cache/ec", "max_local_disk_size": 5, "cache_policy": "GDSF", "disk_fsync": True},
        {"directory": ["tcp://a:1", "tcp://b:2"], "ec_port": 99, "share_fetched": False, "expect_s": 0},
        {"nixl_backend": "UCX_MO", "nixl_params": {"num_workers": 2}, "ucx_tls": "rc,sm"},
    ],
)
def test_a_configuration_survives_being_written_down(settings):
    config = make_config(settings)
    assert make_config(json.loads(json.dumps(as_settings(config)))) == config


@given(st.integers(1, (1 << 60) - 1))
def test_a_readable_size_is_read_as_the_same_size(nbytes):
    text = readable_size(nbytes)
    assert Size().check(text) == Size(bare_unit=GIB).check(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"), [(GIB, "1GiB"), (3 << 19, "1536KiB"), (65537, "65537B"), (5 << 40, "5TiB")]
)
def test_a_readable_size_has_the_largest_unit_that_fits(nbytes, text):
    assert readable_size(nbytes) == text


def test_the_documentation_has_every_setting_in_its_tables_and_in_its_sample():
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text.partition("## The host's node")[2], re.MULTILINE)
    assert sorted(rows) == sorted([*KINDS, "ec_role"])
    assert re.findall(r"^    (\w+) +\S+ +(?:default|.+: [\w.]+)$", text, re.MULTILINE) == list(KINDS)
