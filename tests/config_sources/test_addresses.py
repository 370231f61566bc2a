"""Addresses that others are told."""

from __future__ import annotations

import os

import pytest

from ec_p2p.config import Config, ConfigError
from ec_p2p.config_sources import explain_ec_engine_config
from ec_p2p.control.codec import decode, encode
from ec_p2p.control.messages import Hello, NodeInfo, ToDirectory

LONGEST = "h" * 243


def config(host: str) -> Config:
    return explain_ec_engine_config({"advertise_host": host}).config


def test_the_longest_address_that_is_accepted_is_one_that_directories_take() -> None:
    info = NodeInfo(os.urandom(16), "node", f"tcp://{config(LONGEST).advertise_host}:65535")
    hello: Hello = decode(encode(Hello(1, info)), ToDirectory)
    assert hello.node == info


def test_a_longer_one_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        config(LONGEST + "h")
    said = str(raised.value)
    assert "advertise_host" in said
    assert LONGEST + "h" in said
    assert "accepted: text of at most 243 bytes" in said
