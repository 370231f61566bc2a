"""Directories that answer, that are not there, and that only listen."""

from __future__ import annotations

import socket

import pytest
from processes import free_port

from ec_p2p.cli.doctor.directories import directories
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config
from ec_p2p.config_kinds import KeyRing
from ec_p2p.control.directory import Directory
from ec_p2p.keys import security_of
from ec_p2p.wire.curve import key_text, new_pair
from tests.control.valkey_process import ValkeyProcess, needs_server


def test_one_that_answers_and_one_that_is_not_there() -> None:
    with Directory("tcp://127.0.0.1:0") as directory:
        directory.start()
        free = f"tcp://127.0.0.1:{free_port()}"
        findings = directories(make_config({"directory": [directory.endpoint, free]}))
    assert [finding.level for finding in findings] == [Level.OK, Level.PROBLEM]
    assert findings[0].says == "answers; nodes: 0, entries: 0"
    assert free in findings[1].thing
    assert "start `ec-p2p directory` there" in findings[1].mend


def test_one_that_listens_and_does_nothing() -> None:
    with Directory("tcp://127.0.0.1:0") as stopped:
        (finding,) = directories(make_config({"directory": [stopped.endpoint]}))
    assert finding.level is Level.PROBLEM
    assert "does not answer as a directory: no directory answered within" in finding.says


def test_something_else_that_listens_where_this_host_would_host_the_directory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (finding,) = directories(make_config({"ec_port": other.getsockname()[1]}))
    assert finding.level is Level.PROBLEM
    assert "does not answer as a directory" in finding.says


def test_one_that_wants_keys() -> None:
    ring = KeyRing(*map(key_text, new_pair()))
    with Directory("tcp://127.0.0.1:0", security=security_of(ring, "security")) as directory:
        directory.start()
        settings = {"directory": [directory.endpoint]}
        keys = {"public": ring.public, "secret": ring.secret}
        assert directories(make_config({**settings, "security": keys}))[0].level is Level.OK
        (finding,) = directories(make_config(settings))
        assert finding.level is Level.PROBLEM
        assert "keys" in finding.mend
        # One cause, one problem: the finding about the keys is that.
        (finding,) = directories(make_config({**settings, "security": "/no/such/file"}))
        assert finding.level is Level.NOTE


def test_a_server_of_another_kind_that_is_not_there() -> None:
    pytest.importorskip("redis")
    (finding,) = directories(make_config({"directory": [f"valkey://me:hunter2@127.0.0.1:{free_port()}/fleet"]}))
    assert finding.level is Level.PROBLEM
    assert "start that server" in finding.mend
    assert "ec-p2p directory" not in finding.mend
    assert "hunter2" not in str(finding)


@needs_server
def test_a_server_of_another_kind() -> None:
    pytest.importorskip("redis")
    server = ValkeyProcess()
    try:
        (finding,) = directories(make_config({"directory": [server.endpoint]}))
        assert finding.level is Level.OK
        with_password = server.endpoint.replace("://", "://me:hunter2@")
        (finding,) = directories(make_config({"directory": [with_password]}))
        assert finding.level is Level.PROBLEM
        assert "refuses: " in finding.says
        assert "hunter2" not in str(finding)
        server.freeze()
        (finding,) = directories(make_config({"directory": [server.endpoint]}))
        assert finding.level is Level.PROBLEM
        assert "somebody listens there, but does not answer" in finding.says
        server.thaw()
    finally:
        server.close()
