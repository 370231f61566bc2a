"""A node that is to answer the doctor has the time, and so has the doctor to look."""

from __future__ import annotations

import pytest

from ec_p2p.cli.doctor import host_node, machine
from tests.node.conftest import PATIENCE_S


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_node, "_ANSWER_S", PATIENCE_S)
    monkeypatch.setattr(machine, "_COUNTING_S", PATIENCE_S)
