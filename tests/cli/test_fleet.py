"""What a view says of nodes, added up: states above all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ec_p2p.cli.fleet import rows_of
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import EntryState
from tests.cli.conftest import held
from tests.control.harness import Loop, node


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_a_node_is_up_then_stale_then_doubted_then_up(loop: Loop) -> None:
    first = Directory("tcp://127.0.0.1:0")
    first.start()
    view = loop.view([first.endpoint], node_timeout_s=3.0)
    announcers = [loop.announcer(first.endpoint, node(number)) for number in (1, 2)]
    for announcer in announcers:
        announcer.store(held(1, EntryState.RESIDENT))

    def states() -> dict[str, str]:
        return {row.info.name: row.state for row in rows_of(view) if row.held == 1}

    loop.until(lambda: states() == {"host-1": "up", "host-2": "up"})
    loop.forget(announcers[0])
    first.close()
    loop.until(lambda: states() == {"host-1": "stale", "host-2": "stale"})
    loop.directory(first.endpoint)
    loop.until(lambda: states() == {"host-1": "doubted", "host-2": "up"})
    loop.until(lambda: states() == {"host-2": "up"}, "what was not said again to go")
