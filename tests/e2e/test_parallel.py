"""Tensor and data parallelism, for real: one save, one arena and one fetch, however many ranks there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chat import ask, chat_body
from fleet import Fleet, Host, Server
from processes import until

from tests.e2e.counting import Change, salted, same_but_for_rounding
from tests.e2e.rig import PATIENCE_S, copied_directory, encode, entry_bytes, inspect, looking_into, until_known

Image = Callable[..., str]

pytestmark = pytest.mark.nixl

TWO_RANKS = ("--tensor-parallel-size", "2")
TWO_ENGINES = ("--data-parallel-size", "2")


def counted(fleet: Fleet, host: Host, counter: str) -> int:
    """The node's counter of this name, over all its labels."""
    with looking_into(fleet, host) as client:
        counters = inspect(client).counters
    return int(sum(value for name, value in counters.items() if name.partition("{")[0] == counter))


def settles(fleet: Fleet, host: Host, counter: str, value: int) -> None:
    until(lambda: counted(fleet, host, counter) >= value, f"{value} {counter} on {host.label}", timeout_s=PATIENCE_S)
    assert counted(fleet, host, counter) == value


def told(fleet: Fleet, host: Host) -> tuple[list[bytes], list[str]]:
    """What the directory knows of a host's node: its entries, and the instances there."""
    with copied_directory(fleet) as replica:
        (node,) = (node for node in replica.nodes() if node.name == host.node_name)
        held_there = [advert.identity for advert in replica.held_by(node.incarnation)]
        return held_there, [instance.name for instance in replica.instances(node.incarnation)]


def held(fleet: Fleet, host: Host, identity: bytes) -> bytes | None:
    """The bytes of an entry, copied from the arena of a host."""
    with looking_into(fleet, host) as client:
        return entry_bytes(client, identity)


def test_two_ranks_encode_and_two_ranks_load(own: Fleet, plain: Server, fresh_image: Image) -> None:
    one, other = own.host("one"), own.host("other")
    producer = own.server("encoder", one, own.connector("ec_producer", one), TWO_RANKS)
    own.wait_ready([producer])
    consumer = own.server("consumer", other, own.connector("ec_consumer", other), TWO_RANKS)
    own.wait_ready([consumer])
    image = fresh_image()
    hint = encode(producer.url, chat_body("encode", [image]))
    settles(own, one, "saves", 1)
    until_known(own, other, hint)
    change, body = Change(consumer), salted("two ranks", image)
    answer = ask(consumer.url, body)
    change.settles(answered=1, encodes=0, landed_remote=1, landed_local=0, missing=0)
    settles(own, other, "fetches", 1)
    (identity,), instances = told(own, one)
    assert len(instances) == 1, "two ranks are one instance"
    original = held(own, one, identity)
    assert original is not None
    assert held(own, other, identity) == original
    # A rank that had loaded other bytes than the other would have talked the sum of both into another answer.
    same_but_for_rounding(answer, plain, body)


def test_two_ranks_land_on_their_own_devices(own: Fleet, fresh_image: Image) -> None:
    one, other = own.host("one"), own.host("other")
    producer = own.server("encoder", one, own.connector("ec_producer", one))
    settings = {"landing": "device", "landing_size": "16MiB"}
    on_devices = own.server("devices", other, own.connector("ec_consumer", other, **settings), TWO_RANKS)
    # Its ranks round as the others do, which those of a plain vLLM, with an encoder of its own, do not.
    in_arena = own.server("arena", other, own.connector("ec_consumer", other), TWO_RANKS)
    own.wait_ready([producer, on_devices, in_arena])
    images = [fresh_image(), fresh_image()]
    for image in images:
        until_known(own, other, encode(producer.url, chat_body("encode", [image])))
    change = Change(on_devices)
    answer = ask(on_devices.url, salted("two images", *images))
    change.settles(answered=1, encodes=0, landed_remote=2, missing=0)
    settles(own, other, "device_reads", 2)
    assert counted(own, other, "fetches") == 0, "nothing has passed through the node"
    assert told(own, other)[0] == []
    until(lambda: not device_entries(own, other), "the devices' memory to be free", timeout_s=PATIENCE_S)

    change = Change(in_arena)
    assert ask(in_arena.url, salted("two images", *images)).text == answer.text
    change.settles(answered=1, encodes=0, landed_remote=2, missing=0)
    settles(own, other, "fetches", 2)
    assert counted(own, other, "device_reads") == 2


def device_entries(fleet: Fleet, host: Host) -> float:
    with looking_into(fleet, host) as client:
        return inspect(client).gauges["device_entries"]


def test_two_engines_of_one_server_share_one_fetch(own: Fleet, plain: Server, fresh_image: Image) -> None:
    one, other = own.host("one"), own.host("other")
    producer = own.server("encoder", one, own.connector("ec_producer", one), TWO_ENGINES)
    own.wait_ready([producer])
    consumer = own.server("consumer", other, own.connector("ec_consumer", other), TWO_ENGINES)
    own.wait_ready([consumer])
    images = [fresh_image(), fresh_image()]
    hints = [encode(producer.url, chat_body("encode", [image])) for image in images]
    settles(own, one, "saves", 2)
    for hint in hints:
        until_known(own, other, hint)
    change = Change(consumer)
    for turn in range(4):
        body = salted(f"turn {turn}", *images)
        assert ask(consumer.url, body).text == ask(plain.url, body).text
    change.settles(answered=4, encodes=0, missing=0, landed_remote=2)
    settles(own, other, "fetches", 2)
    assert len(set(told(own, other)[1])) == 2, "each engine is an instance of its own"
