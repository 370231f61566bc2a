from __future__ import annotations

import json

import pytest

from ec_p2p.cli import main

OPS = ["put", "get", "borrow", "disk_write", "disk_read"]
COMMAND = ["bench", "engine", "--sizes", "64KiB,256KiB", "--repeat", "3", "--index-keys", "2000"]


def test_every_operation_is_measured_at_every_size(capsys, tmp_path):
    assert main([*COMMAND, "--folder", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["op"], row["bytes"]) for row in result["rows"]] == [
        (op, size << 10) for size in (64, 256) for op in OPS
    ]
    for row in result["rows"]:
        assert set(row) == {"op", "bytes", "us", "limit_us", "ratio"}
        assert row["us"] > 0
        assert row["limit_us"] > 0
    assert 0 < result["index_bytes_per_key"] < 10_000
    assert list(tmp_path.iterdir()) == []


def test_people_get_a_table(capsys):
    assert main(COMMAND) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == OPS * 2
    assert lines[-1].startswith("index: ")


def test_a_bad_size_is_one_clear_error(capsys):
    assert main(["bench", "engine", "--sizes", "64KiB,lots"]) == 2
    assert "--sizes='lots'; accepted: " in capsys.readouterr().err


@pytest.mark.parametrize("what", ["fetch", "engine"])
def test_the_help_names_the_benches(capsys, what):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert what in capsys.readouterr().out
