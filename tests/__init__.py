"""For every test, and every process that a test starts with functions of its own: the examples can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "disagg"))
