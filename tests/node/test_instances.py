"""Which vLLM instances a node tells of: the union of what its clients say, for as long as one of them is attached."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ec_p2p.control.messages import MAX_INSTANCES, InstanceInfo
from ec_p2p.node.client import NodeClient
from ec_p2p.node.instances import instances_of
from ec_p2p.node.messages import CLIENT_PROTOCOL_VERSION, Attach
from tests.control.harness import Loop
from tests.node.conftest import PATIENCE_S, Fleet

NAMESPACE = "ab" * 32


def hello(kind: str, instance: str, role: str = "", namespace: str = "") -> Attach:
    return Attach(CLIENT_PROTOCOL_VERSION, kind, instance, 0, role, namespace)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_each_client_adds_what_it_knows() -> None:
    attached = [
        hello("worker", "b", "consumer"),
        hello("scheduler", "b", "consumer", NAMESPACE),
        hello("worker", "b", "consumer"),
        hello("worker", "a", "producer"),
        hello("tool", "look", "producer", NAMESPACE),
        hello("worker", "older"),
    ]
    expected = [
        InstanceInfo("a", "producer", ""),
        InstanceInfo("b", "consumer", NAMESPACE),
        InstanceInfo("older", "unknown", ""),
    ]
    assert instances_of(attached) == expected
    assert instances_of(reversed(attached)) == expected


def test_nothing_is_told_that_a_directory_would_not_take() -> None:
    attached = [
        hello("scheduler", "long namespace", "both", "n" * 65),
        hello("scheduler", "", "both"),
        hello("scheduler", "n" * 256, "both"),
        hello("scheduler", "odd role", "r" * 17),
    ]
    assert instances_of(attached) == [InstanceInfo("long namespace", "both", "")]
    many = instances_of(hello("worker", f"{number:04}", "both") for number in range(2 * MAX_INSTANCES))
    assert [info.name for info in many] == [f"{number:04}" for number in range(MAX_INSTANCES)]


def test_the_directory_is_told_while_clients_come_and_go(zmq_fleet: Fleet, loop: Loop) -> None:
    before = int(time.time())
    node = zmq_fleet.node("a")
    zmq_fleet.client(node)
    replica = loop.replica(node.config.directories[0])
    loop.until(replica.nodes, "the node to say hello")
    [info] = replica.nodes()
    assert before <= info.started_at <= time.time()

    def told() -> list[InstanceInfo]:
        return replica.instances(info.incarnation)

    def attach(kind: str, instance: str, **what: str) -> NodeClient:
        client = NodeClient(node.config, kind, instance, 0, **what)  # type: ignore[arg-type]
        assert client.attach(PATIENCE_S)
        return client

    worker = attach("worker", "engine/dp0", role="both")
    loop.until(lambda: told() == [InstanceInfo("engine/dp0", "both", "")])
    scheduler = attach("scheduler", "engine/dp0", role="both", namespace=NAMESPACE)
    loop.until(lambda: told() == [InstanceInfo("engine/dp0", "both", NAMESPACE)])
    other = attach("scheduler", "engine/dp1", role="producer")
    loop.until(lambda: len(told()) == 2)
    scheduler.close()
    loop.until(lambda: told() == [InstanceInfo("engine/dp0", "both", ""), InstanceInfo("engine/dp1", "producer", "")])
    worker.close()
    other.close()
    loop.until(lambda: not told(), "the instances to go with their last clients")
    assert replica.nodes() == [info]
