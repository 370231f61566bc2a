"""What the control plane takes in, how long a newcomer needs, and how soon an advert is seen.

One directory, 8 announcing nodes, 2 replicas that follow, all of them processes, on two cores. The directory grows
from size to size; at each a newcomer fetches a snapshot and looks entries up, and adverts of a probe are timed while
the nodes describe entries anew at a steady rate. `adverts_per_s` is of the last growth: every node has noted what it
will announce, and then all of them send as fast as the directory takes it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ec_p2p.cli.bench_fleet import (
    Remote,
    poll_until,
    serve_directory,
    serve_newcomer,
    serve_nodes,
    serve_replica,
    touch_memory,
)

_CORES = 2
_NODES = 8
_REPLICAS = 2
_BYTES_PER_ENTRY = 700
_FLEET_BYTES_PER_ENTRY = 2_500
"""What a replica, and all processes together, use at most."""
_LEAST_ADVERTS_PER_S = 300_000
_LONGEST_SNAPSHOT_S = 2.0
_LONGEST_LOOKUP_US = 2.0
_LONGEST_VISIBLE_MS = 20.0
_FLAT = 2.0
"""At the largest size half of the adverts may take this many times as long to be seen as at the smallest."""


@dataclass(frozen=True)
class Plan:
    """`load_per_s` adverts a second are announced while probes are timed."""

    sizes: tuple[int, ...]
    load_per_s: int
    probes: int
    newcomers: int
    """At each size; what is said is the median."""
    probe_gap_s: float = 0.005


FULL = Plan((1_000, 100_000, 1_000_000), 30_000, 1_000, 3)
QUICK = Plan((80, 800, 4_000), 2_000, 20, 1)


def run(plan: Plan, *, as_json: bool) -> int:
    """Measure and print. Returns the exit status."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:_CORES])
    try:
        figures = measure(plan)
    finally:
        os.sched_setaffinity(0, cores)
    figures["gates"] = gates(figures)
    print(json.dumps(figures) if as_json else _table(figures))
    return 0


def measure(plan: Plan) -> dict[str, Any]:
    """Every figure but the gates. Sizes are keys as text, as JSON has them."""
    with ExitStack() as stack:

        def start(main: Callable[..., None], *args: Any) -> Remote:
            remote = Remote(main, *args)
            stack.callback(remote.close)
            return remote

        directory = start(serve_directory)
        endpoint, _ = directory.hear()
        nodes = [start(serve_nodes, endpoint, [number]) for number in range(_NODES)]
        probe = start(serve_nodes, endpoint, [_NODES])
        replicas = [start(serve_replica, endpoint) for _ in range(_REPLICAS)]
        fleet = _Fleet(directory, nodes, probe, replicas)
        figures: dict[str, Any] = {"nodes": _NODES, "replicas": _REPLICAS, "load_per_s": plan.load_per_s}
        by_size: dict[str, dict[str, float]] = {
            name: {} for name in ("snapshot_s", "snapshot_bytes", "lookup_us", "visible_ms_p50_at", "visible_ms_p99_at")
        }
        for size in plan.sizes:
            key = str(size)
            grown = fleet.grow_to(size)
            newcomer = _median([fleet.newcomer(endpoint) for _ in range(plan.newcomers)])
            by_size["snapshot_s"][key] = round(newcomer["seconds"], 3)
            by_size["snapshot_bytes"][key] = int(newcomer["snapshot_bytes"])
            by_size["lookup_us"][key] = round(newcomer["lookup_us"], 2)
            by_size["visible_ms_p50_at"][key], by_size["visible_ms_p99_at"][key] = fleet.visible(plan)
        _, during_snapshot = fleet.visible(plan, lambda: fleet.newcomer(endpoint))
        stats = directory.ask("stats")
        return {
            "adverts_per_s": round(grown["adverts_per_s"]),
            "followed_per_s": round(grown["followed_per_s"]),
            **by_size,
            "bytes_per_entry": round(newcomer["bytes_per_entry"]),
            "directory_bytes_per_entry": round((stats["rss"] - fleet.first_rss) / plan.sizes[-1]),
            "visible_ms_p50": by_size["visible_ms_p50_at"][key],
            "visible_ms_p99": by_size["visible_ms_p99_at"][key],
            "visible_ms_p99_during_snapshot": during_snapshot,
            **figures,
            "slow_subscribers": stats["slow_subscribers"],
            "snapshots_given_up": stats["snapshots_given_up"],
        }


class _Fleet:
    """The processes, and what is done with them together."""

    def __init__(self, directory: Remote, nodes: list[Remote], probe: Remote, replicas: list[Remote]) -> None:
        self.directory = directory
        self.nodes = nodes
        self.probe = probe
        self.replicas = replicas
        self.probe.ask("probe", 64, 0.0)
        self.first_rss = self.directory.ask("stats")["rss"]

    def grow_to(self, size: int) -> dict[str, float]:
        """Until the nodes together hold so many entries. {adverts_per_s: into the directory, followed_per_s: until
        both replicas have them too}."""
        for node in self.nodes:
            node.ask("make", size // len(self.nodes))
        touch_memory(size * _FLEET_BYTES_PER_ENTRY)
        for node in self.nodes:
            node.tell("note")
        for node in self.nodes:
            node.hear()
        before = self.directory.ask("stats")["adverts"]
        started = time.monotonic()
        for node in self.nodes:
            node.tell("send")
        for node in self.nodes:
            node.hear()
        entries = size // len(self.nodes) * len(self.nodes)
        poll_until(lambda: self.directory.ask("stats")["entries"] >= entries)
        taken_in = time.monotonic() - started
        adverts = self.directory.ask("stats")["adverts"] - before
        self._until_followed()
        return {
            "adverts_per_s": adverts / taken_in,
            "followed_per_s": adverts / (time.monotonic() - started),
        }

    def newcomer(self, endpoint: str) -> dict[str, float]:
        touch_memory(int(self.directory.ask("stats")["entries"]) * _BYTES_PER_ENTRY)
        before = self.directory.ask("stats")["snapshot_bytes"]
        remote = Remote(serve_newcomer, endpoint)
        try:
            answer: dict[str, float] = remote.hear()
        finally:
            remote.close()
        answer["snapshot_bytes"] = self.directory.ask("stats")["snapshot_bytes"] - before
        return answer

    def visible(self, plan: Plan, meanwhile: Callable[[], Any] = lambda: None) -> tuple[float, float]:
        """Milliseconds (p50, p99) from a probe's advert until a replica has it."""
        for node in self.nodes:
            node.tell("pace", plan.load_per_s / len(self.nodes))
        self.probe.ask("probe", 20, plan.probe_gap_s)
        for replica in self.replicas:
            replica.ask("latencies")
        self.probe.tell("probe", plan.probes, plan.probe_gap_s)
        meanwhile()
        self.probe.hear()
        for node in self.nodes:
            node.ask("rest")
        self._until_followed()
        latencies = sorted(ms for replica in self.replicas for ms in replica.ask("latencies"))
        return round(latencies[len(latencies) // 2], 2), round(latencies[len(latencies) * 99 // 100], 2)

    def _until_followed(self) -> None:
        poll_until(
            lambda: {replica.ask("state")[1] for replica in self.replicas} == {self.directory.ask("stats")["seq"]}
        )


def _median(measured: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in measured) for name in measured[0]}


def gates(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{name: {value, limit, met}}; the worst of all sizes where there is one for each."""
    smallest, *_, largest = figures["snapshot_s"]
    p50 = figures["visible_ms_p50_at"]
    return {
        "adverts_per_s": {
            "value": figures["adverts_per_s"],
            "limit": _LEAST_ADVERTS_PER_S,
            "met": figures["adverts_per_s"] >= _LEAST_ADVERTS_PER_S,
        },
        "snapshot_s": _at_most(_LONGEST_SNAPSHOT_S, figures["snapshot_s"][largest]),
        "lookup_us": _at_most(_LONGEST_LOOKUP_US, max(figures["lookup_us"].values())),
        "visible_ms_p99": _at_most(_LONGEST_VISIBLE_MS, max(figures["visible_ms_p99_at"].values())),
        "visible_p50_largest_to_smallest": _at_most(_FLAT, round(p50[largest] / p50[smallest], 2)),
    }


def _at_most(limit: float, value: float) -> dict[str, Any]:
    return {"value": value, "limit": limit, "met": value <= limit}


def _table(figures: dict[str, Any]) -> str:
    sizes = list(figures["snapshot_s"])
    lines = [
        f"directory, {figures['nodes']} nodes, {figures['replicas']} replicas, on {_CORES} cores at most",
        f"{'entries':>10} {'snapshot s':>12} {'bytes':>12} {'lookup us':>10} {'visible ms p50 (p99)':>24}",
    ]
    for size in sizes:
        visible = f"{figures['visible_ms_p50_at'][size]} ({figures['visible_ms_p99_at'][size]})"
        lines.append(
            f"{size:>10} {figures['snapshot_s'][size]:12.3f} {figures['snapshot_bytes'][size]:>12} "
            f"{figures['lookup_us'][size]:10.2f} {visible:>24}"
        )
    lines += [
        f"adverts/s in: {figures['adverts_per_s']}, until the replicas had them too: {figures['followed_per_s']}",
        f"visible: with {figures['load_per_s']} adverts/s of others; "
        f"p99 while a newcomer fetches a snapshot of {sizes[-1]}: {figures['visible_ms_p99_during_snapshot']} ms",
        f"bytes an entry: {figures['bytes_per_entry']} in a replica, "
        f"{figures['directory_bytes_per_entry']} in the directory",
    ]
    for name, gate in figures["gates"].items():
        lines.append(f"{name:>32} {gate['value']:>12} limit {gate['limit']:>10}{'' if gate['met'] else '  missed'}")
    return "\n".join(lines)
