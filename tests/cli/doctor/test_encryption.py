"""Keys: the doctor says of them what a node that is to use them does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ec_p2p.cli.doctor import software
from ec_p2p.cli.doctor.finding import Level
from ec_p2p.config import make_config
from ec_p2p.keys import new_key_file


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "fleet.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_no_keys_are_worth_a_note() -> None:
    assert software.curve(make_config({})).level is Level.NOTE


def test_keys_that_a_node_can_use(tmp_path: Path) -> None:
    public, text = new_key_file()
    finding = software.curve(make_config({"security": key_file(tmp_path, text)}))
    assert finding.level is Level.OK
    assert public in finding.says


@pytest.mark.parametrize("text", ["", "public: 5", "- a list", 'public: "short"\nsecret: "short"\n'])
def test_a_file_that_holds_no_keys(tmp_path: Path, text: str) -> None:
    path = key_file(tmp_path, text)
    finding = software.curve(make_config({"security": path}))
    assert finding.level is Level.PROBLEM
    assert "security" in finding.says
    assert "accepted: " in finding.says


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    finding = software.curve(make_config({"security": f"{tmp_path}/none"}))
    assert finding.level is Level.PROBLEM
    assert f"{tmp_path}/none" in finding.says


def test_a_file_that_everybody_may_read(tmp_path: Path) -> None:
    finding = software.curve(make_config({"security": key_file(tmp_path, new_key_file()[1], 0o644)}))
    assert finding.level is Level.NOTE
    assert "every user of this host can read the keys" in finding.mend
