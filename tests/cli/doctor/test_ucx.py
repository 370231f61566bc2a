"""Settings of UCX, judged by its own words where it has any."""

from __future__ import annotations

import pytest

from ec_p2p.cli.doctor import loopback, ucx
from ec_p2p.cli.doctor.finding import Finding, Level
from ec_p2p.cli.doctor.loopback import Attempt, Measured
from ec_p2p.config import make_config
from ec_p2p.transport import nixl_available

WENT_WELL = Attempt(Measured("nixl", 1e-5, 1e9), "", [])
with_nixl = pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")


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
def test_settings_that_need_no_word_of_ucx(environment: dict[str, str], level: Level) -> None:
    finding = ucx.settings(make_config({"transport": "nixl"}), WENT_WELL, environment)
    assert finding.level is level
    assert "HOME" not in finding.says
    assert ucx.settings(make_config({"transport": "zmq"}), WENT_WELL, environment).level is Level.OK
    if "UCX_TLS" in environment:
        configured = make_config({"transport": "nixl", "ucx_tls": environment["UCX_TLS"]})
        finding = ucx.settings(configured, WENT_WELL, {**environment, "UCX_TLS": "cma"})
        assert (finding.level, "UCX_TLS=cma" in finding.says) == (level, False), "the configuration wins"


def test_the_device_that_the_node_chooses_itself_is_told_as_such() -> None:
    chosen = "UCX_NET_DEVICES=lo (set by the node"
    local, open_to_all = {"transport": "nixl", "ec_ip": "127.0.0.1"}, {"transport": "nixl", "bind_host": "0.0.0.0"}
    assert chosen in ucx.settings(make_config(local), WENT_WELL, {}).says
    assert chosen not in ucx.settings(make_config(local), WENT_WELL, {"UCX_NET_DEVICES": "eth0"}).says
    assert chosen not in ucx.settings(make_config(open_to_all), WENT_WELL, {}).says


def judged(**settings: object) -> tuple[Finding, Finding]:
    config = make_config({"transport": "nixl", **settings})
    attempt = loopback.attempt(config)
    of_ucx = ucx.settings(config, attempt)
    return of_ucx, loopback.read(config, attempt, [of_ucx])


@pytest.mark.nixl
@with_nixl
@pytest.mark.parametrize("names", ["banana", "banana,sm", "banana,cuda,sm", "sm"])
def test_what_ucx_cannot_start_with_is_one_problem_in_its_own_words(names: str) -> None:
    of_ucx, of_the_read = judged(ucx_tls=names)
    assert of_ucx.level is Level.PROBLEM
    assert "add tcp, or rc where there is RDMA, to ucx_tls" in of_ucx.mend
    assert ". UCX says: " in of_ucx.says
    if "banana" in names:
        assert "'banana'" in of_ucx.says
        assert "please use one or more of: " in of_ucx.says
    assert of_the_read.level is Level.NOTE
    assert of_the_read.says == "failed, which follows from the above: ucx"


@pytest.mark.nixl
@with_nixl
def test_a_name_that_ucx_does_not_know_among_others_is_worth_a_note() -> None:
    of_ucx, of_the_read = judged(ucx_tls="banana,tcp,sm")
    assert of_ucx.level is Level.NOTE
    assert of_ucx.mend.startswith("take banana out of ucx_tls, ")
    assert of_the_read.level is not Level.PROBLEM


@pytest.mark.nixl
@with_nixl
def test_a_device_that_is_not_there_is_told_in_ucxs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_77:1")
    of_ucx, of_the_read = judged()
    assert of_ucx.level is Level.PROBLEM
    assert "network device 'mlx5_77:1' is not available" in of_ucx.says
    assert of_the_read.level is Level.NOTE
