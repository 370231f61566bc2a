"""A lander by itself: a real holder over real NIXL; the node's words are scripted: it would not say all of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ec_p2p.config import make_config
from ec_p2p.engine.generation import RECORD_BYTES, Record, pack
from ec_p2p.node import lander as lander_module
from ec_p2p.node.client import Detached
from ec_p2p.node.device import device_for
from ec_p2p.node.messages import DropEntry, PeerCard, PeerGone, Quarantined, ReadEnded, ReadEntry
from ec_p2p.transport import nixl_available
from tests.transport.ends import Holder, in_child, stop_process, until

pytestmark = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]

NODE, NEXT_NODE = b"n" * 16, b"m" * 16
IDENTITY = b"i" * 32
ROWS, DIM = 128, 64
NBYTES = 2 * ROWS * DIM
RECORD_AT = 1 << 20
RECORD = Record(7, IDENTITY, NBYTES, ROWS, DIM, "bfloat16")


class ScriptedClient:
    """The lander's link to its node, as `NodeClient` has it: hears what the test says, and keeps what is answered."""

    def __init__(self, *_):
        self.incarnation = NODE
        self.next_node = NEXT_NODE
        self._said = []
        self._news = threading.Condition()
        self.answers = []
        self.quarantine = []

    def attach(self, timeout_s=0.0):
        return True

    def poll(self, timeout_s=0.0):
        with self._news:
            self._news.wait_for(lambda: self._said, timeout_s)
            said, self._said = self._said, []
        for message in said:
            if isinstance(message, Detached):
                self.incarnation = self.next_node
        return said

    def send(self, message):
        kept = self.quarantine if isinstance(message, Quarantined) else self.answers
        kept.append(message)
        return True

    def close(self):
        pass

    def say(self, *messages):
        with self._news:
            self._said.extend(messages)
            self._news.notify()


@contextlib.contextmanager
def lander_in_this_process(**settings):
    lander_module.NodeClient = ScriptedClient
    config = make_config({"landing_size": "1MiB", "ec_ip": "127.0.0.1", "read_timeout_s": 5.0, **settings})
    failures = []
    lander = lander_module.Lander(config, "engine", 0, device_for("cpu"), lambda *what: failures.append(repr(what)))
    yield lander, lander._client
    lander.close()
    assert not failures


def entry(read, peer, offset=0, **changes):
    fields = {"generation": 7, "identity": IDENTITY, "nbytes": NBYTES, "rows": ROWS, "dim": DIM, "dtype": "bfloat16"}
    return ReadEntry(read, bytes.fromhex(peer), offset, RECORD_AT, **{**fields, **changes})


def answers_to(client, *messages):
    """One for each message that asks for an entry."""
    client.answers.clear()
    client.say(*messages)
    asked = sum(isinstance(message, ReadEntry) for message in messages)
    until(lambda: len(client.answers) >= asked, "the lander's answers")
    return client.answers[:]


def view(lander, incarnation, read):
    return lander.view(incarnation, read).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def holder():
    holder = Holder("nixl", "ab" * 16)
    holder.ask("write", RECORD_AT, pack(RECORD))
    yield holder
    holder.close()


def read_all_kinds(name, card):
    with lander_in_this_process() as (lander, client):
        met = PeerCard(bytes.fromhex(name), card)
        before = lander.free_bytes
        unknown = answers_to(client, entry(1, name))
        good = answers_to(client, met, entry(2, name, 4096))
        landed = view(lander, NODE, 2)
        changed = [
            answers_to(client, entry(10 + number, name, **change))[0].reason
            for number, change in enumerate(
                [
                    {"generation": 8},
                    {"generation": 0},
                    {"identity": b"j" * 32},
                    {"rows": ROWS // 2, "dim": 2 * DIM},
                    {"dtype": "float16"},
                    {"nbytes": NBYTES - 2},
                ]
            )
        ]
        beyond = answers_to(client, entry(20, name, 1 << 40))
        nothing_left = lander.free_bytes == before - NBYTES
        client.say(DropEntry(2), DropEntry(2), DropEntry(99))
        until(lambda: lander.free_bytes == before, "the memory of what was dropped")
        gone = answers_to(client, PeerGone(bytes.fromhex(name)), entry(30, name))
        back = answers_to(client, met, entry(31, name))
        return unknown, good, landed, changed, beyond, nothing_left, gone, back


def test_only_what_was_promised_lands(holder):
    unknown, good, landed, changed, beyond, nothing_left, gone, back = in_child(
        read_all_kinds, holder.name, holder.card
    )
    assert unknown == [ReadEnded(1, "refused")]
    assert good == [ReadEnded(2, "")]
    assert landed == holder.bytes[4096 : 4096 + NBYTES]
    assert changed == ["changed"] * 6
    assert beyond == [ReadEnded(20, "refused")]
    assert nothing_left
    assert gone == [ReadEnded(30, "refused")]
    assert back == [ReadEnded(31, "")]


def read_into_a_full_pool(name, card):
    with lander_in_this_process() as (lander, client):
        half = lander.free_bytes // 2 // 4096 * 4096
        rows = half // (2 * DIM)
        size = {"nbytes": rows * 2 * DIM, "rows": rows}
        first = answers_to(client, PeerCard(bytes.fromhex(name), card), *(entry(n, name, **size) for n in range(1, 4)))
        return sorted(answer.reason for answer in first)


def test_what_finds_no_room_is_told_at_once(holder):
    # The record is of another size, so what was read is not kept either; the third was refused before.
    assert in_child(read_into_a_full_pool, holder.name, holder.card) == ["changed", "changed", "no_memory"]


def outlive_a_node(name, card):
    hours = itertools.count()
    passed_s = 0.0
    lander_module.time = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s, sleep=time.sleep)
    with lander_in_this_process() as (lander, client):
        before = lander.free_bytes
        met = PeerCard(bytes.fromhex(name), card)
        answers_to(client, met, entry(1, name))
        # As `poll` says it where the next node is there before the end of the old one is noticed.
        answers_to(client, met, entry(1, name, 8192), Detached(NODE))
        old, new = view(lander, NODE, 1), view(lander, NEXT_NODE, 1)

        def let_go():
            nonlocal passed_s
            passed_s = 3600.0 * next(hours)
            return lander.free_bytes == before - NBYTES

        until(let_go, "what the old node promised to be let go of")
        with pytest.raises(LookupError):
            lander.view(NODE, 1)
        return old, new


def test_what_has_landed_outlives_its_node_for_a_while(holder):
    old, new = in_child(outlive_a_node, holder.name, holder.card)
    assert old == holder.bytes[:NBYTES]
    assert new == holder.bytes[8192 : 8192 + NBYTES]


def outlive_a_node_that_has_no_next(name, card):
    lander_module.OLD_ARENA_S = 0.0
    with lander_in_this_process() as (lander, client):
        before = lander.free_bytes
        client.next_node = b""
        answers_to(client, PeerCard(bytes.fromhex(name), card), entry(1, name))
        client.say(Detached(NODE))
        until(lambda: not client.incarnation)
        for _ in range(2):
            tick = lander._next_tick
            until(lambda tick=tick: lander._next_tick > tick, "a tick")
        landed = view(lander, NODE, 1)
        client.incarnation = NEXT_NODE
        until(lambda: lander.free_bytes == before, "what the old node promised to be let go of")
        return landed


def test_what_has_landed_stays_until_there_is_a_next_node(holder):
    assert in_child(outlive_a_node_that_has_no_next, holder.name, holder.card) == holder.bytes[:NBYTES]


def fail_over_one_message(name, card):
    lander_module.NodeClient = ScriptedClient
    failures = []
    config = make_config({"landing_size": "1MiB", "ec_ip": "127.0.0.1"})
    lander = lander_module.Lander(config, "engine", 0, device_for("cpu"), lambda *what: failures.append(repr(what)))
    before = lander.free_bytes
    answers_to(lander._client, PeerCard(bytes.fromhex(name), card), entry(1, name))
    reserve = lander._pool.reserve

    def fail(nbytes):
        lander._pool.reserve = reserve
        raise ValueError("of one message")

    lander._pool.reserve = fail
    said = answers_to(lander._client, entry(2, name), entry(3, name), DropEntry(1))
    until(lambda: lander.free_bytes == before - NBYTES, "the entry that was dropped")
    lander.close()
    lander.close()
    return said, failures


def test_an_error_over_one_message_loses_none_of_the_others(holder):
    said, failures = in_child(fail_over_one_message, holder.name, holder.card)
    assert said == [ReadEnded(2, "error"), ReadEnded(3, "")]
    assert failures == ["('lander', ValueError('of one message'))"]


def hear_of_a_card_that_is_of_no_use(name, card):
    levels = []
    lander_module.logger.log = lambda level, *_: levels.append(logging.getLevelName(level))
    with lander_in_this_process() as (_, client):
        peer = bytes.fromhex(name)
        useless = PeerCard(peer, b"of another transport")
        said = answers_to(client, useless, useless, entry(1, name), PeerCard(peer, b"another"), PeerGone(peer), useless)
        good = answers_to(client, PeerCard(peer, card), entry(2, name))
        return said, good, levels


def test_a_card_that_is_of_no_use_is_warned_of_once(holder):
    said, good, levels = in_child(hear_of_a_card_that_is_of_no_use, holder.name, holder.card)
    assert said == [ReadEnded(1, "refused")]
    assert good == [ReadEnded(2, "")]
    assert levels == ["WARNING", "DEBUG", "WARNING", "WARNING"]


def end_while_reading(name, card):
    lander_module.NodeClient = ScriptedClient
    config = make_config({"landing_size": "1GiB", "ec_ip": "127.0.0.1"})
    lander = lander_module.Lander(config, "engine", 0, device_for("cpu"), print)
    answers_to(lander._client, PeerCard(bytes.fromhex(name), card), entry(1, name))
    if not os.fork():
        sys.exit(0)  # it has inherited what is to be done at the end, but nothing to do it with
    _, status = os.wait()
    for number in range(2, 200):
        lander._client.say(entry(number, name, nbytes=256 * NBYTES, rows=256 * ROWS))
    return os.waitstatus_to_exitcode(status)


def test_a_process_that_ends_without_closing_its_lander_ends_well(holder):
    """As vLLM's do: `in_child` looks at the exit status."""
    assert in_child(end_while_reading, holder.name, holder.card) == 0


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (SimpleNamespace(kind="", index=0), "no word for the memory"),
        (SimpleNamespace(kind="VRAM", index=0, memory=lambda nbytes: torch.empty(1 << 62)), "landing_size=268435456: "),
    ],
)
def test_a_device_that_cannot_be_landed_on_is_refused_by_what_it_lacks(device, message):
    with pytest.raises(RuntimeError, match=message):
        lander_module.Lander(make_config({}), "engine", 0, device, print)


def read_from_a_stopped_holder(name, card, pid):
    import os
    import signal

    os.environ["UCX_TLS"] = "tcp"
    with lander_in_this_process() as (lander, client):
        before = lander.free_bytes
        answers_to(client, PeerCard(bytes.fromhex(name), card), entry(1, name))
        client.say(DropEntry(1))
        until(lambda: lander.free_bytes == before, "the first entry's memory")
        stop_process(pid)
        late = answers_to(client, entry(2, name))
        stuck = answers_to(client, entry(3, name))
        detained = before - lander.free_bytes
        until(lambda: client.quarantine, "the node to be told")
        client.say(Detached(NODE))
        until(lambda: len(client.quarantine) == 2, "the next node to be told")
        os.kill(pid, signal.SIGCONT)
        until(lambda: lander.free_bytes == before, "quarantine to end")
        until(lambda: len(client.quarantine) == 3, "the node to be told of its end")
        after = answers_to(client, PeerCard(bytes.fromhex(name), card), entry(4, name))
        return late, stuck, detained, client.quarantine, after


def test_memory_that_a_stopped_holder_may_write_to_is_kept_from_others(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    holder = Holder("nixl", "cd" * 16)
    try:
        holder.ask("write", RECORD_AT, pack(RECORD))
        late, stuck, detained, told, after = in_child(read_from_a_stopped_holder, holder.name, holder.card, holder.pid)
    finally:
        holder.close()
    assert late == [ReadEnded(2, "late")]
    assert stuck == [ReadEnded(3, "stuck")]
    assert detained == NBYTES
    assert told == [Quarantined(NBYTES, 1), Quarantined(NBYTES, 0), Quarantined(0, 0)]
    assert after == [ReadEnded(4, "")]


def test_the_record_of_the_script_is_one():
    assert len(pack(RECORD)) == RECORD_BYTES
