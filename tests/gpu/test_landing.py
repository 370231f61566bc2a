"""Entries that land in a GPU's memory without passing through the host's."""

from __future__ import annotations

import pytest
import torch

from ec_p2p.transport import nixl_available
from tests.node.conftest import Fleet
from tests.node.test_device_landing import Engine, Reader, fresh, payload

pytestmark = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]


@pytest.fixture
def fleet():
    fleet = Fleet("nixl")
    yield fleet
    fleet.close()


def test_every_gpu_reads_for_itself(fleet):
    (_, holder), (b, _) = fleet.connected("a", "b")
    count = min(2, torch.cuda.device_count())
    readers = [Reader(b, rank, f"cuda:{rank}") for rank in range(count)]
    try:
        engine = Engine(fleet, b, readers=count)
        engine.landers(count)
        for number, nbytes in enumerate((512, 64 << 10, 512 << 10)):
            identity = fresh()
            holder.store(identity, payload(number, nbytes))
            (landed,) = engine.want(identity)
            assert landed.read, "it has landed in the arena instead: see the landers' words above"
            for reader in readers:
                assert reader.ask(engine.client.node.incarnation, landed.read) == payload(number, nbytes)
            engine.release(landed)
            engine.all_free(readers)
    finally:
        for reader in readers:
            reader.close()
