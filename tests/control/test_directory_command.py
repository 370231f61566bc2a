"""`ec-p2p directory` as a process: what it prints, how it ends, and that a stopped one is survived."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.control.harness import PATIENCE_S, Loop, advert, node
from tests.control.test_exposition import figures, get

PROGRAM = """
import argparse, sys
from ec_p2p.cli.directory import add_parser
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, "directory", *arguments]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def endpoint_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr
    line = process.stderr.readline()
    match = re.fullmatch(r"directory listens on (tcp://127\.0\.0\.1:\d+), publishes on port \d+\n", line)
    assert match, line
    return match[1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_ends_cleanly(loop: Loop, start: Start, signum: int) -> None:
    process = start("--bind", "tcp://127.0.0.1:0", "--node-timeout", "1.5")
    endpoint = endpoint_of(process)
    announcer, replica = loop.announcer(endpoint, node(1)), loop.replica(endpoint)
    announcer.store(advert(1))
    loop.until(lambda: replica.lookup(advert(1).identity))
    process.send_signal(signum)
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Traceback" not in rest


def test_a_stopped_directory_is_survived_and_followed_again(loop: Loop, start: Start) -> None:
    process = start("--bind", "tcp://127.0.0.1:0", "--node-timeout", "1.5")
    endpoint = endpoint_of(process)
    announcer, replica = loop.announcer(endpoint, node(1)), loop.replica(endpoint, node_timeout_s=1.5)
    announcer.store(advert(1))
    loop.until(lambda: replica.lookup(advert(1).identity) and replica.fresh)
    process.send_signal(signal.SIGSTOP)
    loop.until(lambda: not replica.fresh and not announcer.connected)
    announcer.store(advert(2))
    assert replica.lookup(advert(1).identity) == [(node(1), advert(1))]
    process.send_signal(signal.SIGCONT)
    loop.until(lambda: replica.fresh and replica.lookup(advert(2).identity))
    assert replica.lookup(advert(1).identity) == [(node(1), advert(1))]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bind", "nonsense"], "'nonsense'"),
        (["--bind", "tcp://203.0.113.7:0"], "203.0.113.7"),
        (["--node-timeout", "-1"], "--node-timeout=-1.0; accepted"),
        (["--pub-port", "70000"], "--pub-port=70000; accepted"),
        (["--metrics-port", "-2"], "--metrics-port=-2; accepted"),
    ],
)
def test_what_cannot_be_used_is_named(start: Start, arguments: list[str], named: str) -> None:
    process = start(*arguments)
    _, printed = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert named in printed
    assert "Traceback" not in printed


def test_a_taken_port_is_named(loop: Loop, start: Start) -> None:
    taken: Any = loop.directory()
    process = start("--bind", taken.endpoint)
    _, printed = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "Address already in use" in printed
    assert taken.endpoint in printed


def test_it_says_where_its_figures_are(start: Start) -> None:
    process = start("--bind", "tcp://127.0.0.1:0", "--node-timeout", str(PATIENCE_S))
    endpoint_of(process)
    assert process.stderr
    line = process.stderr.readline()
    match = re.fullmatch(r"/metrics and /healthz are at 127\.0\.0\.1:(\d+)\n", line)
    assert match, line
    assert get(int(match[1]), "/healthz")[::2] == (200, "ok\n")
    assert figures(int(match[1]))["ec_p2p_directory_nodes"] == 0


def test_it_serves_no_figures_where_none_are_wanted(start: Start) -> None:
    process = start("--bind", "tcp://127.0.0.1:0", "--metrics-port", "-1")
    endpoint_of(process)
    process.terminate()
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "metrics" in rest) == (0, False)
