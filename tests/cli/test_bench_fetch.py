from __future__ import annotations

import json

import pytest

from ec_p2p.cli import main

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


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu", ""])
def test_a_device_that_cannot_be_had_is_named(capfd, device):
    assert main([*COMMAND, "--device", device]) == 2
    assert f"--device={device!r}; accepted: cpu, cuda or cuda:N" in capfd.readouterr().err
