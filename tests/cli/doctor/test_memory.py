"""Memory for the arena: of a made-up machine, whose files say what this one cannot be brought to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ec_p2p.cli.doctor import host_node, machine
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.cli.free_memory import memory_left
from ec_p2p.config import make_config
from tests.node.conftest import Fleet

GIB = 1 << 30
V1, V2 = "memory", ""


def made_up(root: Path, available: int, cgroup: str = "0::/") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB\n")
    (root / "proc/self/cgroup").write_text(f"1:cpu:/elsewhere\n{cgroup}\n")
    return root


def group(root: Path, version: str, path: str, limit: object, used: int, cache: int = 0) -> None:
    """A control group, with `cache` bytes of `used` in page cache that nobody has looked at lately."""
    folder = root / "sys/fs/cgroup" / version / path
    folder.mkdir(parents=True, exist_ok=True)
    of_limit, of_use = ("limit_in_bytes", "usage_in_bytes") if version == V1 else ("max", "current")
    (folder / f"memory.{of_limit}").write_text(f"{limit}\n")
    (folder / f"memory.{of_use}").write_text(f"{used}\n")
    total = "total_" if version == V1 else ""
    (folder / "memory.stat").write_text(f"anon 0\n{total}inactive_file {cache}\n")


def test_an_arena_that_fits(tmp_path: Path) -> None:
    finding = machine.memory(make_config({"max_local_cpu_size": 2}), 0, made_up(tmp_path, 8 * GIB))
    assert finding.level is Level.OK
    assert "2.0 GiB" in finding.says
    assert "8.0 GiB" in finding.says


def test_an_arena_larger_than_the_machine(tmp_path: Path) -> None:
    finding = machine.memory(make_config({"max_local_cpu_size": 16}), 0, made_up(tmp_path, 8 * GIB))
    assert finding.level is Level.PROBLEM
    assert "max_local_cpu_size" in finding.mend


def test_what_the_arena_has_already_need_not_be_free(tmp_path: Path) -> None:
    root = made_up(tmp_path, 1 * GIB)
    config = make_config({"max_local_cpu_size": 16})
    finding = machine.memory(config, 16 * GIB - 4096, root)
    assert finding.level is Level.OK
    assert "of which it has 16.0 GiB already" in finding.says
    assert machine.memory(config, 14 * GIB, root).level is Level.PROBLEM


def test_what_the_node_that_runs_holds_is_counted(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node("a")
    fleet.client(node).store(b"an entry".ljust(16, b"."), bytes(15 << 20))
    held = host_node.look(node.config).arena_held
    root = made_up(tmp_path, node.config.max_local_cpu_size - (15 << 20))
    assert machine.memory(node.config, held, root).level is Level.OK
    assert machine.memory(node.config, 0, root).level is Level.PROBLEM


def test_an_arena_larger_than_the_container(tmp_path: Path) -> None:
    root = made_up(tmp_path, 64 * GIB)
    group(root, V2, ".", 4 * GIB, used=3 * GIB)
    finding = machine.memory(make_config({"max_local_cpu_size": 2}), 0, root)
    assert finding.level is Level.PROBLEM
    assert "memory limit leaves 1.0 GiB" in finding.says


@pytest.mark.parametrize(("version", "line"), [(V1, "4:memory:"), (V2, "0::")])
def test_the_tightest_limit_above_this_process_counts(tmp_path: Path, version: str, line: str) -> None:
    root = made_up(tmp_path, 64 * GIB, f"{line}/system.slice/ec-p2p-node.service")
    assert memory_left(root) is None
    group(root, version, "system.slice", 8 * GIB, used=7 * GIB)
    assert memory_left(root) == 1 * GIB
    group(root, version, "system.slice/ec-p2p-node.service", 4 * GIB, used=1 * GIB)
    assert memory_left(root) == 1 * GIB
    group(root, version, "system.slice", "max" if version == V2 else (1 << 63) - 4096, used=7 * GIB)
    assert memory_left(root) == 3 * GIB
    group(root, version, "system.slice/another.service", 1 * GIB, used=1 * GIB)
    assert memory_left(root) == 3 * GIB, "another's limit is none of ours"


@pytest.mark.parametrize(("version", "line"), [(V1, "4:memory:"), (V2, "0::")])
@pytest.mark.parametrize("path", ["/", "/docker/0123abcd", "/../unit"])
def test_a_container_sees_its_own_limit_at_the_top(tmp_path: Path, version: str, line: str, path: str) -> None:
    root = made_up(tmp_path, 64 * GIB, f"{line}{path}")
    group(root, version, ".", 4 * GIB, used=1 * GIB)
    assert memory_left(root) == 3 * GIB


@pytest.mark.parametrize(("version", "line"), [(V1, "4:memory:"), (V2, "0::")])
def test_page_cache_that_nobody_looks_at_is_free(tmp_path: Path, version: str, line: str) -> None:
    root = made_up(tmp_path, 64 * GIB, f"{line}/")
    group(root, version, ".", 4 * GIB, used=4 * GIB, cache=3 * GIB)
    assert memory_left(root) == 3 * GIB


def test_this_machine_can_be_asked() -> None:
    assert "free" in machine.memory(make_config({}), 0).says
