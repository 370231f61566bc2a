"""What only a GPU can show. Everything here is skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from ec_p2p.engine.arena import Arena
from ec_p2p.node.device import device_for

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
SLAB = 16 << 20


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not COUNT:
        pytest.skip("torch finds no GPU here")


@pytest.fixture(params=sorted({0, max(0, COUNT - 1)}), ids="cuda:{}".format)
def gpu(request):
    """The first GPU, which is every thread's to begin with, and the last, which is none's."""
    return device_for(f"cuda:{request.param}")


@pytest.fixture
def arena():
    arena = Arena.create(8 * SLAB, SLAB)
    yield arena
    arena.close()
