from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.harness import KINDS, Loop
from tests.control.valkey_process import ValkeyProcess, needs_server


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(params=[pytest.param(kind, marks=needs_server if kind == "valkey" else ()) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of directory that there is."""
    return str(request.param)


@pytest.fixture
def server(loop: Loop) -> Iterator[ValkeyProcess]:
    """A Valkey or Redis server that outlives who is driven by `loop`."""
    server = ValkeyProcess()
    yield server
    server.thaw()
    loop.close()
    server.close()
