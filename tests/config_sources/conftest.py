from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ec_p2p import config_sources


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_sources, "_said", set())


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Any], str]:
    """Writes a configuration file: settings as YAML, or text as it is."""

    def write(content: Any) -> str:
        path = tmp_path / "lmcache.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return str(path)

    return write
