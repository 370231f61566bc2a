"""Directories that answer, that are not there, and that only listen."""

from __future__ import annotations

import os
import socket

import pytest
from processes import free_port

from ec_p2p.cli.doctor import directories as doctor
from ec_p2p.cli.doctor import host_node, ports
from ec_p2p.cli.doctor.finding import Finding, Level
from ec_p2p.config import Config, make_config
from ec_p2p.config_kinds import KeyRing
from ec_p2p.control.directory import Directory
from ec_p2p.keys import security_of
from ec_p2p.wire.curve import key_text, new_pair
from tests.control.valkey_process import ValkeyProcess, needs_server
from tests.node.conftest import PATIENCE_S, free_ports


def config_of(settings: dict[str, object]) -> Config:
    """Of a host whose node has a name that no other has."""
    return make_config({"node_name": f"doctor-{os.getpid()}", **settings})


def directories(config: Config, *, answer_s: float = 3.0) -> list[Finding]:
    """`answer_s`: how long the directories have. Those that are to answer are not hurried."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(doctor, "_ANSWER_S", answer_s)
        return doctor.directories(config, ports.bind(config, host_node.look(config)))


def test_one_that_answers_and_one_that_is_not_there() -> None:
    with Directory("tcp://127.0.0.1:0") as directory:
        directory.start()
        free = f"tcp://127.0.0.1:{free_port()}"
        findings = directories(config_of({"directory": [directory.endpoint, free]}), answer_s=PATIENCE_S)
    assert [finding.level for finding in findings] == [Level.OK, Level.PROBLEM]
    assert findings[0].says == "answers; nodes: 0, entries: 0"
    assert free in findings[1].thing
    assert "start `ec-p2p directory` there" in findings[1].mend


def test_one_that_listens_and_does_nothing() -> None:
    with Directory("tcp://127.0.0.1:0") as stopped:
        (finding,) = directories(config_of({"directory": [stopped.endpoint]}))
    assert finding.level is Level.PROBLEM
    assert "does not answer as a directory: no directory answered within" in finding.says


def test_something_else_that_listens_where_this_host_would_host_the_directory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (finding,) = directories(config_of({"ec_port": other.getsockname()[1]}))
    assert finding.level is Level.PROBLEM
    assert "does not answer as a directory" in finding.says


def test_one_that_a_node_here_will_host() -> None:
    (finding,) = directories(config_of({"ec_port": free_ports()}))
    assert (finding.level, "will host it" in finding.says) == (Level.OK, True)


@pytest.mark.parametrize("settings", [{"embedded_directory": False}, {"ec_ip": "no.such.host.invalid"}])
def test_one_that_no_node_here_will_host(settings: dict[str, object]) -> None:
    (finding,) = directories(config_of({"ec_port": free_ports(), **settings}))
    assert finding.level is Level.PROBLEM
    assert finding.says.startswith("cannot be reached (")


def test_one_that_cannot_publish_where_it_would_be_hosted() -> None:
    port = free_ports()
    with socket.create_server(("127.0.0.1", port + 1)):
        (finding,) = directories(config_of({"ec_port": port}))
        assert finding.level is Level.PROBLEM
        assert f"{port + 1}, on which it would publish the changes, cannot be bound (Address already in use)" in str(
            finding
        )
        (finding,) = directories(config_of({"ec_port": port, "directory_pub_port": free_port()}))
        assert finding.level is Level.OK


def test_one_whose_port_is_taken_by_what_does_not_listen() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        (finding,) = directories(config_of({"ec_port": other.getsockname()[1]}))
    assert finding.level is Level.PROBLEM
    assert "no node here can host it" in finding.says


def test_one_that_wants_keys() -> None:
    ring = KeyRing(*map(key_text, new_pair()))
    with Directory("tcp://127.0.0.1:0", security=security_of(ring, "security")) as directory:
        directory.start()
        settings = {"directory": [directory.endpoint]}
        keys = {"public": ring.public, "secret": ring.secret}
        assert directories(config_of({**settings, "security": keys}), answer_s=PATIENCE_S)[0].level is Level.OK
        (finding,) = directories(config_of(settings))
        assert finding.level is Level.PROBLEM
        assert "keys" in finding.mend
        # One cause, one problem: the finding about the keys is that.
        (finding,) = directories(config_of({**settings, "security": "/no/such/file"}))
        assert finding.level is Level.NOTE


def test_a_server_of_another_kind_that_is_not_there() -> None:
    pytest.importorskip("redis")
    (finding,) = directories(config_of({"directory": [f"valkey://me:hunter2@127.0.0.1:{free_port()}/fleet"]}))
    assert finding.level is Level.PROBLEM
    assert "start that server" in finding.mend
    assert "ec-p2p directory" not in finding.mend
    assert "hunter2" not in str(finding)


@needs_server
def test_a_server_of_another_kind() -> None:
    pytest.importorskip("redis")
    server = ValkeyProcess()
    try:
        (finding,) = directories(config_of({"directory": [server.endpoint]}), answer_s=PATIENCE_S)
        assert finding.level is Level.OK
        with_password = server.endpoint.replace("://", "://me:hunter2@")
        # It is asked again until then: the server may be told of the password yet.
        (finding,) = directories(config_of({"directory": [with_password]}), answer_s=10.0)
        assert finding.level is Level.PROBLEM
        assert "refuses: " in finding.says
        assert "hunter2" not in str(finding)
        server.freeze()
        (finding,) = directories(config_of({"directory": [server.endpoint]}))
        assert finding.level is Level.PROBLEM
        assert "somebody listens there, but does not answer" in finding.says
        server.thaw()
    finally:
        server.close()
