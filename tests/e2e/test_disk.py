"""Real vLLM over a node with a disk tier: what only a disk still holds reaches engines on other hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chat import ask, chat_body
from fleet import Fleet, Server
from processes import until

from tests.e2e.counting import Change, salted, same
from tests.e2e.rig import PATIENCE_S, encode, inspect, kill_node, looking_into, node_pids

Image = Callable[..., str]

pytestmark = pytest.mark.nixl


def test_a_restarted_node_serves_other_hosts_from_its_disk(
    own: Fleet, plain: Server, fresh_image: Image, tmp_path: Path
) -> None:
    """The encoder's engine and its node are killed. A node alone comes back, with an empty arena and the old folder."""
    first, second = own.host("host1"), own.host("host2")
    # Nodes that are dead are to be known as such soon.
    common = {"namespace": "tests", "node_timeout_s": 4.0, "read_timeout_s": 2.0}
    settings = {**common, "local_disk": str(tmp_path / "disk"), "grace_s": 120.0}
    connector = own.connector("ec_producer", first, **settings)
    producer = own.server("producer", first, connector)
    consumer = own.server("consumer", second, own.connector("ec_consumer", second, **common))
    own.wait_ready([producer, consumer])
    images = [fresh_image(), fresh_image(width=500)]
    hint = encode(producer.url, chat_body("encode", images))
    with looking_into(own, first) as node:
        until(lambda: inspect(node).counters.get("disk_writes") == 2, "two files", timeout_s=PATIENCE_S)
    producer.process.kill()
    kill_node(own.run, first)
    assert node_pids(own.run, first) == []
    extra = {**connector["ec_connector_extra_config"], "ec_ip": "127.0.0.1", "ec_port": own.ec_port}
    command = [sys.executable, "-m", "ec_p2p.cli", "node", "--name", first.node_name, "--settings", json.dumps(extra)]
    own.run.start("node-alone", command, {})
    until(lambda: node_pids(own.run, first), "the node to start", timeout_s=PATIENCE_S)
    with looking_into(own, first) as node:
        until(lambda: inspect(node).gauges["peers_ready"] == 1, "the nodes to know each other", timeout_s=PATIENCE_S)
    # The hint has the consumer wait until its node has heard of the new one's folder, and of the old one's end.
    change, body = Change(consumer), salted("from a disk", *images, ec_transfer_params=hint)
    same(ask(consumer.url, body), plain, body)
    change.settles(answered=1, encodes=0, landed_remote=2)
    with looking_into(own, first) as node:
        counted = inspect(node).counters
    assert counted["stagings{outcome=staged}"] == 2
    assert counted["stage_requests{outcome=staged}"] == 2


def test_an_engine_and_its_node_restart_together_and_are_warm(
    own: Fleet, plain: Server, fresh_image: Image, tmp_path: Path
) -> None:
    """A reboot of a host: the first request of its next life finds its image on disk."""
    host, image = own.host("host1"), fresh_image()
    connector = own.connector("ec_both", host, namespace="tests", local_disk=str(tmp_path / "disk"))
    server = own.server("before", host, connector)
    own.wait_ready([server])
    ask(server.url, salted("before", image))
    with looking_into(own, host) as node:
        until(lambda: inspect(node).counters.get("disk_writes") == 1, "one file", timeout_s=PATIENCE_S)
    server.process.kill()
    kill_node(own.run, host)
    again = own.server("after", host, connector)
    own.wait_ready([again])
    change, body = Change(again), salted("after", image)
    same(ask(again.url, body), plain, body)
    change.settles(answered=1, encodes=0, landed_disk=1)
    assert change.now().total("vllm:ec_p2p_lookups_total", outcome="disk") == 1
