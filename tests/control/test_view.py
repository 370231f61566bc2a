"""What a view tells its owner. The directory and those who announce to it are real."""

from __future__ import annotations

import pytest

from ec_p2p.control.messages import NodeInfo
from tests.control.harness import Loop, node


def test_an_owner_that_fails_with_one_node_is_told_of_the_others_at_the_next_turn(loop: Loop) -> None:
    directory = loop.directory()
    announcers = [loop.announcer(directory.endpoint, node(number)) for number in (1, 2, 3)]
    loop.until(lambda: directory.stats()["nodes"] == len(announcers))
    told: list[tuple[str, bool]] = []

    def on_node(info: NodeInfo, up: bool) -> None:
        told.append((info.name, up))
        if len(told) in (1, 4):
            raise RuntimeError("of the owner")

    loop.view([directory.endpoint], on_node=on_node)
    names = sorted(node(number).name for number in (1, 2, 3))
    with pytest.raises(RuntimeError, match="of the owner"):
        loop.until(lambda: len(told) == 2)
    loop.until(lambda: len(told) == 3)
    assert sorted(told) == [(name, True) for name in names]
