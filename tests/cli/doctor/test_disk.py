"""The folder of the disk tier: what is said of it, and that looking changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ec_p2p.cli.doctor import machine
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config
from ec_p2p.engine.disk import LAYOUT


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = machine.disk(make_config({"local_disk": str(tmp_path / "file" / "folder")}))
    assert finding.level is Level.PROBLEM
    assert str(tmp_path / "file" / "folder") in finding.says


@pytest.mark.parametrize(("closed", "folder"), [("", ""), (LAYOUT, ""), ("", "some/new/folder")])
def test_a_folder_that_may_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str, folder: str
) -> None:
    if closed:
        (tmp_path / closed).mkdir()
    # Made up: these tests may run as root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / closed)
    finding = machine.disk(make_config({"local_disk": str(tmp_path / folder)}))
    assert finding.level is Level.PROBLEM
    assert str(tmp_path / folder) in finding.says


def test_a_folder_that_is_there_is_left_as_it_was(tmp_path: Path) -> None:
    before = os.stat(tmp_path).st_mtime_ns
    finding = machine.disk(make_config({"local_disk": str(tmp_path), "max_local_disk_size": "1MiB"}))
    assert finding.level is Level.OK
    assert (list(tmp_path.iterdir()), os.stat(tmp_path).st_mtime_ns) == ([], before)


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "new" / "folder"
    finding = machine.disk(make_config({"local_disk": str(folder), "max_local_disk_size": "1MiB"}))
    assert finding.level is Level.OK
    assert "not there yet" in finding.says
    assert not list(tmp_path.iterdir())


def test_more_than_the_disk_has_is_worth_a_note_unless_the_tier_holds_it_already(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    allowed = space.f_bavail * space.f_frsize + (1 << 40)
    config = make_config({"local_disk": str(tmp_path), "max_local_disk_size": f"{allowed}B"})
    finding = machine.disk(config)
    assert finding.level is Level.NOTE
    assert "max_local_disk_size" in finding.mend
    (tmp_path / LAYOUT / "ab").mkdir(parents=True)
    with (tmp_path / LAYOUT / "ab" / "entry").open("wb") as sparse:
        sparse.truncate(2 << 40)
    assert machine.disk(config).level is Level.OK
