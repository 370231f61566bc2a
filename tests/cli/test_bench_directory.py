"""The benchmarks of the control plane run, with real processes, and say what they promise to say."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from ec_p2p.cli import bench_instances, main
from ec_p2p.cli.bench_directory import gates

SIZES = ["80", "800", "4000"]
BY_SIZE = ["snapshot_s", "snapshot_bytes", "lookup_us", "visible_ms_p50_at", "visible_ms_p99_at"]
GATES = ["adverts_per_s", "snapshot_s", "lookup_us", "visible_ms_p99", "visible_p50_largest_to_smallest"]


def test_the_control_plane_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    assert main(["bench", "directory", "--quick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in BY_SIZE:
        assert list(figures[name]) == SIZES
        assert all(value > 0 for value in figures[name].values())
    # An advert takes about 70 bytes, 32 of them the identity.
    assert [figures["snapshot_bytes"][size] // int(size) for size in SIZES] == pytest.approx([70, 70, 70], rel=0.9)
    for name in ("adverts_per_s", "followed_per_s", "bytes_per_entry", "visible_ms_p50", "visible_ms_p99"):
        assert figures[name] > 0
    assert (figures["nodes"], figures["replicas"], figures["load_per_s"]) == (8, 2, 2000)
    assert list(figures["gates"]) == GATES
    for gate in figures["gates"].values():
        assert set(gate) == {"value", "limit", "met"}
    assert os.sched_getaffinity(0) == cores


def figures(**changed: Any) -> dict[str, Any]:
    good = {
        "adverts_per_s": 300_000,
        "snapshot_s": {"1": 9.0, "2": 9.0, "3": 2.0},
        "lookup_us": {"1": 0.1, "2": 0.2, "3": 2.0},
        "visible_ms_p50_at": {"1": 1.0, "2": 9.0, "3": 2.0},
        "visible_ms_p99_at": {"1": 20.0, "2": 1.0, "3": 1.0},
    }
    return {**good, **changed}


@pytest.mark.parametrize(
    ("missed", "changed"),
    [
        ([], {}),
        (["adverts_per_s"], {"adverts_per_s": 299_999}),
        (["snapshot_s"], {"snapshot_s": {"1": 0.1, "2": 0.1, "3": 2.001}}),
        (["lookup_us"], {"lookup_us": {"1": 2.1, "2": 0.2, "3": 2.0}}),
        (["visible_ms_p99"], {"visible_ms_p99_at": {"1": 1.0, "2": 20.1, "3": 1.0}}),
        (["visible_p50_largest_to_smallest"], {"visible_ms_p50_at": {"1": 1.0, "2": 1.0, "3": 2.1}}),
    ],
)
def test_gates_are_missed_one_by_one(missed: list[str], changed: dict[str, Any]) -> None:
    assert [name for name, gate in gates(figures(**changed)).items() if not gate["met"]] == missed


def test_people_get_a_table_of_what_a_fleet_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "directory", "--quick", "--instances", "1,3"]) == 0
    title, columns, *rows = capsys.readouterr().out.splitlines()
    assert "100 entries an instance" in title
    assert [row.split()[0] for row in rows] == ["1", "3"]
    assert "descriptors" in columns


def test_programs_get_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "directory", "--quick", "--instances", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert (row["instances"], row["slow_subscribers"]) == (2, 0)
    assert row["publishes_per_s"] > 0
    assert row["descriptors"] > 4
    assert row["restart_s"] <= row["followed_s"]
    assert {"announced_s", "idle_percent", "heartbeat_us", "publish_us", "kib_per_instance", "restart_cpu_s"} <= set(
        row
    )


def test_a_directory_is_watched_until_it_has_published_something() -> None:
    """Who publishes may stand still for as long as the measurement was to take."""

    class Directory:
        published = iter([7, 7, 7, 8, 8])

        def ask(self, _: str) -> dict[str, float]:
            return {"cpu_s": 1.0, "publishes": next(self.published)}

    assert bench_instances._watch(Directory(), 0.0)["publishes"] > 0


def test_more_than_the_machine_allows_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "directory", "--instances=1000000000"]) == 2
    assert "--instances: 1000000000 need 3000000100 open files; accepted: " in capsys.readouterr().err
