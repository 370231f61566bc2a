"""`ec-p2p top`: as a process in a real terminal and without one, and its picture at any size."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from ec_p2p.cli.fleet import NodeRow
from ec_p2p.cli.top_figures import Figures, Look, figures_as_json, figures_of
from ec_p2p.cli.top_screen import screen
from ec_p2p.control.messages import EntryState, InstanceInfo, NodeInfo
from ec_p2p.node.messages import Inspection
from tests.cli.commands import command, environment, run
from tests.cli.conftest import Announced, held
from tests.control.harness import node
from tests.node.conftest import PATIENCE_S, Fleet, until


def objects(*arguments: str) -> list[dict]:
    patience = ("--timeout", f"{PATIENCE_S}", "--set", f"node_timeout_s={PATIENCE_S}")
    done = run("top", "--json", "--interval", "0.1", *patience, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_object_a_line(announced: Announced) -> None:
    announced.tell({node(1): ([InstanceInfo("e", "both", "n")], [held(1, EntryState.RESIDENT)])})
    first, second, third = objects("--count", "3", "--directory", announced.endpoint)
    assert (first["adverts_per_s"], first["nodes"][0]["entries_per_s"]) == (None, None)
    for later in (second, third):
        assert (later["adverts_per_s"], later["changes_per_s"], later["entries"], later["bytes"]) == (0.0, 0.0, 1, 4096)
        assert later["nodes"][0]["entries_per_s"] == 0.0
        assert later["nodes"][0]["instances"] == [{"name": "e", "role": "both", "namespace": "n"}]
        assert later["directories"] == {"followed": [announced.endpoint], "silent": []}
    assert first["time"] < second["time"] < third["time"]


def test_it_goes_on_and_sees_what_happens(fleet: Fleet) -> None:
    (one, client), (two, other) = fleet.connected("a", "b")
    arguments = ["top", "--json", "--interval", "0.1", "--set", f"ec_port={one.config.ec_port}", "--name"]
    with subprocess.Popen(
        command(*arguments, two.config.name), stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout
        lines = (json.loads(line) for line in process.stdout)
        assert next(lines)["entries"] == 0
        client.store(b"1" * 32, b"x" * 12_800)
        other.has_landed(b"1" * 32)
        # The directory and the local node are asked one after the other.
        seen = list(_until(lines, lambda line: line["entries"] == 2 and _landed(line) == 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert sum(line["adverts_per_s"] > 0 for line in seen) >= 1
    assert seen[-1]["local_node"]["fetches"] == {"landed": 1.0, "failed": 0.0, "bytes": 12_800.0}
    assert seen[-1]["local_node"]["name"] == two.config.name


def _landed(line: dict) -> float | None:
    return (line["local_node"] or {"fetches": {"landed": None}})["fetches"]["landed"]


def _until(lines: Iterator[dict], condition: Callable[[dict], bool]) -> Iterator[dict]:
    for _, line in zip(range(1000), lines, strict=False):
        yield line
        if condition(line):
            return
    pytest.fail("never came true")


def test_a_reader_that_has_seen_enough_ends_it(announced: Announced) -> None:
    with subprocess.Popen(
        command("top", "--json", "--interval", "0.1", "--directory", announced.endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_without_a_directory_there_is_nothing_to_print() -> None:
    done = run("top", "--json", "--directory", "tcp://127.0.0.1:9", "--timeout", "0.5")
    expected = "ec-p2p top: no directory answered within 0.5 s at tcp://127.0.0.1:9\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_without_a_terminal_it_says_what_to_do() -> None:
    done = run("top")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ec-p2p top: the output is no terminal; accepted: a terminal, or --json\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--interval", "0"], "--interval=0.0; accepted: a positive number of seconds"),
        (["--interval", "nan"], "--interval=nan; accepted: a positive number of seconds"),
        (["--count", "-1"], "--count=-1; accepted: a number from 0"),
    ],
)
def test_what_cannot_be_used_is_named(arguments: list[str], said: str) -> None:
    done = run("top", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ec-p2p: {said}\n")


class Terminal:
    """A real one, of which this process is the screen and the keyboard."""

    def __init__(self, columns: int = 100, lines: int = 20) -> None:
        self.screen, self._keyboard = pty.openpty()
        fcntl.ioctl(self._keyboard, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self._keyboard)
        os.set_blocking(self.screen, False)
        self.text = ""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            arguments,
            stdin=self._keyboard,
            stdout=self._keyboard,
            stderr=self._keyboard,
            env=environment(TERM="xterm"),
            start_new_session=True,
        )
        return self._process

    def shows(self, text: str) -> bool:
        try:
            self.text += os.read(self.screen, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            pass
        return text in self.text

    def mode(self) -> list:
        return termios.tcgetattr(self._keyboard)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        os.close(self.screen)
        os.close(self._keyboard)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def ended(process: subprocess.Popen[bytes], terminal: Terminal) -> int:
    """Its status, once it has ended; its output has to be read for that."""
    until(lambda: (terminal.shows(""), process.poll())[1] is not None, "the command to end")
    return process.returncode


@pytest.mark.parametrize("end", ["q", "Q", "ctrl-c", "SIGTERM"])
def test_in_a_terminal(announced: Announced, terminal: Terminal, end: str) -> None:
    announced.tell({node(1): ([], [held(1, EntryState.RESIDENT)])})
    process = terminal.run(*command("top", "--interval", "0.1", "--directory", announced.endpoint))
    until(lambda: terminal.shows("host-1"), "the node to be shown")
    assert terminal.mode() != terminal.before
    if end == "SIGTERM":
        process.terminate()
    elif end == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        os.write(terminal.screen, end.encode())
    assert ended(process, terminal) == 0
    assert terminal.mode() == terminal.before
    assert terminal.shows("\x1b[?1049l"), "the screen that was there before is back"
    assert "Traceback" not in terminal.text


def test_other_keys_do_nothing_and_a_lost_directory_is_shown(announced: Announced, terminal: Terminal) -> None:
    announced.tell({node(1): ([], [])})
    process = terminal.run(
        *command("top", "--interval", "0.1", "--directory", announced.endpoint, "--set", "node_timeout_s=1.5")
    )
    until(lambda: terminal.shows("1 directory followed"), "the directory to be followed")
    os.write(terminal.screen, b"xyz\x1a")
    announced.directory.close()
    until(lambda: terminal.shows("no directory answers at"), "the loss to be shown")
    until(lambda: terminal.shows("stale"), "what was known to be shown as old")
    os.write(terminal.screen, b"q")
    assert ended(process, terminal) == 0


def test_without_rich_the_error_names_what_to_install(terminal: Terminal) -> None:
    program = "import sys; sys.modules['rich'] = None; from ec_p2p.cli import main; sys.exit(main(['top']))"
    process = terminal.run(sys.executable, "-c", program)
    assert ended(process, terminal) == 1
    assert terminal.shows("pip install 'ec-p2p[cli]', or --json")
    assert "Traceback" not in terminal.text


# ---------------------------------------------------------------- the picture


def row(number: int, name: str = "", nbytes: int = 1 << 30, state: str = "up") -> NodeRow:
    info = NodeInfo(number.to_bytes(16, "big"), name or f"gpu-host-{number:04}.rack.example", "tcp://10.0.0.1:43121", 1)
    entries = {"memory": 1_234_567, "disk": number, "pending": 0}
    held_bytes = {"memory": nbytes, "disk": 0, "pending": 0}
    return NodeRow(info, state, [InstanceInfo("e", "both", "n")] * 8, entries, held_bytes)


def look(
    *rows: NodeRow, at: float = 0.0, adverts: int = 0, withdrawals: int = 0, local: Inspection | None = None
) -> Look:
    return Look(at, 1e9 + at, list(rows), ["tcp://a:1"], ["tcp://b:1"], [adverts, 0], [withdrawals, 0], local)


def drawn(figures: Figures, width: int, height: int, note: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen(figures, width, height, note))
    return captured.get().splitlines()


@pytest.mark.parametrize("nodes", [0, 1, 300])
@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [4, 24])
def test_the_picture_fits(nodes: int, width: int, height: int) -> None:
    lines = drawn(figures_of(look(), look(*map(row, range(nodes)), at=1.0)), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 6)
    if width >= 80:
        assert lines[0].startswith("ec-p2p top  ")
        assert ("and 282 more nodes; q ends" if nodes == 300 and height == 24 else "q ends") in lines[-1]


def test_a_narrow_terminal_keeps_what_matters() -> None:
    figures = figures_of(look(), look(row(1), at=1.0))
    headers = [drawn(figures, width, 24)[3].split() for width in (200, 80, 50, 32)]
    assert headers[0][:5] == ["NODE", "ADDRESS", "STATE", "AGE", "INSTANCES"]
    assert headers[0][5:] == ["MEMORY", "DISK", "PENDING", "BYTES", "ENTRIES/S"]
    for wide, narrow in itertools.pairwise(headers):
        assert set(narrow) < set(wide)
    assert headers[-1] == ["NODE", "BYTES"]


def test_the_largest_come_first_and_names_command_nothing() -> None:
    rows = [row(1, "small", nbytes=1), row(2, "\x1b[2J[bold red]evil[/]", nbytes=1 << 40)]
    lines = drawn(figures_of(None, look(*rows)), 160, 24)
    assert "[2J[bold red]evil[/]" in lines[4]
    assert lines[5].startswith("small")
    assert not any("\x1b[2J" in line for line in lines)


def test_what_is_logged_is_shown_in_the_last_line() -> None:
    assert drawn(figures_of(None, look()), 80, 24, "12:00:00 refused\n")[-1].startswith("12:00:00 refused")


# ---------------------------------------------------------------- the figures


def inspection(incarnation: str, **counters: float) -> Inspection:
    return Inspection(1, {"incarnation": incarnation, "name": "n"}, counters, {}, [])


def test_rates_are_differences_over_time() -> None:
    landed = {"fetches{outcome=landed}": 10.0, "fetched_bytes": 1000.0}
    more = {
        "fetches{outcome=landed}": 14.0,
        "fetches{outcome=late}": 2.0,
        "fetched_bytes": 3000.0,
    }
    before = look(row(1), at=10.0, adverts=5, withdrawals=1, local=inspection("a", **landed))
    later = look(row(1), row(2), at=12.0, adverts=25, withdrawals=5, local=inspection("a", **more))
    figures = figures_of(before, later)
    assert (figures.adverts_per_s, figures.changes_per_s) == (10.0, 12.0)
    assert figures.entries_per_s == {row(1).info.incarnation: 0.0}
    assert figures.fetches_per_s == {"landed": 2.0, "failed": 1.0, "bytes": 1000.0}
    assert figures_as_json(figures)["local_node"]["fetches"] == {"landed": 14.0, "failed": 2.0, "bytes": 3000.0}


def test_another_life_of_the_local_node_is_not_compared_with_this_one() -> None:
    before, later = look(local=inspection("a")), look(at=1.0, local=inspection("b"))
    assert figures_of(before, later).fetches_per_s == {}
