"""What settings are called in each source, and what is said of names that mean nothing."""

from __future__ import annotations

import logging
import re

import pytest

from ec_p2p.config import Config, ConfigError
from ec_p2p.config_sources import explain_ec_engine_config, load_ec_engine_config


@pytest.mark.parametrize(
    ("content", "environ", "own"),
    [
        ({"ec_ip": "10.0.0.1"}, {}, {}),
        ({"ec_ec_ip": "10.0.0.1"}, {}, {}),
        ({"ec": {"ip": "10.0.0.1"}}, {}, {}),
        ({"ec": {"ec_ip": "10.0.0.1"}}, {}, {}),
        ({"EC": {"IP": "10.0.0.1"}}, {}, {}),
        ({"EC_Ip": "10.0.0.1"}, {}, {}),
        ({}, {"LMCACHE_EC_IP": "10.0.0.1"}, {}),
        ({}, {"LMCACHE_EC_EC_IP": "10.0.0.1"}, {}),
        ({}, {"lmcache_ec_ip": "10.0.0.1"}, {}),
        ({}, {}, {"ec_ip": "10.0.0.1"}),
        ({}, {}, {"lmcache.ec_ip": "10.0.0.1"}),
        ({}, {}, {"LMCache.EC_ip": "10.0.0.1"}),
    ],
)
def test_prefixed_names_in_either_case_and_with_one_prefix_where_the_name_has_it(file, content, environ, own):
    assert load_ec_engine_config(own, config_file=file(content), environ=environ).ec_ip == "10.0.0.1"


def test_of_two_spellings_in_the_environment_the_one_in_upper_case_wins():
    both = {"LMCACHE_EC_EXPECT_S": "1", "lmcache_ec_expect_s": "2"}
    for environ in (both, dict(reversed(both.items()))):
        assert load_ec_engine_config(environ=environ).expect_s == 1


def test_a_plain_name_wins_over_its_prefixed_form_whatever_their_order_and_that_is_said(caplog):
    caplog.set_level(logging.INFO)
    for own in ({"expect_s": 1, "lmcache.ec_expect_s": 2}, {"lmcache.ec_expect_s": 2, "expect_s": 1}):
        assert load_ec_engine_config(own, environ={}).expect_s == 1
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "lmcache.ec_expect_s is not used: 'expect_s' beside it" in record.getMessage()


@pytest.mark.parametrize(
    ("content", "environ", "own", "said"),
    [
        (
            {"ec_local_dsk": "/a"},
            {},
            {},
            "{file}: ec_local_dsk is unknown and left out; the nearest known one is ec_local_disk",
        ),
        ({"ec": {"cash_policy": 1}}, {}, {}, "{file}: ec.cash_policy is unknown and left out; .* ec.cache_policy"),
        ({"ec": {5: 1}}, {}, {}, "{file}: ec.5 is unknown and left out"),
        ({}, {"LMCACHE_EC_SLABSIZE": "1"}, {}, "environment: LMCACHE_EC_SLABSIZE is unknown .* LMCACHE_EC_SLAB_SIZE"),
        ({}, {"LMCACHE_EC_": "1"}, {}, "environment: LMCACHE_EC_ is unknown and left out"),
        (
            {},
            {},
            {"lmcache.ec_peerport": 1},
            "ec_connector_extra_config: lmcache.ec_peerport is .* lmcache.ec_peer_port",
        ),
        ({}, {}, {"lmcache.local_disk": "/a"}, "lmcache.local_disk is unknown .* lmcache.ec_local_disk"),
        ({}, {"LMCACHE_EC_E_PORT": "1"}, {}, "the nearest known one is LMCACHE_EC_(PEER_)?PORT"),
    ],
)
def test_an_unknown_prefixed_name_is_said_once_with_the_nearest_known_one_and_left_out(
    file, caplog, content, environ, own, said
):
    path = file(content)
    for _ in range(3):
        assert load_ec_engine_config(own, config_file=path, environ=environ) == Config()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(said.replace("{file}", re.escape(path)), record.getMessage())


@pytest.mark.parametrize(
    "name",
    ["chunk_size", "use_layerwise", "nixl_buffer_size", "enable_p2p", "p2p_host", "blend_thresholds", "extra_config"],
)
def test_settings_of_lmcache_without_a_meaning_here_are_no_warning(file, caplog, name):
    caplog.set_level(logging.INFO)
    path = file({f"ec_{name}": 1, "ec": {name: 1}})
    own = {f"lmcache.ec_{name}": 1, f"lmcache.{name}": 1}
    for _ in range(2):
        assert load_ec_engine_config(own, config_file=path, environ={f"LMCACHE_EC_{name.upper()}": "1"}) == Config()
    assert len(caplog.records) == 5
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert all("is LMCache's and has no meaning here" in record.getMessage() for record in caplog.records)


def test_an_unknown_plain_name_is_refused():
    with pytest.raises(ConfigError, match=r"'ec_local_disk' \(value '/a'\).*'local_disk' \(from the command line\)"):
        explain_ec_engine_config({"ec_local_disk": "/a"}, environ={}, origin="the command line")
    with pytest.raises(ConfigError, match="unknown setting 'chunk_size'"):
        load_ec_engine_config({"chunk_size": 256}, environ={})
