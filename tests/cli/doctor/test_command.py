"""The command as an operator runs it, and the READ that it measures."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from ec_p2p.cli.doctor import loopback
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config
from ec_p2p.transport import nixl_available


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ec_p2p.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_machine_in_order() -> None:
    done = doctor("--set", "transport=zmq", "--set", "ec_port=1", "--set", "directory=[]", "--json")
    findings = {finding["thing"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert {"versions", "vllm", "nixl", "ucx", "rdma", "gpu", "memory", "/dev/shm", "memlock"} <= set(findings)
    assert findings["loopback read"]["level"] in ("ok", "note"), findings["loopback read"]
    assert "zmq: 64 bytes in" in findings["loopback read"]["says"]
    assert done.returncode == int(any(finding["level"] == "problem" for finding in findings.values()))


def test_a_problem_is_told_with_its_remedy_and_fails(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor("--set", "transport=zmq", "--set", f"local_disk={tmp_path}/file/folder")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    index = next(index for index, line in enumerate(lines) if line.startswith(" problem  disk tier"))
    assert lines[index + 1].strip().startswith("-> make ")
    assert " problems, " in lines[-1]


def test_directories_are_named_as_for_other_commands() -> None:
    endpoints = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    done = doctor("--set", "transport=zmq", "--directory", endpoints[0], "--directory", endpoints[1])
    assert done.returncode == 1
    for endpoint in endpoints:
        assert f" problem  directory {endpoint}: " in done.stdout


def test_a_setting_that_cannot_be_used_is_an_error_of_one_line() -> None:
    done = doctor("--set", "transport=ib")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


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
    over_tcp = {"transport": "nixl", "nixl_params": {"num_workers": 2}, "ucx_tls": "tcp"}
    finding = loopback.read(make_config(over_tcp))
    assert finding.level is not Level.PROBLEM, finding
    assert finding.says.startswith("nixl with nixl_params={'num_workers': '2'}, ucx_tls='tcp': 64 bytes in ")
    for broken, said in (
        ({"nixl_backend": "NO_SUCH"}, "nixl_backend='NO_SUCH': the installed NIXL has no plugin of this name"),
        ({"nixl_params": {"num_workers": "many"}}, "nixl_params={'num_workers': 'many'}"),
        ({"ucx_tls": "pigeon"}, "UCX_TLS='pigeon'"),
    ):
        finding = loopback.read(make_config({"transport": "nixl", **broken}))
        assert finding.level is Level.PROBLEM
        assert said in finding.says


def test_a_transport_that_fails_is_a_finding_and_leaves_no_process() -> None:
    finding = loopback.read(make_config({"transport": "zmq"}))
    assert finding.level is not Level.PROBLEM
    with pytest.raises(Exception, match="accepted: auto, nixl, zmq"):
        loopback.measure(msgspec.structs.replace(make_config({}), transport="pigeon"))
