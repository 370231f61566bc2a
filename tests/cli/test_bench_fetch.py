from __future__ import annotations

import json

import pytest

from ec_p2p.cli import bench_fetch, main
from ec_p2p.transport import nixl_available
from tests.cli.commands import run

COMMAND = ["bench", "fetch", "--transport", "zmq", "--sizes", "64KiB,256KiB", "--items", "1,4", "--repeat", "3"]
LOADS = [(size << 10, items) for size in (64, 256) for items in (1, 4)]
FIGURES = ["raw_us", "fetch_us", "client_us", "memcpy_us", "fetch_over_raw"]


def test_every_load_is_measured(capfd):
    assert main([*COMMAND, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["transport"] == "zmq"
    assert "device" not in result
    assert [(row["bytes"], row["items"]) for row in result["rows"]] == LOADS
    for row in result["rows"]:
        assert set(row) == {"bytes", "items", *FIGURES}
        assert all(row[figure] > 0 for figure in FIGURES)


def test_the_way_to_a_device_is_measured_too(capfd):
    assert main([*COMMAND, "--device", "cpu"]) == 0
    title, columns, *rows = capfd.readouterr().out.splitlines()
    assert title == "fetch over zmq, microseconds p50 (p90), 3 rounds"
    assert " ".join(columns.split()) == "bytes items raw READ node fetch client want want to cpu memcpy fetch/raw"
    assert [tuple(map(int, row.split()[:2])) for row in rows] == LOADS
    for row in rows:
        _, _, _, _, _, _, client_us, _, device_us, _, _, _, _ = row.split()
        # Of each round the device's figure is the client's, and more: so it is of the medians.
        assert float(device_us) >= float(client_us) > 0


def test_sizes_that_are_not_measured_as_they_are_named(capfd):
    """And those that are have no note."""
    sizes = ["--transport", "zmq", "--sizes", "3,64KiB", "--items", "1,3", "--repeat", "1"]
    assert main(["bench", "fetch", *sizes]) == 0
    out = capfd.readouterr().out.splitlines()
    assert [tuple(map(int, row.split()[:2])) for row in out[2:6]] == [(2048, 1), (6144, 3), (65536, 1), (61440, 3)]
    assert out[6:] == [
        "note: an item has whole rows of 2048 bytes: 2048 in all instead of 3",
        "note: 3 items have whole rows of 2048 bytes: 6144 in all instead of 3",
        "note: 3 items have whole rows of 2048 bytes: 61440 in all instead of 65536",
    ]


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
def test_landing_on_the_device_is_measured_in_a_process_of_its_own():
    """UCX wants one agent per process, and this one has others."""
    done = run("bench", *COMMAND[1:2], *COMMAND[4:], "--device", "cpu", "--landing", "device", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["transport"], result["device"], result["landing"]) == ("nixl", "cpu", "device")
    assert [(row["bytes"], row["items"]) for row in result["rows"]] == LOADS
    for row in result["rows"]:
        assert row["device_us"] >= row["client_us"] >= row["fetch_us"] > 0


@pytest.mark.parametrize("options", [["--device", "cpu"], ["--transport", "nixl"]])
def test_landing_on_the_device_needs_one_and_nixl(capfd, options):
    assert main([*COMMAND, *options, "--landing", "device"]) == 2
    assert "--landing=device; accepted: with --device, and with --transport nixl" in capfd.readouterr().err


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu", ""])
def test_a_device_that_cannot_be_had_is_named(capfd, device):
    assert main([*COMMAND, "--device", device]) == 2
    assert f"--device={device!r}; accepted: cpu, cuda or cuda:N" in capfd.readouterr().err


def test_programs_are_told_of_the_device(capsys, monkeypatch):
    samples = {"raw": [1e-6], "fetch": [2e-6], "client": [3e-6], "device": [5e-6], "memcpy": [1e-6]}
    monkeypatch.setattr(bench_fetch, "measure", lambda *_: {bench_fetch.Load(2048, 1): samples})
    assert bench_fetch.run([2048], [1], bench_fetch.Way(device="cuda:0"), 1, as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "cuda:0"
    assert result["rows"][0]["device_us"] == 5.0
