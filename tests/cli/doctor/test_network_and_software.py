"""RDMA devices, addresses, NIXL and UCX: what is said of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ec_p2p.cli.doctor import network, software
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config
from ec_p2p.transport import nixl_available


def port(root: Path, device: str, state: str) -> None:
    folder = root / device / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in (("state", state), ("rate", "400 Gb/sec"), ("link_layer", "Ethernet")):
        (folder / name).write_text(f"{text}\n")


def test_no_rdma_device_is_worth_a_note(tmp_path: Path) -> None:
    assert network.rdma(tmp_path / "none") == []
    assert network.rdma_devices([]).level is Level.NOTE


def test_one_active_port_is_enough(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "4: ACTIVE")
    port(tmp_path, "mlx5_1", "1: DOWN")
    finding = network.rdma_devices(network.rdma(tmp_path))
    assert finding.level is Level.OK
    assert "mlx5_0/1: 4: ACTIVE, 400 Gb/sec, Ethernet" in finding.says


def test_ports_that_are_all_down(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_1", "1: DOWN")
    assert network.rdma_devices(network.rdma(tmp_path)).level is Level.PROBLEM


def test_an_address_for_this_host_only() -> None:
    finding = network.addresses(make_config({"ec_ip": "127.0.0.1"}))
    assert finding.level is Level.NOTE
    assert "127.0.0.1" in finding.says


@pytest.mark.parametrize(("transport", "level"), [("auto", Level.NOTE), ("nixl", Level.PROBLEM), ("zmq", Level.OK)])
def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, transport: str, level: Level) -> None:
    monkeypatch.setattr(software, "nixl_available", lambda: False)
    assert software.nixl(make_config({"transport": transport})).level is level


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, Level.OK),
        ({"UCX_TLS": "all", "HOME": "/"}, Level.OK),
        ({"UCX_TLS": "rc,sm,self"}, Level.OK),
        ({"UCX_TLS": "^tcp"}, Level.OK),
        ({"UCX_TLS": "tcp,self"}, Level.NOTE),
        ({"UCX_TLS": "sm,self,cuda"}, Level.PROBLEM),
        ({"UCX_KEEPALIVE_INTERVAL": "20s"}, Level.PROBLEM),
    ],
)
def test_settings_of_ucx(environment: dict[str, str], level: Level) -> None:
    finding = software.ucx_settings(make_config({}), environment)
    assert finding.level is level
    assert "HOME" not in finding.says
    configured = make_config({"ucx_tls": environment["UCX_TLS"]} if "UCX_TLS" in environment else {})
    others = {"UCX_TLS": "cma", **{name: value for name, value in environment.items() if name != "UCX_TLS"}}
    if configured.ucx_tls:
        finding = software.ucx_settings(configured, others)
        assert (finding.level, "UCX_TLS=cma" in finding.says) == (level, False), "the configuration wins"
    assert software.ucx_settings(make_config({"transport": "zmq"}), environment).level is Level.OK


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
def test_the_backends_that_nixl_has_and_whether_the_configured_one_is_among_them() -> None:
    finding = software.nixl(make_config({}))
    assert finding.level is Level.OK
    assert re.search(r"backends between hosts: (\w+, )*UCX.*; nixl_backend is UCX$", finding.says)
    finding = software.nixl(make_config({"nixl_backend": "NO_SUCH"}))
    assert finding.level is Level.PROBLEM
    assert finding.says.endswith("; nixl_backend NO_SUCH is not among the first")
    assert re.match(r"set nixl_backend to one of (\w+, )*UCX, ", finding.mend)
    assert software.nixl(make_config({"nixl_backend": "NO_SUCH", "transport": "zmq"})).level is Level.OK


@pytest.mark.parametrize(("version", "level"), [("0.29.1", Level.PROBLEM), ("0.32.0", Level.OK), ("", Level.NOTE)])
def test_versions_of_vllm(monkeypatch: pytest.MonkeyPatch, version: str, level: Level) -> None:
    monkeypatch.setattr(software, "version_of", lambda name: version if name == "vllm" else "")
    assert software.vllm().level is level
