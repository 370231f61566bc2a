from __future__ import annotations

import json
from collections import defaultdict

import pytest

from ec_p2p.cli import bench_engine, main

OPS = ["put", "get", "borrow", "disk_write", "disk_read"]
COMMAND = ["bench", "engine", "--sizes", "64KiB,256KiB", "--repeat", "3", "--index-keys", "2000"]


def test_every_operation_is_measured_at_every_size(capsys, tmp_path):
    assert main([*COMMAND, "--folder", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["op"], row["bytes"]) for row in result["rows"]] == [
        (op, size << 10) for size in (64, 256) for op in OPS
    ]
    for row in result["rows"]:
        assert set(row) == {"op", "bytes", "us", "yardstick_us", "limit_us", "ratio"}
        assert row["us"] > 0
        assert row["yardstick_us"] > 0
    assert list(result["index_bytes_per_key"]) == ["LRU", "GDSF"]
    assert all(0 < nbytes < 10_000 for nbytes in result["index_bytes_per_key"].values())
    assert list(tmp_path.iterdir()) == []


def test_people_get_a_table(capsys):
    assert main(COMMAND) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-3]] == OPS * 2
    assert [line.split(":")[0] for line in lines[-3:]] == ["index", "index", "limits"]
    for limit in (
        "put: 1.25 x the yardstick, below 1 MiB at least 25 us more than it;",
        "disk_write: 1.3 x the yardstick, at least 250 us more than it;",
        "disk_read: 1.3 x the yardstick;",
    ):
        assert limit in lines[-1]


@pytest.mark.parametrize(
    ("op", "size", "limit"),
    [
        ("put", 1 << 20, 125.0),
        ("put", (1 << 20) - 1, 125.0),
        ("get", 1 << 16, 125.0),
        ("disk_write", 1 << 26, 350.0),
        ("disk_read", 1 << 16, 130.0),
        ("disk_read", 1 << 26, 130.0),
        ("borrow", 1 << 26, 20.0),
    ],
)
def test_limits_are_what_is_said_of_them(op: str, size: int, limit: float) -> None:
    samples = defaultdict(lambda: [200e-6], {f"{yardstick} yardstick": [100e-6] for yardstick in OPS})
    [row] = [row for row in bench_engine._rows(size, samples) if row["op"] == op]
    assert row["limit_us"] == pytest.approx(limit)
    assert row["ratio"] == pytest.approx(10 if op == "borrow" else 2)


def test_few_bytes_may_take_a_while_longer_than_a_memcpy() -> None:
    samples = defaultdict(lambda: [30e-6], {f"{op} yardstick": [8e-6] for op in OPS})
    limits = {row["op"]: row["limit_us"] for row in bench_engine._rows(1 << 16, samples)}
    assert limits == pytest.approx({"put": 33, "get": 33, "borrow": 20, "disk_write": 258, "disk_read": 10.4})


def test_the_smallest_size_is_measured(capsys):
    assert main([*COMMAND[:2], "--sizes", "16KiB", "--repeat", "1", "--index-keys", "0", "--json"]) == 0
    assert {row["bytes"] for row in json.loads(capsys.readouterr().out)["rows"]} == {16 << 10}


def test_a_size_that_is_not_measured_as_it_is_named(capsys):
    command = [*COMMAND[:2], "--sizes", "20000,16KiB", "--repeat", "1", "--index-keys", "0"]
    assert main([*command, "--json"]) == 0
    assert {row["bytes"] for row in json.loads(capsys.readouterr().out)["rows"]} == {18432, 16384}
    assert main(command) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert notes == ["note: an entry has whole rows of 2048 bytes: 18432 instead of 20000"]


@pytest.mark.parametrize("what", ["fetch", "engine"])
def test_the_help_names_the_benches(capsys, what):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert what in capsys.readouterr().out
