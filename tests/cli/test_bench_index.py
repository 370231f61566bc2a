from __future__ import annotations

from ec_p2p.cli.bench_index import index_bytes_per_key


def test_a_key_costs_no_more_than_promised() -> None:
    """Bytes of objects, not time: equal on every machine. Some counts find the index's hash table just grown."""
    for count in (20_000, 22_000):
        assert 150 < index_bytes_per_key(count) <= 400
