from __future__ import annotations

import pytest

from ec_p2p.transport import nixl_available
from tests.transport.ends import End, Holder, unique_name

needs_nixl = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]


@pytest.fixture(scope="session", params=[pytest.param("nixl", marks=needs_nixl), "zmq"])
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def reader(kind):
    end = End(kind, unique_name(), slabs=2)
    yield end
    end.close()


@pytest.fixture(scope="session")
def holder(kind, reader):
    """One that lives as long as the tests; it has two slabs and nobody changes it."""
    holder = Holder(kind, slabs=2)
    reader.transport.connect(holder.name, holder.card)
    yield holder
    holder.close()


@pytest.fixture
def start_holder(kind, reader):
    holders = []

    def start(name=None, slabs=1):
        holders.append(Holder(kind, name, slabs))
        reader.transport.connect(holders[-1].name, holders[-1].card)
        return holders[-1]

    yield start
    for holder in holders:
        reader.transport.forget(holder.name)
        holder.close()
