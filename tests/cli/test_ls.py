"""`ec-p2p ls` as a process, on real directories and nodes; and what it makes of what is only announced."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from ec_p2p.cli import words
from ec_p2p.cli.ls import as_text
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import EntryState, InstanceInfo, NodeInfo
from ec_p2p.keys import new_key_file, security_of
from ec_p2p.node.client import NodeClient
from ec_p2p.wire.curve import key_text
from tests.cli.commands import run
from tests.cli.conftest import Announced, held
from tests.control.harness import node
from tests.node.conftest import PATIENCE_S, Fleet, until

NAMESPACE = "ab" * 32


def listed(*arguments: str) -> dict:
    done = run("ls", "--json", "--timeout", f"{PATIENCE_S}", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_nodes_of_a_fleet_and_their_instances(fleet: Fleet) -> None:
    before = int(time.time())
    (one, client), (two, _) = fleet.connected("a", "b")
    scheduler = NodeClient(one.config, "scheduler", "engine/dp0", role="producer", namespace=NAMESPACE)
    assert scheduler.attach(PATIENCE_S)
    client.store(b"1" * 32, b"x" * 12_800)
    client.store(b"2" * 32, b"x" * 25_600)
    port = str(one.config.ec_port)

    def seen() -> list[dict]:
        nodes = listed("--set", f"ec_port={port}")["nodes"]
        return nodes if nodes[0]["entries"]["memory"] == 2 and nodes[0]["instances"] else []

    first, second = until(seen, "both entries and the instance to be listed")
    assert [first["name"], second["name"]] == [one.config.name, two.config.name]
    assert first["bytes"] == {"memory": 38_400, "disk": 0, "pending": 0}
    assert first["entries"] == {"memory": 2, "disk": 0, "pending": 0}
    assert first["instances"] == [{"name": "engine/dp0", "role": "producer", "namespace": NAMESPACE}]
    assert before <= first["started_at"] <= time.time()
    assert (first["state"], second["state"], second["instances"]) == ("up", "up", [])

    done = run("ls", LMCACHE_EC_DIRECTORY=f"tcp://127.0.0.1:{port}")
    assert (done.returncode, done.stderr) == (0, "")
    header, a, instance, b, summary = done.stdout.splitlines()
    assert header.split() == ["NODE", "ADDRESS", "STATE", "AGE", "MEMORY", "DISK", "PENDING", "BYTES"]
    assert a.split()[:3] == [one.config.name, first["address"], "up"]
    assert a.split()[-5:] == ["2", "0", "0", "37.5", "KiB"]
    assert instance.split() == ["engine/dp0", "producer", "namespace", NAMESPACE[:12]]
    assert b.split()[0] == two.config.name
    assert summary == "2 nodes, 1 instance, 2 entries, 37.5 KiB"
    scheduler.close()


def test_entries_by_where_they_are(announced: Announced) -> None:
    adverts = [held(1, EntryState.RESIDENT), held(2, EntryState.DISK, 8192), held(3, EntryState.PENDING)]
    announced.tell({node(1): ([], adverts), node(2): ([], [])})
    first, second = listed("--directory", announced.endpoint)["nodes"]
    assert first["entries"] == {"memory": 1, "disk": 1, "pending": 1}
    assert first["bytes"] == {"memory": 4096, "disk": 8192, "pending": 0}
    assert second["entries"] == {"memory": 0, "disk": 0, "pending": 0}
    assert (first["started_at"], first["age_s"]) == (None, None)


def test_an_empty_fleet(announced: Announced) -> None:
    done = run("ls", "--directory", announced.endpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 nodes, 0 instances, 0 entries, 0 B\n", "")


def test_a_name_cannot_command_the_terminal(announced: Announced) -> None:
    evil = NodeInfo(b"e" * 16, "\x1b[2Jgone\n\u202e", "tcp://10.0.0.1:1")
    announced.tell({evil: ([InstanceInfo("\x07engine", "both", "\x1b]0;n")], [])})
    done = run("ls", "--directory", announced.endpoint)
    assert done.stdout.count("\n") == 4
    assert not {character for character in done.stdout if not character.isprintable()} - {"\n"}
    assert "gone" in done.stdout
    assert listed("--directory", announced.endpoint)["nodes"][0]["name"] == evil.name


def test_no_directory_is_one_clear_error() -> None:
    with Directory("tcp://127.0.0.1:0") as probe:
        endpoints = [probe.endpoint, "tcp://127.0.0.1:9"]
    done = run("ls", "--directory", endpoints[0], "--directory", endpoints[1], "--timeout", "0.5")
    expected = f"ec-p2p ls: no directory answered within 0.5 s at {', '.join(endpoints)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_of_two_directories_one_that_is_silent_is_named(announced: Announced) -> None:
    announced.tell({node(1): ([], [])})
    silent = "tcp://127.0.0.1:9"
    done = run("ls", "--json", "--directory", announced.endpoint, "--directory", silent)
    assert (done.returncode, done.stderr) == (0, f"ec-p2p ls: no answer from {silent}\n")
    printed = json.loads(done.stdout)
    assert printed["directories"] == {"followed": [announced.endpoint], "silent": [silent]}
    assert [row["name"] for row in printed["nodes"]] == ["host-1"]


def test_a_node_is_listed_once_however_many_directories_know_it(announced: Announced) -> None:
    other = Announced()
    try:
        announced.tell({node(1): ([], [held(1, EntryState.RESIDENT)]), node(2): ([], [])})
        known = [held(1, EntryState.RESIDENT), held(2, EntryState.RESIDENT)]
        other.tell({node(1): ([InstanceInfo("engine", "both", "n")], known), node(3): ([], [])})
        directories = ["--directory", announced.endpoint, "--directory", other.endpoint]
        # Once one is followed the other is not waited for long, and left out if it is slow: that is told on stderr.
        done = until(lambda: (done := run("ls", "--json", *directories)).stderr == "" and done, "both to be followed")
        printed = json.loads(done.stdout)
    finally:
        other.close()
    assert [row["name"] for row in printed["nodes"]] == ["host-1", "host-2", "host-3"]
    assert printed["nodes"][0]["entries"]["memory"] == 2
    assert [instance["name"] for instance in printed["nodes"][0]["instances"]] == ["engine"]


def test_a_publishing_port_that_is_closed_is_told_from_a_directory_that_is_not_there(announced: Announced) -> None:
    """As behind a firewall that lets only the first port through."""
    announced.directory.pub_port = 9
    expected = f"ec-p2p ls: what {announced.endpoint} publishes did not arrive within 2 s: is that port open?\n"

    def told() -> bool:
        """A directory that is slow to answer is not told from one that is not there."""
        done = run("ls", "--directory", announced.endpoint, "--timeout", "2")
        return (done.returncode, done.stdout, done.stderr) == (1, "", expected)

    until(told, "the closed port to be told of")


def test_a_directory_with_keys_is_followed_with_them(tmp_path: Path) -> None:
    public, text = new_key_file()
    for name, content in (("own", text), ("other", new_key_file()[1])):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    security = security_of(str(tmp_path / "own"), "own")
    assert security is not None
    assert key_text(security.directory) == public
    announced = Announced(security)
    try:
        announced.tell({msgspec.structs.replace(node(1), key=security.public): ([], [])})
        directory = ["--directory", announced.endpoint]
        assert [row["name"] for row in listed(*directory, "--set", f"security={tmp_path}/own")["nodes"]] == ["host-1"]
        for settings, how in (([], ""), (["--set", f"security={tmp_path}/other"], " with these keys")):
            done = run("ls", *directory, "--timeout", "1", *settings)
            expected = f"ec-p2p ls: no directory answered{how} within 1 s at {announced.endpoint}\n"
            assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)
    finally:
        announced.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--timeout", "0"], "--timeout=0.0; accepted: a positive number of seconds"),
        (["--directory", "host:1"], "directory=['host:1']; accepted: text like 'tcp://host:14579'"),
    ],
)
def test_what_cannot_be_used_is_named(arguments: list[str], said: str) -> None:
    done = run("ls", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_words() -> None:
    assert [words.size(n) for n in (0, 1023, 1024, 1 << 20, (1 << 30) - 1, 1536 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.0 GiB",
        "1.5 TiB",
    ]
    assert [words.age(s) for s in (-5, 0, 59.9, 60, 3600, 90_061, 200 * 86400)] == [
        "0s",
        "0s",
        "59s",
        "1m 0s",
        "1h 0m",
        "1d 1h",
        "200d 0h",
    ]
    assert as_text([], 0.0) == "0 nodes, 0 instances, 0 entries, 0 B"
