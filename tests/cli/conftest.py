"""A directory with nodes that are only announced, and a fleet of real ones, for the commands that look at a fleet."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import Advert, EntryState, InstanceInfo, NodeInfo
from ec_p2p.wire.curve import Security
from tests.control.harness import Loop, advert
from tests.node.conftest import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet("zmq")
    # Nobody dies here, and nobody who is slow must be taken for dead, or a READ for failed.
    fleet.common |= {"node_timeout_s": 60.0, "read_timeout_s": 60.0}
    yield fleet
    fleet.close()


class Announced:
    """A real directory, and announcers that tell it of nodes without there being any. They go on telling, in a thread
    of their own, until the test ends."""

    def __init__(self, security: Security | None = None) -> None:
        self._loop = Loop()
        self._security = security
        self.directory: Directory = self._loop.directory(security=security)
        self.endpoint = self.directory.endpoint
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._turn)

    def tell(self, nodes: dict[NodeInfo, tuple[list[InstanceInfo], list[Advert]]]) -> None:
        """Once the directory has heard everything this returns."""
        for node, (instances, adverts) in nodes.items():
            announcer = self._loop.announcer(self.endpoint, node, security=self._security)
            announcer.describe(instances)
            for one in adverts:
                announcer.store(one)
        entries = sum(len(adverts) for _, adverts in nodes.values())
        stats = self.directory.stats
        self._loop.until(lambda: (stats()["nodes"], stats()["entries"]) == (len(nodes), entries), "everything told")
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self._loop.close()

    def _turn(self) -> None:
        while not self._end.is_set():
            self._loop.turn()


@pytest.fixture
def announced() -> Iterator[Announced]:
    announced = Announced()
    yield announced
    announced.close()


def held(number: int, state: EntryState, nbytes: int = 4096) -> Advert:
    """An advert in one of the three states, as a node makes them."""
    if state is EntryState.PENDING:
        return Advert(advert(number).identity, state, 0, 0, 0, "unknown", 0, 0, 0)
    return Advert(advert(number).identity, state, nbytes, nbytes // 256, 128, "bfloat16", 0, 0, 1)
