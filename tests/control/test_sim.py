"""The control plane in any weather: real directories, announcers and views on virtual sockets, under virtual time.

What is asserted is in `sim_checks`; in short: a replica with a position says what the directory said at that position,
but for what it doubts; nothing withdrawn comes back; every change is told; and who had no trouble for the time that
docs/protocol.md states is right, to the last advert.

The runs here are few and always the same. For more, of other lengths and other kinds, each time others:

    EC_P2P_SIM_RUNS=500 pytest tests/control/test_sim.py

A run that fails names its seed, or the steps that hypothesis found.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .sim_checks import BOUND_S, Checks
from .sim_fleet import LOST_WITHIN_S, Fleet, Step
from .sim_network import CAPACITY, Network
from .sim_parties import KEYS, TIMEOUT_S, Node, small_pieces

RUNS = int(os.environ.get("EC_P2P_SIM_RUNS", "0"))
START_S = 3.0
BETWEEN_HEARTBEATS_S = 0.3
"""After a whole number of seconds: all nodes started at the same time, and speak every second."""

WORK = {"wait": 30, "change": 30, "burst": 1, "describe": 2, "rest": 2}
NODES_END = {"start_node": 2, "kill_node": 2, "leave_node": 2}
DIRECTORIES_END = {"start_directory": 4, "kill_directory": 2, "flap": 2}
TROUBLE = {
    **NODES_END,
    **DIRECTORIES_END,
    "pause_directory": 2,
    "pause_follower": 2,
    "restart_observer": 1,
    "cut": 4,
    "reset": 2,
    "lose": 3,
    "repeat": 2,
}


@contextmanager
def simulated(seed: int, directories: int = 2, nodes: int = 3, capacity: int = CAPACITY) -> Iterator[Checks]:
    network = Network(seed)
    network.capacity = capacity
    with network.time(), small_pieces(seed):
        fleet = Fleet(network, directories, nodes)
        try:
            checks = Checks(fleet)
            network.run(START_S)
            yield checks
        finally:
            fleet.close()


def play(checks: Checks, steps: list[Step]) -> None:
    """Take the steps, then mend everything: in time, all must be well."""
    for step in steps:
        checks.fleet.do(step)
        checks.in_time()
    checks.fleet.heal()
    checks.network.run(BOUND_S)
    checks.in_time()
    checks.whole()


def draw(chance: random.Random, weights: dict[str, int], count: int) -> list[Step]:
    names = chance.choices(list(weights), list(weights.values()), k=count)
    return [(name, chance.randrange(64), chance.randrange(64)) for name in names]


def seeds(count: int) -> list[int]:
    return [random.randrange(1 << 32) for _ in range(RUNS)] if RUNS else list(range(count))


@pytest.mark.parametrize("seed", seeds(10))
def test_in_any_weather_it_is_right_and_in_time_it_is_whole(seed: int) -> None:
    chance = random.Random(seed)
    some = chance.sample(list(TROUBLE), chance.randint(1, len(TROUBLE)))
    weights = WORK | {name: TROUBLE[name] for name in some}
    capacity = chance.choice([4, 20, CAPACITY])
    with simulated(seed, chance.randint(1, 3), chance.randint(1, 3), capacity) as checks:
        play(checks, draw(chance, weights, chance.randint(40, 160)))


steps = st.tuples(st.sampled_from([*["wait", "change"] * 6, *WORK, *TROUBLE]), st.integers(0, 47), st.integers(0, 47))


@settings(
    max_examples=RUNS or 10,
    derandomize=not RUNS,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps=st.lists(steps, min_size=5, max_size=80), seed=st.integers(0, 1000))
def test_in_weather_that_hypothesis_makes(steps: list[Step], seed: int) -> None:
    with simulated(seed) as checks:
        play(checks, steps)


@pytest.mark.parametrize("seed", seeds(5))
def test_lookups_never_fail_because_of_a_directory(seed: int) -> None:
    """Directories die, come back empty, or stand still, one after the other or all at once; the nodes live."""
    chance = random.Random(seed)
    with simulated(seed, directories=chance.randint(2, 3)) as checks:
        checks.lookups_must_not_fail = True
        play(checks, draw(chance, WORK | DIRECTORIES_END | {"pause_directory": 2}, 50))


@pytest.mark.parametrize("seed", seeds(5))
def test_nor_do_they_because_the_only_directory_comes_and_goes(seed: int) -> None:
    with simulated(seed, directories=1) as checks:
        checks.lookups_must_not_fail = True
        weights = {"wait": 8, "change": 8, "rest": 1, "flap": 4, "pause_directory": 2}
        play(checks, draw(random.Random(seed), weights, 60))


@pytest.mark.parametrize("seed", seeds(5))
def test_the_dead_are_gone_in_five_seconds_and_those_who_leave_at_once(seed: int) -> None:
    chance = random.Random(seed)
    with simulated(seed) as checks:
        checks.network.run(BOUND_S)
        play(checks, draw(chance, WORK | NODES_END, 120))


# -------------------------------------------------------- single stories


def test_a_fleet_that_never_stands_still_is_followed_all_the_same() -> None:
    """Something is published between any request for a snapshot and its answer."""
    with simulated(1, directories=1, nodes=1) as checks:
        fleet, network = checks.fleet, checks.network
        # Snapshots come late.
        network.latencies_s[fleet.endpoints[0]] = (0.1, 0.12)
        fleet.do(("restart_observer", 0, 0))
        until = network.now + BOUND_S + 2.0
        while network.now < until:
            fleet.do(("change", 0, network.random.randrange(len(KEYS))))
            network.run(0.03)
            checks.in_time()
        assert all(replica.settled for replica in fleet.observer.view.replicas)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("changes", [1, 2])
@pytest.mark.parametrize("where", ["announced", "published"])
def test_a_word_that_is_lost_is_missed_also_if_no_other_follows(where: str, changes: int, seed: int) -> None:
    with simulated(seed) as checks:
        fleet, network = checks.fleet, checks.network
        network.run(BETWEEN_HEARTBEATS_S)
        host = fleet.hosts[0]
        for follower in fleet.followers() if where == "published" else [fleet.nodes["node-0"]]:
            endpoint = host.pub_endpoint if where == "published" else host.address
            network.lose(follower.name, endpoint, 1, LOST_WITHIN_S)
        for key in range(changes):
            fleet.do(("change", 0, key))
            network.run(0.02)
        network.run(BOUND_S)
        checks.whole()


@pytest.mark.parametrize("skip", range(8))
def test_a_snapshot_that_has_lost_a_part_is_asked_for_again(skip: int) -> None:
    with simulated(1) as checks:
        fleet, network = checks.fleet, checks.network
        for node in range(3):
            for key in range(len(KEYS)):
                fleet.do(("change", node, key))
        network.run(1.0)
        for endpoint in fleet.endpoints:
            network.lose(fleet.observer.name, endpoint, 1, LOST_WITHIN_S, skip)
        fleet.do(("restart_observer", 0, 0))
        network.run(BOUND_S)
        checks.whole()


@pytest.mark.parametrize("seed", range(5))
def test_a_life_that_follows_a_short_one_gives_the_whole_time_again(seed: int) -> None:
    """Replicas have found the short one, but nodes have not spoken to it; when it has gone for almost that time, a next
    one comes."""
    with simulated(seed, directories=1) as checks:
        fleet, network = checks.fleet, checks.network
        checks.lookups_must_not_fail = True
        for node in range(3):
            fleet.do(("change", node, 0))
        network.run(1.0 + BETWEEN_HEARTBEATS_S)
        fleet.do(("start_directory", 0, 0))
        network.run(0.4)
        fleet.do(("kill_directory", 0, 0))
        network.run(TIMEOUT_S - 0.7)
        fleet.do(("start_directory", 0, 0))
        network.run(BOUND_S)
        checks.whole()


def names(checks: Checks) -> set[str]:
    return {node.name for node in checks.fleet.observer.view.nodes()}


def test_the_dead_of_a_directory_that_was_lost_long_ago_do_not_come_back_with_the_loss_of_another() -> None:
    with simulated(1) as checks:
        fleet, network = checks.fleet, checks.network
        network.run(BOUND_S)
        fleet.do(("kill_directory", 0, 0))
        network.run(BOUND_S)
        fleet.do(("kill_node", 0, 0))
        network.run(TIMEOUT_S + 1.0)
        assert names(checks) == {"node-1", "node-2"}
        fleet.do(("kill_directory", 1, 0))
        network.run(BOUND_S)
        assert names(checks) == {"node-1", "node-2"}
        assert not fleet.observer.view.fresh


def test_nor_do_they_come_back_with_that_directory() -> None:
    with simulated(1) as checks:
        fleet, network = checks.fleet, checks.network
        network.run(BOUND_S)
        fleet.do(("kill_directory", 0, 0))
        network.run(BOUND_S)
        fleet.do(("kill_node", 0, 0))
        network.run(TIMEOUT_S + 1.0)
        fleet.do(("start_directory", 0, 0))
        for _ in range(int(BOUND_S)):
            network.run(1.0)
            assert names(checks) == {"node-1", "node-2"}
        assert all(replica.settled for replica in fleet.observer.view.replicas)


def test_an_entry_goes_through_all_its_states_and_everybody_sees_each() -> None:
    with simulated(1) as checks:
        fleet, network = checks.fleet, checks.network
        node: Node = fleet.nodes["node-0"]
        seen = []
        for _ in range(20):
            fleet.change(0, 0)
            network.run(1.0)
            for follower in fleet.followers():
                found = follower.view.lookup(KEYS[0])
                held = node.life.held.get(KEYS[0])
                assert found == ([(node.life.info, held[0])] if held else [])
            seen.append(held[0].state if held else None)
        assert set(seen) == {None, 0, 1, 2}
