"""Which eviction policy hits more often, on traces that are the same on every machine.

They are made up, since none of a real fleet is public, from what makes caches differ. The catalogue: most requests are
for items of a fixed set, by a Zipf law; how popular an item is says nothing about its size, and changes: from time to
time some of the favourites change places with any others. The rest are for items that are never asked for again: one
request in five, and now and then a scan, many such items in a row. Conversations: an item is asked for again with every
turn of one conversation, and then never more. Sizes are those of images, videos and sound, in tokens of 5 KiB.

Every miss is stored. The first tier runs as it does in a node, with its search for neighbouring victims, in an arena of
which only the records are ever touched: no payload is copied. The first third of a trace fills the arena and is not
counted.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from hashlib import sha256
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import LocalCPUBackend
from ec_p2p.engine.policy import POLICIES, make_policy
from ec_p2p.engine.storage import SLAB_BYTES

ALPHAS = (0.7, 0.9, 1.1)
SHARES = (0.02, 0.1, 0.3)
"""The arena's size, as a share of the catalogue's bytes."""

_DIM = 2560
_TOKEN_BYTES = 2 * _DIM
_LEAST_ARENA = 64 << 20
_FIXED_MS = 6.0
_TOKEN_MS = 0.15
"""The encoder's time for an item, fixed and per token: about what a small GPU takes for one image."""

_KINDS = ((0.35, 64, 400), (0.30, 400, 1100), (0.17, 1100, 2700), (0.08, 2700, 8000), (0.10, 100, 750))
"""(share of the items, least and most tokens): images up to 640², 1024² and 1080p, video, 5 to 60 s of sound."""
_ONCE = 0.2
_DRIFT_EVERY = 2000
_DRIFT = 0.1
"""The share of the upper tenth of the catalogue that loses its place."""
_SCAN_EVERY = 15_000
_SCAN = 1500

_GOES_ON = 0.75
"""How often a conversation has another turn, and so four on average."""
_PAUSE = 1000
"""Requests of others between two turns, on average."""


Row = dict[str, Any]


class Item(NamedTuple):
    identity: bytes
    tokens: int


def run(requests: int, items: int, *, as_json: bool) -> int:
    """Measure and print. Returns the exit status."""
    catalogue = make_catalogue(items)
    rows = measure(catalogue, requests)
    conversations = measure_conversations(catalogue, requests)
    if as_json:
        print(json.dumps({"requests": requests, "items": items, "rows": rows, "conversations": conversations}))
        return 0
    print(f"{requests} requests, {items} items in the catalogue: hits / bytes hit / encoder time saved, percent")
    print(f"{'trace':>13} {'arena':>6} " + " ".join(f"{policy:>20}" for policy in POLICIES))
    for traffic in (rows, conversations):
        for at in range(0, len(traffic), len(POLICIES)):
            row = traffic[at]
            name = f"Zipf {row['alpha']}" if "alpha" in row else "conversations"
            cells = map(_cell, traffic[at : at + len(POLICIES)])
            print(f"{name:>13} {row['cache_share']:6.0%} " + " ".join(cells))
    return 0


def _cell(row: Row) -> str:
    ratios = (row["hit_ratio"], row["byte_hit_ratio"], row["encode_saved_ratio"])
    return f"{' / '.join(f'{100 * ratio:4.1f}' for ratio in ratios):>20}"


def measure(catalogue: list[Item], requests: int) -> list[Row]:
    """One row for each exponent, size of the arena and policy, in this order."""
    rows = []
    for alpha in ALPHAS:
        trace = list(make_trace(catalogue, alpha, requests))
        rows += [{"policy": row.pop("policy"), "alpha": alpha, **row} for row in _replay_all(trace, catalogue)]
    return rows


def measure_conversations(catalogue: list[Item], requests: int) -> list[Row]:
    """One row for each size of the arena, as a share of the same catalogue, and policy, in this order."""
    return _replay_all(list(make_conversations(requests)), catalogue)


def _replay_all(trace: list[Item], catalogue: list[Item]) -> list[Row]:
    nbytes = sum(item.tokens for item in catalogue) * _TOKEN_BYTES
    return [
        {"policy": policy, "cache_share": share, **replay(trace, max(int(nbytes * share), _LEAST_ARENA), policy)}
        for share in SHARES
        for policy in POLICIES
    ]


def make_catalogue(items: int) -> list[Item]:
    rng = random.Random(items)
    return [_make_item(rng, f"item {number}") for number in range(items)]


def make_trace(catalogue: list[Item], alpha: float, requests: int) -> Iterator[Item]:
    """What is asked for, in order."""
    rng = random.Random(f"{alpha} {requests}")
    # By popularity; item number n is asked for in proportion to (n + 1) ** -alpha.
    ranking = rng.sample(catalogue, len(catalogue))
    shares = list(accumulate((rank + 1) ** -alpha for rank in range(len(ranking))))
    scanning = 0
    for number in range(requests):
        if number and number % _SCAN_EVERY == 0:
            scanning = _SCAN
        if number and number % _DRIFT_EVERY == 0:
            _drift(rng, ranking)
        if scanning or rng.random() < _ONCE:
            scanning = max(0, scanning - 1)
            yield _make_item(rng, f"once {number}")
        else:
            yield ranking[bisect_left(shares, rng.random() * shares[-1])]


def make_conversations(requests: int) -> Iterator[Item]:
    """What is asked for, in order."""
    rng = random.Random(requests)
    turns: list[tuple[float, int, Item]] = []
    for number in range(requests):
        if turns and turns[0][0] <= number:
            _, _, item = heappop(turns)
        else:
            item = _make_item(rng, f"conversation {number}")
        if rng.random() < _GOES_ON:
            heappush(turns, (number + rng.expovariate(1 / _PAUSE), number, item))
        yield item


def _drift(rng: random.Random, ranking: list[Item]) -> None:
    upper = len(ranking) // 10
    for _ in range(int(upper * _DRIFT)):
        one, other = rng.randrange(upper), rng.randrange(len(ranking))
        ranking[one], ranking[other] = ranking[other], ranking[one]


def _make_item(rng: random.Random, name: str) -> Item:
    [(_, least, most)] = rng.choices(_KINDS, [kind[0] for kind in _KINDS])
    tokens = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    return Item(sha256(name.encode()).digest(), tokens)


def replay(trace: list[Item], arena_bytes: int, policy: str) -> dict[str, float]:
    """Ask a tier of this size for every item, store what it lacks, and count what it had."""
    warm = len(trace) // 3
    hits = [0.0, 0.0, 0.0]
    asked = [0.0, 0.0, 0.0]
    with Arena.create(arena_bytes, SLAB_BYTES) as arena:
        cpu = LocalCPUBackend(arena, policy=make_policy(policy))
        for number, item in enumerate(trace):
            hit = cpu.get(item.identity) is not None
            nbytes = item.tokens * _TOKEN_BYTES
            if not hit:
                cpu.publish(cpu.reserve(nbytes), item.identity, nbytes, item.tokens, _DIM, "bfloat16")
            if number >= warm:
                for index, weight in enumerate((1, nbytes, _FIXED_MS + _TOKEN_MS * item.tokens)):
                    asked[index] += weight
                    hits[index] += weight * hit
    names = ("hit_ratio", "byte_hit_ratio", "encode_saved_ratio")
    return {name: round(had / total, 4) for name, had, total in zip(names, hits, asked, strict=True)}
