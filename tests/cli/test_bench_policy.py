from __future__ import annotations

import json
from collections import Counter

import pytest

from ec_p2p.cli import main
from ec_p2p.cli.bench_policy import ALPHAS, POLICIES, SHARES, make_catalogue, make_conversations, make_trace, replay


def output(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["bench", "policy", "--requests", "900", "--items", "200", *options]) == 0
    return capsys.readouterr().out


def test_the_figures_are_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--json")
    assert output(capsys, "--json") == text
    result = json.loads(text)
    cases = [(row["alpha"], row["cache_share"], row["policy"]) for row in result["rows"]]
    assert cases == [(alpha, share, policy) for alpha in ALPHAS for share in SHARES for policy in POLICIES]
    for row in result["rows"] + result["conversations"]:
        for name in ("hit_ratio", "byte_hit_ratio", "encode_saved_ratio"):
            assert 0 < row[name] < 1


def test_the_table_has_a_line_for_each_trace_and_arena(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys).splitlines()
    assert [line.split("%")[0].split()[:-1] for line in lines[2:]] == [
        *(["Zipf", str(alpha)] for alpha in ALPHAS for _ in SHARES),
        *(["conversations"] for _ in SHARES),
    ]


def test_a_trace_is_what_it_says() -> None:
    catalogue = make_catalogue(500)
    counts = Counter(make_trace(catalogue, 0.9, 20_000))
    once = [item for item in counts if item not in set(catalogue)]
    assert all(counts[item] == 1 for item in once)
    assert 0.2 < len(once) / 20_000 < 0.3  # one in five, and a scan
    favourites = sum(count for _, count in counts.most_common(50))
    assert favourites > 0.3 * 20_000
    turns = Counter(make_conversations(20_000))
    assert 3.2 < 20_000 / len(turns) < 4  # the last conversations are cut short


@pytest.mark.parametrize("policy", POLICIES)
def test_an_arena_for_all_misses_each_item_once(policy: str) -> None:
    trace = make_catalogue(50) * 3
    ratios = replay(trace, 1 << 30, policy)
    assert ratios == {"hit_ratio": 1.0, "byte_hit_ratio": 1.0, "encode_saved_ratio": 1.0}
