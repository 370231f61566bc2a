"""What the kernel says, read from files of a made-up machine where this one cannot be brought to say it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ec_p2p.cli.doctor import machine
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config

GIB = 1 << 30


def made_up(root: Path, available: int, limit: str = "max", used: int = 0) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    return root


def test_an_arena_that_fits(tmp_path: Path) -> None:
    finding = machine.memory(make_config({"max_local_cpu_size": 2}), made_up(tmp_path, 8 * GIB))
    assert finding.level is Level.OK
    assert "2.0 GiB" in finding.says
    assert "8.0 GiB" in finding.says


def test_an_arena_larger_than_the_machine(tmp_path: Path) -> None:
    finding = machine.memory(make_config({"max_local_cpu_size": 16}), made_up(tmp_path, 8 * GIB))
    assert finding.level is Level.PROBLEM
    assert "max_local_cpu_size" in finding.mend


def test_an_arena_larger_than_the_container(tmp_path: Path) -> None:
    root = made_up(tmp_path, 64 * GIB, limit=str(4 * GIB), used=3 * GIB)
    finding = machine.memory(make_config({"max_local_cpu_size": 2}), root)
    assert finding.level is Level.PROBLEM
    assert "container's memory limit leaves 1.0 GiB" in finding.says


def test_shared_memory_that_is_missing(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "none").level is Level.PROBLEM


@pytest.mark.parametrize(("rdma", "level"), [(False, Level.OK), (True, Level.PROBLEM)])
def test_locked_memory_matters_with_rdma_only(rdma: bool, level: Level) -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(65536, limits[1]) if limits[1] >= 0 else 65536, limits[1]))
    try:
        assert machine.locked_memory(make_config({}), rdma=rdma).level is level
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def test_this_machine_can_make_an_arena() -> None:
    assert machine.memfd().level is Level.OK
