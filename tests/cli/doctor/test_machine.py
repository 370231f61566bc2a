"""What the kernel says, read from files of a made-up machine where this one cannot be brought to say it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ec_p2p.cli.doctor import machine
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config


def test_shared_memory_that_is_missing(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "none").level is Level.PROBLEM


@pytest.mark.parametrize(("free_mib", "level"), [(8, Level.NOTE), (64, Level.NOTE), (2048, Level.OK)])
def test_little_shared_memory_does_for_a_node(monkeypatch: pytest.MonkeyPatch, free_mib: int, level: Level) -> None:
    blocks = SimpleNamespace(f_blocks=free_mib, f_bavail=free_mib, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: blocks)
    assert machine.shared_memory().level is level


@contextmanager
def limited(what: int, soft: int, hard: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda asked: {what: (soft, hard)}[asked])
        yield


@pytest.mark.parametrize(("rdma", "level"), [(False, Level.OK), (True, Level.PROBLEM)])
def test_locked_memory_matters_with_rdma_only(rdma: bool, level: Level) -> None:
    with limited(resource.RLIMIT_MEMLOCK, 65536, 65536):
        finding = machine.locked_memory(make_config({}), rdma=rdma)
    assert finding.level is level
    assert ("the hard limit, 64.0 KiB" in finding.mend) == rdma
    assert ("CUDA pins" in finding.says) != rdma


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [(64, 64, Level.NOTE), (1024, 1 << 20, Level.OK), (1024, resource.RLIM_INFINITY, Level.OK)],
)
def test_the_hard_limit_of_open_files_counts(soft: int, hard: int, level: Level) -> None:
    with limited(resource.RLIMIT_NOFILE, soft, hard):
        finding = machine.open_files()
    assert finding.level is level
    assert ("LimitNOFILE=4096" in finding.mend) == (level is Level.NOTE)
    assert "ulimit -n" not in finding.mend


def test_this_machine_can_make_an_arena() -> None:
    assert machine.memfd().level is Level.OK
