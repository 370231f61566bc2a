"""A Valkey or Redis server on its bad days: nodes and replicas go on, say so once, and are whole again afterwards."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.control.harness import PATIENCE_S, Loop, advert, node
from tests.control.valkey_process import ValkeyProcess, free_port, needs_server

pytestmark = needs_server

ONE, TWO, THREE = (advert(number).identity for number in (1, 2, 3))


def in_step(server: ValkeyProcess, replica: Any) -> bool:
    return replica.position == server.stands() and replica.fresh


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What the threads said, of the announcer first."""
    found = [record for record in caplog.records if record.levelno == level and "valkey" in record.name]
    return sorted(record.getMessage().partition(", ")[2] for record in found)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """Options of announcers and replicas that call no server unreachable because it is slow for a while: a call may
    take half as long as a node may be silent."""
    monkeypatch.setattr("ec_p2p.control.valkey_worker._LONGEST_CALL_S", PATIENCE_S)
    return {"announcer": {"timeout_s": 2 * PATIENCE_S}, "replica": {"node_timeout_s": 2 * PATIENCE_S}}


# ---------------------------------------------------------------- it loses what it knew


@pytest.mark.parametrize("lost", ["about", "leases", "places", "events", "n:"])
def test_any_key_that_vanishes_comes_back(loop: Loop, server: ValkeyProcess, lost: str) -> None:
    """As under an eviction policy that is not noeviction."""
    announcer = loop.announcer(server.endpoint, node(1), timeout_s=PATIENCE_S)
    replica = loop.replica(server.endpoint, node_timeout_s=PATIENCE_S)
    announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and replica.lookup(ONE))
    with server.client() as client:
        key = server.key(lost).encode() + (node(1).incarnation if lost == "n:" else b"")
        assert client.delete(key) == 1
        announcer.store(advert(2))

        def whole() -> bool:
            assert replica.lookup(ONE), "it was held all the time"
            return bool(replica.lookup(TWO)) and in_step(server, replica) and server.entries() == 2

        loop.until(whole)
        if lost != "places":  # written with the next hello
            loop.until(lambda: client.exists(key))
    late = loop.replica(server.endpoint)
    loop.until(lambda: in_step(server, late))
    assert (late.nodes(), len(late)) == ([node(1)], 2)


def test_everything_is_flushed(loop: Loop, server: ValkeyProcess) -> None:
    went: list[str] = []
    announcers = [loop.announcer(server.endpoint, node(number), timeout_s=PATIENCE_S) for number in (1, 2)]
    replica = loop.replica(
        server.endpoint, node_timeout_s=PATIENCE_S, on_node=lambda node, up: up or went.append(node.name)
    )
    for announcer in announcers:
        announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and len(replica.lookup(ONE)) == 2)
    epoch = server.stands()[0]
    with server.client() as client:
        client.flushall()
    announcers[0].store(advert(2))
    loop.until(lambda: server.entries() == 3 and replica.lookup(TWO) and in_step(server, replica))
    assert len(replica.lookup(ONE)) == 2
    assert server.stands()[0] != epoch
    assert went == []


def test_a_server_that_comes_back_with_old_data_is_told_what_is_true(loop: Loop, server: ValkeyProcess) -> None:
    announcer = loop.announcer(server.endpoint, node(1))
    gone = loop.announcer(server.endpoint, node(2))
    replica = loop.replica(server.endpoint)
    announcer.store(advert(1))
    gone.store(advert(3))
    loop.until(lambda: in_step(server, replica) and replica.lookup(ONE) and replica.lookup(THREE))
    epoch = server.stands()[0]
    with server.client() as client:
        client.save()
    announcer.withdraw(ONE)
    announcer.store(advert(2))
    gone.goodbye()
    loop.until(lambda: replica.lookup(TWO) and not replica.lookup(ONE) and replica.nodes() == [node(1)])
    loop.forget(gone)
    server.kill()
    server.start()
    with server.client() as client:
        assert client.dbsize() > 0, "the data of before"
    loop.until(lambda: server.entries() == 1 and server.stands()[0] != epoch and in_step(server, replica))
    assert (replica.identities(), replica.nodes()) == ([TWO], [node(1)])
    late = loop.replica(server.endpoint)
    loop.until(lambda: in_step(server, late))
    assert (late.identities(), late.nodes()) == ([TWO], [node(1)])


def test_a_gap_in_the_log_costs_a_snapshot(loop: Loop, server: ValkeyProcess) -> None:
    announcer = loop.announcer(server.endpoint, node(1))
    replica = loop.replica(server.endpoint)
    announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and replica.lookup(ONE))
    with server.client() as client:
        client.hincrby(server.key("about"), "seq", 3)  # as if these had been cut off before they were read
    announcer.store(advert(2))
    loop.until(lambda: in_step(server, replica) and replica.lookup(TWO))
    assert replica.counters["gaps"] >= 1
    assert replica.counters["snapshots"] >= 2


# ---------------------------------------------------------------- it does not answer


def test_a_frozen_server_costs_nobody_anything_but_news(
    loop: Loop, server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    went: list[str] = []
    announcers = [loop.announcer(server.endpoint, node(number)) for number in (1, 2)]
    replica = loop.replica(server.endpoint, on_node=lambda node, up: up or went.append(node.name))
    for announcer in announcers:
        announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and len(replica.lookup(ONE)) == 2)
    server.freeze()
    for round_ in range(1, 11):
        for number in range(2, 2_002):
            announcers[0].store(advert(number, generation=round_))
        loop.turn(0)
    loop.until(lambda: not any(announcer.connected for announcer in announcers) and not replica.fresh)
    assert announcers[0].pending <= 2_001 + 2 * 1024, "one change per identity, and two batches on their way"
    assert len(replica.lookup(ONE)) == 2
    announcers[0].withdraw(ONE)
    server.thaw()
    loop.until(lambda: all(announcer.connected and not announcer.pending for announcer in announcers))
    loop.until(lambda: in_step(server, replica) and server.entries() == 2_001)
    loop.until(lambda: replica.lookup(ONE) == [(node(2), advert(1))] and len(replica) == 2_001)
    assert replica.lookup(advert(2_001).identity) == [(node(1), advert(2_001, generation=10))]
    assert went == [], "both lived all the time"


def test_killed_and_started_anew_it_is_told_of_once(
    loop: Loop, server: ValkeyProcess, patient: dict[str, dict[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    announcer = loop.announcer(server.endpoint, node(1), **patient["announcer"])
    replica = loop.replica(server.endpoint, **patient["replica"])
    announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and announcer.connected)
    for times in (1, 2):
        server.kill()
        loop.until(lambda least=2 * times: not announcer.connected and len(lines(caplog, logging.WARNING)) >= least)
        for _ in range(50):
            loop.turn()
        told = lines(caplog, logging.WARNING)
        assert len(told) == 2 * times
        assert all("cannot be reached" in line for line in told)
        server.start()
        loop.until(lambda: announcer.connected and in_step(server, replica) and server.entries() == 1)
        again = [line for line in lines(caplog, logging.INFO) if "it answers again" in line]
        assert len(again) == 2 * times


def test_what_is_no_such_server_is_not_reached(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def chatter() -> None:
            while True:
                try:
                    stranger, _ = listener.accept()
                except OSError:
                    return
                with stranger:
                    stranger.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=chatter, daemon=True)
        thread.start()
        endpoint = f"valkey://127.0.0.1:{listener.getsockname()[1]}/x"
        announcer, replica = loop.announcer(endpoint, node(1)), loop.replica(endpoint)
        loop.until(lambda: len(lines(caplog, logging.WARNING)) == 2)
        assert not announcer.connected
        assert not replica.fresh
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_close_does_not_wait_for_a_frozen_server(loop: Loop, server: ValkeyProcess) -> None:
    before = threading.active_count()
    announcer = loop.announcer(server.endpoint, node(1))
    replica = loop.replica(server.endpoint)
    announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and replica.lookup(ONE))
    server.freeze()
    announcer.store(advert(2))
    loop.turn(0)
    announcer.goodbye()
    loop.forget(announcer)
    loop.forget(replica)
    # They end when their calls do, which are bounded, whether the server ever answers or not.
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


# ---------------------------------------------------------------- it refuses


def test_a_full_server_takes_nothing_new_and_keeps_who_is_there(
    loop: Loop, server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    went: list[str] = []
    announcer = loop.announcer(server.endpoint, node(1), timeout_s=PATIENCE_S)
    replica = loop.replica(server.endpoint, on_node=lambda node, up: up or went.append(node.name))
    announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and replica.lookup(ONE))
    with server.client() as client:
        client.config_set("maxmemory", 1)
        announcer.store(advert(2))
        loop.until(lambda: not announcer.connected and announcer.refused)
        assert "it is full, see its maxmemory" in announcer.refused
        lease = client.zscore(server.key("leases"), node(1).incarnation)
        # It is renewed again and again, which a node of a shorter one would not live without.
        loop.until(lambda: client.zscore(server.key("leases"), node(1).incarnation) > lease + 3_000)
        loop.until(lambda: replica.fresh)
        assert replica.nodes() == [node(1)]
        # A server that is slow, too, may be said to be gone, and then again to be full.
        (told,) = {line for line in lines(caplog, logging.WARNING) if "cannot be reached" not in line}
        assert told.startswith("announcing: refuses: it is full")
        client.config_set("maxmemory", 0)
    loop.until(lambda: announcer.connected and replica.lookup(TWO))
    assert announcer.refused == ""
    assert went == []


def refusing(kind: str, server: ValkeyProcess, client: Any) -> str:
    """Make the server refuse in some way; returns what the operator reads."""
    if kind == "read-only":
        client.replicaof("127.0.0.1", 1)
        return "it is a read-only replica, give the primary's address"
    if kind == "password":
        client.config_set("requirepass", "hunter2")
        return "it does not accept the user or password"
    if kind == "user":
        client.acl_setuser("default", enabled=True, nopass=True, keys=["other:*"], categories=["+@all"], reset=True)
        return "this user may not do what is needed"
    client.set(server.key("about"), "a stranger's")
    return "somebody else's data is under the prefix {fleet-1}, choose another one"


@pytest.mark.parametrize("kind", ["read-only", "password", "user", "strangers"])
def test_a_refusal_is_said_once_in_words(
    loop: Loop,
    server: ValkeyProcess,
    kind: str,
    patient: dict[str, dict[str, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with server.client() as client:
        expected = refusing(kind, server, client)
        announcer = loop.announcer(server.endpoint, node(1), **patient["announcer"])
        replica = loop.replica(server.endpoint, **patient["replica"])
        announcer.store(advert(1))
        loop.until(lambda: len(lines(caplog, logging.WARNING)) == 2)
        for _ in range(50):
            loop.turn()
        told = lines(caplog, logging.WARNING)
        assert len(told) == 2
        assert all(f"refuses: {expected}" in line for line in told), told
        assert expected in announcer.refused
        assert (announcer.connected, replica.fresh) == (False, False)
        client.replicaof("NO", "ONE")
        client.config_set("requirepass", "")
        client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], categories=["+@all"], reset=True)
        if kind == "strangers":
            assert client.get(server.key("about")) == b"a stranger's"
            client.delete(server.key("about"))
    loop.until(lambda: announcer.connected and replica.lookup(ONE))
    assert announcer.refused == ""


def test_an_old_server_is_refused_by_its_version(
    loop: Loop, server: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_p2p.control.valkey_server._OLDEST", (99, 0))
    announcer = loop.announcer(server.endpoint, node(1))
    loop.until(lambda: "accepted: Valkey, or Redis from 6.2 on" in announcer.refused)


def test_a_user_needs_these_rights_and_no_others(loop: Loop, server: ValkeyProcess) -> None:
    """As docs/operations.md has them."""
    with server.client() as client:
        rights = "-@all +@read +@write +@scripting +info +time"
        client.execute_command(f"ACL SETUSER fleet reset on >pw ~{{fleet-1}}:* {rights}")
        endpoint = server.endpoint.replace("://", "://fleet:pw@")
        announcer, replica = loop.announcer(endpoint, node(1)), loop.replica(endpoint)
        announcer.store(advert(1))
        loop.until(lambda: announcer.connected and replica.fresh and replica.lookup(ONE))
        announcer.withdraw(ONE)
        loop.until(lambda: not replica.lookup(ONE))
        announcer.goodbye()
        loop.until(lambda: not replica.nodes())
        assert client.execute_command("ACL LOG") == []


def test_in_a_cluster_the_keys_are_looked_for_where_they_are(loop: Loop) -> None:
    servers = [
        ValkeyProcess("", "--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-config-file", name)
        for name in ("one", "two")
    ]
    try:
        with servers[0].client() as asked, servers[1].client() as owner:
            owner.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            asked.execute_command(
                "CLUSTER MEET", "127.0.0.1", servers[1].port, owner.config_get("cluster-port")["cluster-port"]
            )
            announcer, replica = loop.announcer(servers[0].endpoint, node(1)), loop.replica(servers[0].endpoint)
            announcer.store(advert(1))
            loop.until(lambda: announcer.connected and replica.fresh and replica.lookup(ONE))
            assert (servers[0].process.poll(), servers[1].entries()) == (None, 1)
    finally:
        loop.close()
        for server in servers:
            server.close()


def test_a_server_turned_read_only_is_whole_again_when_it_may_write(loop: Loop, server: ValkeyProcess) -> None:
    announcer = loop.announcer(server.endpoint, node(1))
    replica = loop.replica(server.endpoint)
    announcer.store(advert(1))
    loop.until(lambda: in_step(server, replica) and replica.lookup(ONE))
    with server.client() as client:
        client.replicaof("127.0.0.1", 1)
        loop.until(lambda: not announcer.connected and not replica.fresh)
        assert replica.lookup(ONE)
        announcer.store(advert(2))
        announcer.withdraw(ONE)
        client.replicaof("NO", "ONE")
    loop.until(lambda: announcer.connected and in_step(server, replica) and server.entries() == 1)
    loop.until(lambda: replica.identities() == [TWO])


# ---------------------------------------------------------------- who may come in


def test_a_password_comes_from_a_file_and_may_change(loop: Loop, server: ValkeyProcess, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    endpoint = f"{server.endpoint}?password_file={file}"
    with server.client() as client:
        client.config_set("requirepass", "first")
        announcer, replica = loop.announcer(endpoint, node(1)), loop.replica(endpoint)
        announcer.store(advert(1))
        loop.until(lambda: announcer.connected and replica.lookup(ONE))
        client.config_set("requirepass", "second")
        client.client_kill_filter(_type="normal", skipme=True)
        loop.until(lambda: "does not accept the user or password" in announcer.refused)
        file.unlink()
        loop.until(lambda: f"the password in '{file}' cannot be read" in announcer.refused)
        file.write_text("second")
        loop.until(lambda: announcer.connected and replica.fresh)
        client.config_set("requirepass", "")


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_over_tls_the_server_has_to_prove_itself(loop: Loop, tmp_path: Path) -> None:
    def certificate(name: str) -> tuple[str, str]:
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(["openssl", "req", *kind, *names, *files], check=True, capture_output=True)
        return str(key), str(certificate)

    (key, ours), (_, other) = certificate("server"), certificate("other")
    port = free_port()
    options = ("--tls-port", str(port), "--tls-key-file", key, "--tls-cert-file", ours, "--tls-auth-clients", "no")
    server = ValkeyProcess("", *options, "--tls-ca-cert-file", ours)
    try:
        endpoint = f"valkeys://127.0.0.1:{port}/fleet-1?ssl_ca_certs="
        announcer, replica = loop.announcer(endpoint + ours, node(1)), loop.replica(endpoint + ours)
        stranger = loop.replica(endpoint + other)
        announcer.store(advert(1))
        loop.until(lambda: announcer.connected and replica.lookup(ONE))
        for _ in range(20):
            loop.turn()
        assert not stranger.fresh
    finally:
        loop.close()
        server.close()
