"""RDMA devices, addresses, NIXL and vLLM: what is said of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ec_p2p.cli.doctor import network, software
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config
from ec_p2p.transport import nixl_available

OVER_NIXL = make_config({"transport": "nixl"})


def port(root: Path, device: str, state: str) -> None:
    folder = root / device / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in (("state", state), ("rate", "400 Gb/sec"), ("link_layer", "Ethernet")):
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("settings", "level", "says", "mend"),
    [
        ({"transport": "nixl"}, Level.NOTE, "goes over TCP", "zmq is the safe choice"),
        ({"transport": "nixl", "ucx_tls": "rc,sm"}, Level.NOTE, "ucx_tls allows no TCP", "/dev/infiniband"),
        ({"transport": "nixl", "ucx_tls": "^tcp"}, Level.NOTE, "ucx_tls allows no TCP", "/dev/infiniband"),
        ({"transport": "nixl", "nixl_backend": "LIBFABRIC"}, Level.NOTE, "depends on LIBFABRIC", "/dev/infiniband"),
        ({"transport": "zmq"}, Level.OK, "none is used, since the transport is zmq", ""),
    ],
)
def test_no_rdma_device(tmp_path: Path, settings: dict[str, object], level: Level, says: str, mend: str) -> None:
    assert network.rdma(tmp_path / "none") == []
    finding = network.rdma_devices(make_config(settings), [])
    assert (finding.level, says in finding.says, mend in finding.mend) == (level, True, True), finding
    assert ("TCP" in finding.mend) == ("over TCP" in finding.says)


def test_one_active_port_is_enough(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "4: ACTIVE")
    port(tmp_path, "mlx5_1", "1: DOWN")
    finding = network.rdma_devices(OVER_NIXL, network.rdma(tmp_path))
    assert finding.level is Level.OK
    assert "mlx5_0/1: 4: ACTIVE, 400 Gb/sec, Ethernet" in finding.says


def test_ports_that_are_all_down(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_1", "1: DOWN")
    assert network.rdma_devices(OVER_NIXL, network.rdma(tmp_path)).level is Level.PROBLEM


def test_an_address_for_this_host_only() -> None:
    finding = network.addresses(make_config({"ec_ip": "127.0.0.1"}))
    assert finding.level is Level.NOTE
    assert "127.0.0.1" in finding.says


@pytest.mark.parametrize(("transport", "level"), [("auto", Level.NOTE), ("nixl", Level.PROBLEM), ("zmq", Level.OK)])
def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, transport: str, level: Level) -> None:
    monkeypatch.setattr(software, "nixl_available", lambda: False)
    assert software.nixl(make_config({"transport": transport})).level is level


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
