"""Step by step as docs/protocol.md has it: not one wrong word passes, however fast the holder rewrites."""

from __future__ import annotations

import pytest

from tests.transport import race
from tests.transport.conftest import needs_nixl
from tests.transport.ends import PATIENCE_S, start_process, unique_name

READERS = 2
WORDS = 1_500_000
REJECTIONS = 50
PATIENCE_FOR_ALL_S = 10 * PATIENCE_S

ways = [
    pytest.param("nixl", {}, marks=needs_nixl, id="nixl-shared-memory"),
    pytest.param("nixl", {"UCX_TLS": "tcp,self"}, marks=needs_nixl, id="nixl-tcp"),
    pytest.param("zmq", {}, id="zmq"),
]


@pytest.mark.parametrize(("kind", "environment"), ways)
def test_what_validates_is_whole(kind, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    holder = unique_name()
    children = []

    def start(function, *args):
        process, pipe = start_process(function, *args)
        children.append((process, pipe))
        return pipe

    def answer(pipe):
        assert pipe.poll(PATIENCE_FOR_ALL_S), "a process does not answer"
        return pipe.recv()

    try:
        writer = start(race.write, kind, holder)
        card, port = answer(writer)
        readers = [start(race.read, kind, unique_name(), holder, card, port, WORDS, REJECTIONS) for _ in range(READERS)]
        tallies = [answer(reader) for reader in readers]
        writer.send("stop")
        assert answer(writer) > race.LIVES, "nothing was rewritten"
    finally:
        for process, pipe in children:
            process.kill()
            process.wait()
            pipe.close()
    for tally in tallies:
        assert tally.wrong == 0
        assert tally.valid_words >= WORDS
        assert tally.rejected >= REJECTIONS
        # Without the record these would have been taken for the entry: the test can fail.
        assert tally.torn > 0
