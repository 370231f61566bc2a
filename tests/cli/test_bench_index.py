from __future__ import annotations

import pytest

from ec_p2p.cli.bench_index import index_bytes_per_key


@pytest.mark.parametrize(("policy", "count"), [("LRU", 20_000), ("LRU", 22_000), ("GDSF", 20_000)])
def test_a_key_costs_no_more_than_promised(policy: str, count: int) -> None:
    """Bytes of objects, not time: equal on every machine. Some counts find the index's hash table just grown."""
    assert 150 < index_bytes_per_key(count, policy) <= 400
