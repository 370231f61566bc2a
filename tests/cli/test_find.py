"""`ec-p2p find` as a process, on real directories and nodes."""

from __future__ import annotations

import json

from ec_p2p.cli.find import chosen, identities
from ec_p2p.control.messages import EntryState, InstanceInfo
from ec_p2p.identity import entry_identity
from ec_p2p.node.client import NodeClient
from tests.cli.commands import run
from tests.cli.conftest import Announced, held
from tests.control.harness import node
from tests.node.conftest import PATIENCE_S, Fleet, until

NAMESPACE, OTHER = "ab" * 32, "cd" * 32


def found(*arguments: str) -> list[dict]:
    done = run("find", "--json", "--timeout", f"{PATIENCE_S}", *arguments)
    assert done.stderr == ""
    holders = json.loads(done.stdout)["holders"]
    assert done.returncode == (0 if holders else 1)
    return holders


def test_who_holds_an_item(fleet: Fleet) -> None:
    (one, client), (two, other) = fleet.connected("a", "b")
    schedulers = [
        NodeClient(one.config, "scheduler", "producer/dp0", role="producer", namespace=NAMESPACE),
        NodeClient(two.config, "scheduler", "other/dp0", role="both", namespace=OTHER),
    ]
    assert all(scheduler.attach(PATIENCE_S) for scheduler in schedulers)
    identity = entry_identity(NAMESPACE, "cat")
    client.store(identity, b"x" * 12_800)
    other.has_landed(identity)
    directory = ["--directory", one.config.directories[0]]
    holders = until(lambda: len(told := found("cat", *directory)) == 2 and told, "both holders to be found")
    assert {holder["node"] for holder in holders} == {one.config.name, two.config.name}
    for holder in holders:
        assert (holder["rows"], holder["dim"], holder["dtype"], holder["bytes"]) == (100, 64, "bfloat16", 12_800)
        assert (holder["state"], holder["namespace"], holder["identity"]) == ("memory", NAMESPACE, identity.hex())

    done = run("find", "cat", *directory)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["NODE", "ADDRESS", "STATE", "SHAPE", "DTYPE", "BYTES", "NAMESPACE"]
    assert {row.split()[0] for row in rows} == {one.config.name, two.config.name}
    assert {tuple(row.split()[2:]) for row in rows} == {("memory", "100x64", "bfloat16", "12.5", "KiB", NAMESPACE[:12])}

    assert len(found("cat", "--namespace", NAMESPACE[:6], *directory)) == 2
    assert found("cat", "--namespace", OTHER, *directory) == []
    by_identity = found(identity.hex(), *directory)
    assert [holder["namespace"] for holder in by_identity] == [None, None]
    for scheduler in schedulers:
        scheduler.close()


def test_nobody(announced: Announced) -> None:
    announced.tell({node(1): ([InstanceInfo("a", "both", NAMESPACE), InstanceInfo("b", "both", OTHER)], [])})
    done = run("find", "dog", "--directory", announced.endpoint)
    said = "ec-p2p find: nobody holds 'dog'; looked for it in namespace abababababab, cdcdcdcdcdcd\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    assert found("dog", "--directory", announced.endpoint) == []


def test_without_a_namespace_there_is_nothing_to_look_for(announced: Announced) -> None:
    announced.tell({node(1): ([InstanceInfo("a", "both", "")], [])})
    done = run("find", "dog", "--directory", announced.endpoint)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no instance tells its namespace, so give one with --namespace" in done.stderr


def test_an_item_that_is_being_encoded_and_one_on_disk(announced: Announced) -> None:
    pending, filed = held(1, EntryState.PENDING), held(2, EntryState.DISK)
    announced.tell({node(1): ([], [pending, filed])})
    directory = ["--directory", announced.endpoint]
    assert run("find", pending.identity.hex(), *directory).stdout.splitlines()[1].split()[2:5] == ["pending", "-", "-"]
    [holder] = found(filed.identity.hex().upper(), *directory)
    assert (holder["state"], holder["bytes"]) == ("disk", 4096)


def test_no_directory_is_one_clear_error() -> None:
    done = run("find", "cat", "--directory", "tcp://127.0.0.1:9", "--timeout", "0.5")
    expected = "ec-p2p find: no directory answered within 0.5 s at tcp://127.0.0.1:9\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_64_digits_may_be_both() -> None:
    """vLLM's own identifiers look like identities."""
    digits = "0123456789abcdef" * 4
    assert identities(digits, [NAMESPACE]) == {
        entry_identity(NAMESPACE, digits): NAMESPACE,
        bytes.fromhex(digits): None,
    }
    assert identities(digits[:-1], []) == {}
    assert identities("x" * 64, []) == {}


def test_a_namespace_that_is_given_need_not_be_told() -> None:
    assert chosen([NAMESPACE, OTHER], None) == [NAMESPACE, OTHER]
    assert chosen([NAMESPACE, OTHER], "abab") == ["abab", NAMESPACE]
    assert chosen([NAMESPACE], NAMESPACE) == [NAMESPACE]
    assert chosen([NAMESPACE], "") == [""]
