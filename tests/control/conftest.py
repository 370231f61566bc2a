from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.harness import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()
