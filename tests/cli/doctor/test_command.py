"""The command as an operator runs it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from ec_p2p.cli.doctor import examine, network
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.cli.doctor.loopback import LOG_LEVELS
from ec_p2p.config import make_config
from ec_p2p.transport import nixl_available
from tests.node.conftest import free_ports


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ec_p2p.cli", "doctor", *arguments]
    # A transport in this process has set what nobody else had.
    environment = {name: value for name, value in os.environ.items() if name not in LOG_LEVELS}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


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


def test_an_rdma_device_that_is_not_used_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "rdma", lambda: [("mlx5_0/1", "4: ACTIVE")])
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (65536, 65536))
    for transport, level in (("zmq", Level.OK), ("nixl", Level.PROBLEM)):
        findings = examine(make_config({"transport": transport, "ec_port": free_ports()}))
        (memlock,) = (finding for finding in findings if finding.thing == "memlock")
        assert memlock.level is level


def test_a_setting_that_cannot_be_used_is_an_error_of_one_line() -> None:
    done = doctor("--set", "transport=ib")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
@pytest.mark.parametrize(("setting", "cause"), [("ucx_tls=banana", "ucx"), ("nixl_backend=NOPE", "nixl")])
def test_what_libraries_write_is_in_the_findings_and_one_cause_is_one_problem(setting: str, cause: str) -> None:
    directory = ("--set", f"ec_port={free_ports()}")
    done = doctor("--set", "transport=nixl", "--set", setting, *directory, "--json")
    levels = {finding["thing"]: finding["level"] for finding in json.loads(done.stdout)["findings"]}
    assert levels[cause] == "problem"
    assert (levels["loopback read"], done.returncode) == ("note", 1)
    assert "UCX" not in done.stderr
