"""/metrics and /healthz over real HTTP, of directories that work and that hang."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from ec_p2p.control.directory import Directory
from ec_p2p.control.directory_figures import source_of
from ec_p2p.control.exposition import Exposition, Health, Source
from ec_p2p.control.messages import Advert, EntryState
from ec_p2p.control.sockets import open_socket
from ec_p2p.node.counters import flat
from tests.control.harness import PATIENCE_S, Loop, advert, node


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, content type, body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def figures(port: int) -> dict[str, float]:
    """'name{label=value}' -> value, of everything at /metrics."""
    status, _, body = get(port, "/metrics")
    assert status == 200, body
    samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
    return flat({(sample.name, tuple(sample.labels.items())): sample.value for sample in samples})


@pytest.fixture
def exposed() -> Iterator[Any]:
    opened: list[Exposition] = []

    def exposed(directory: Directory) -> int:
        source = source_of(directory)
        opened.append(Exposition("127.0.0.1", 0, lambda: [source], directory.pulse.health))
        return opened[-1].port

    yield exposed
    for one in opened:
        one.close()


@pytest.fixture
def plain() -> Iterator[Any]:
    opened: list[Exposition] = []

    def plain(*sources: Source, health: Health = lambda: (True, "ok")) -> int:
        opened.append(Exposition("127.0.0.1", 0, lambda: sources, health))
        return opened[-1].port

    yield plain
    for one in opened:
        one.close()


def test_a_directory_shows_what_it_knows_and_what_happened(loop: Loop, exposed: Any) -> None:
    directory = loop.directory()
    port = exposed(directory)
    announcer, replica = loop.announcer(directory.endpoint, node(1)), loop.replica(directory.endpoint)
    for number, state in enumerate((EntryState.RESIDENT, EntryState.RESIDENT, EntryState.DISK, EntryState.PENDING)):
        announcer.store(Advert(advert(number).identity, state, 4096, 16, 128, "bfloat16", 0, 0, 1))
    loop.until(lambda: replica.fresh and len(replica) == 4)
    shown = figures(port)
    assert {name: value for name, value in shown.items() if "entries" in name} == {
        "ec_p2p_directory_entries{state=memory}": 2,
        "ec_p2p_directory_entries{state=disk}": 1,
        "ec_p2p_directory_entries{state=pending}": 1,
    }
    assert (shown["ec_p2p_directory_nodes"], shown["ec_p2p_directory_adverts_total"]) == (1, 4)
    assert shown["ec_p2p_directory_snapshots_total"] >= shown["ec_p2p_directory_snapshots_sent_total"] >= 1
    assert shown["ec_p2p_directory_snapshot_seconds_total"] > 0
    assert shown["ec_p2p_directory_snapshot_bytes_total"] > 0
    assert shown["ec_p2p_directory_publishes_total"] >= shown["ec_p2p_directory_seq"] >= 1
    assert shown["ec_p2p_directory_uptime_seconds"] > 0
    assert shown[f"ec_p2p_directory_info{{endpoint={directory.endpoint},epoch={directory.epoch.hex()}}}"] == 1
    announcer.withdraw(advert(0).identity)
    loop.until(lambda: not replica.lookup(advert(0).identity))
    with open_socket(loop.context, zmq.DEALER, directory.endpoint) as stranger:
        stranger.connect(directory.endpoint)
        assert stranger.poll(PATIENCE_S * 1000, zmq.POLLOUT)
        stranger.send(b"nonsense")
        loop.until(lambda: figures(port)["ec_p2p_directory_bad_frames_total"] == 1)
    shown = figures(port)
    assert shown["ec_p2p_directory_withdrawals_total"] == 1
    assert shown["ec_p2p_directory_entries{state=memory}"] == 1
    announcer.goodbye()
    loop.until(lambda: not replica.nodes())
    shown = figures(port)
    assert (shown["ec_p2p_directory_nodes"], shown["ec_p2p_directory_entries{state=disk}"]) == (0, 0)


def test_every_figure_says_what_it_means(loop: Loop, exposed: Any) -> None:
    _, _, body = get(exposed(loop.directory()), "/metrics")
    helps = [line.split(" ", 3)[2:] for line in body.splitlines() if line.startswith("# HELP")]
    assert len(helps) > 10
    for name, text in helps:
        assert text != f"ec-p2p directory: {name.removeprefix('ec_p2p_directory_').removesuffix('_total')}"


def test_a_loop_that_hangs_is_not_healthy_and_is_again_when_it_turns(loop: Loop, exposed: Any) -> None:
    directory = loop.directory(node_timeout_s=0.5, heartbeat_s=0.1)
    port = exposed(directory)
    loop.until(lambda: get(port, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n"))
    goes_on = threading.Event()
    expire = directory._state.expire
    directory._state.expire = lambda now: expire(now) if goes_on.wait(2 * PATIENCE_S) else []  # type: ignore[method-assign]
    try:
        loop.until(lambda: get(port, "/healthz")[0] == 503)
        status, _, body = get(port, "/healthz")
        assert status == 503
        assert body.startswith("the loop has not turned for ")
        assert figures(port)["ec_p2p_directory_nodes"] == 0, "figures are there all the same"
    finally:
        goes_on.set()
    loop.until(lambda: get(port, "/healthz")[0] == 200)


def test_a_directory_that_serves_nobody_is_not_healthy(exposed: Any) -> None:
    with Directory("tcp://127.0.0.1:0", node_timeout_s=0.2) as directory:
        port = exposed(directory)
        deadline = time.monotonic() + PATIENCE_S
        while get(port, "/healthz")[0] == 200:
            assert time.monotonic() < deadline


# ---------------------------------------------------------------- HTTP


SOURCE = Source("x", "thing", lambda: {("a", (("k", 'v"\n'),)): 1.0}, lambda: {("b", ()): 2.0}, {"b": "bees"})


def test_formats_paths_and_methods(plain: Any) -> None:
    port = plain(SOURCE)
    status, kind, body = get(port, "/metrics?x=1")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert 'x_a_total{k="v\\"\\n"} 1.0\n' in body
    assert "# HELP x_b thing: bees\n" in body
    status, kind, body = get(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.split(";")[0], body.endswith("# EOF\n")) == (200, "application/openmetrics-text", True)
    assert get(port, "/healthz", "HEAD")[::2] == (200, "")
    assert get(port, "/nothing") == (404, "text/plain; charset=utf-8", "here are /metrics and /healthz\n")
    assert get(port, "/metrics", "POST")[0] == 501


def test_figures_that_cannot_be_read_are_an_error_of_this_try_only(plain: Any, caplog: Any) -> None:
    failing = True

    def counts() -> dict[Any, float]:
        if failing:
            raise RuntimeError("dictionary changed size during iteration")
        return {("a", ()): 1.0}

    port = plain(Source("x", "thing", counts, dict, {}), health=lambda: (not failing, "words"))
    assert get(port, "/metrics")[0] == 500
    assert get(port, "/healthz") == (503, "text/plain; charset=utf-8", "words\n")
    assert "/metrics failed: RuntimeError" in caplog.text
    failing = False
    assert figures(port) == {"x_a_total": 1.0}
    assert get(port, "/healthz")[0] == 200


def test_strangers_cannot_take_all_threads(plain: Any) -> None:
    port = plain(SOURCE)
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    try:
        closed = 0
        deadline = time.monotonic() + PATIENCE_S
        while closed < 100 - 32:
            assert time.monotonic() < deadline
            closed = 0
            for one in idle:
                one.settimeout(0.01)
                try:
                    closed += one.recv(1) == b""
                except TimeoutError:
                    pass
                except ConnectionResetError:
                    closed += 1
        assert threading.active_count() - before <= 32
    finally:
        for one in idle:
            one.close()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert get(port, "/healthz")[0] == 200
            break
        except OSError:
            assert time.monotonic() < deadline


def test_threads_that_could_not_be_started_take_no_places(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port = plain(SOURCE)
    start = threading.Thread.start

    def not_one_more(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", not_one_more)
        for _ in range(40):
            with pytest.raises(OSError):  # it is hung up on, one way or the other
                get(port, "/healthz")
    assert get(port, "/healthz")[0] == 200


def test_without_prometheus_client_health_is_told_all_the_same(plain: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    port = plain(SOURCE)
    assert "prometheus_client is not installed" in caplog.text
    assert get(port, "/healthz")[0] == 200
    status, _, body = get(port, "/metrics")
    assert (status, "pip install ec-p2p[cli]" in body) == (501, True)


def test_a_port_that_is_taken_is_a_warning(plain: Any, caplog: Any) -> None:
    port = plain(SOURCE)
    other = Exposition("127.0.0.1", port, lambda: [SOURCE], lambda: (True, "ok"))
    assert other.port == 0
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text
    other.close()
    Exposition("no.such.host.invalid", 0, lambda: [SOURCE], lambda: (True, "ok")).close()
    assert "cannot listen on no.such.host.invalid:0" in caplog.text


def test_none_at_all(plain: Any) -> None:
    before = threading.active_count()
    with Exposition("127.0.0.1", -1, lambda: [SOURCE], lambda: (True, "ok")) as none:
        assert (none.port, threading.active_count()) == (0, before)
