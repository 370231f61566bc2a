"""The READ that is measured, and what is said where it fails or is slow."""

from __future__ import annotations

import msgspec
import pytest

from ec_p2p.cli.doctor import loopback
from ec_p2p.cli.doctor.finding import Finding, Level, problem
from ec_p2p.cli.doctor.library_words import warnings_in
from ec_p2p.cli.doctor.loopback import Attempt, Measured
from ec_p2p.config import make_config
from ec_p2p.transport import nixl_available


def read(**settings: object) -> Finding:
    config = make_config(settings)
    return loopback.read(config, loopback.attempt(config))


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
def test_a_read_over_nixl() -> None:
    measured = loopback.measure(make_config({"transport": "nixl"}))
    assert measured.kind == "nixl"
    assert measured.small_s > 0
    assert measured.bytes_per_s > 0


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
def test_the_read_goes_over_what_is_configured() -> None:
    finding = read(transport="nixl", nixl_params={"num_workers": 2}, ucx_tls="tcp")
    assert finding.level is not Level.PROBLEM, finding
    assert finding.says.startswith("nixl with nixl_params={'num_workers': '2'}, ucx_tls='tcp': 64 bytes in ")
    for broken, said in (
        ({"nixl_backend": "NO_SUCH"}, "nixl_backend='NO_SUCH': the installed NIXL has no plugin of this name"),
        ({"nixl_params": {"num_workers": "many"}}, "NIXL: Failed to create engine: Invalid integer string 'many'"),
        ({"ucx_tls": "pigeon"}, "UCX: transport 'pigeon' is not available"),
    ):
        finding = read(transport="nixl", **broken)
        assert finding.level is Level.PROBLEM
        assert said in finding.says


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
def test_what_the_libraries_write_is_shown_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config({"transport": "nixl", "ucx_tls": "pigeon"})
    for level in loopback.LOG_LEVELS:  # a transport in this process has set what nobody else had
        monkeypatch.delenv(level, raising=False)
    loopback.attempt(config)
    assert "UCX" not in "".join(capfd.readouterr())
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    loopback.attempt(config)
    assert "UCX  WARN  transport 'pigeon' is not available" in capfd.readouterr().err


def test_a_transport_that_fails_is_a_finding_and_leaves_no_process() -> None:
    assert read(transport="zmq").level is not Level.PROBLEM
    config = msgspec.structs.replace(make_config({}), transport="pigeon")
    attempt = loopback.attempt(config)
    assert attempt.measured is None
    assert "accepted: auto, nixl, zmq" in attempt.error
    cause = problem("transport", "is a pigeon", "")
    findings = [loopback.read(config, attempt), loopback.read(config, attempt, [cause])]
    assert [finding.level for finding in findings] == [Level.PROBLEM, Level.NOTE]


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
@pytest.mark.parametrize(("bytes_per_s", "level"), [(3e8, Level.OK), (5e7, Level.NOTE)])
def test_a_read_is_slow_where_a_network_would_be_faster(kind: str, bytes_per_s: float, level: Level) -> None:
    finding = loopback.read(make_config({"transport": kind}), Attempt(Measured(kind, 1e-4, bytes_per_s), "", []))
    assert finding.level is level
    assert "UCX" not in finding.mend
    assert "--ipc" not in finding.mend


def test_the_words_of_libraries_are_told_once_without_times_and_places() -> None:
    written = """
[1796069383.983105] [vm:25054:0]     ucp_context.c:1508 UCX  WARN  transport 'x' is not available, please use: tcp
[1796069383.984377] [vm:25051:0]     ucp_context.c:1508 UCX  WARN  transport 'x' is not available, please use: tcp
[1796069408.154596] [vm:25676:0]          parser.c:2578 UCX  WARN  unused environment variables: UCX_TCP_CONN_NB
E1130 20:09:43.996848   25051 ucx_utils.cpp:635] UCX endpoint create failed
Segmentation fault
"""
    assert warnings_in(written) == [
        "UCX: transport 'x' is not available, please use: tcp",
        "NIXL: UCX endpoint create failed",
        "Segmentation fault",
    ]
