"""Entries that land in the memory of the readers' devices: real nodes, real landers, here on devices that are hosts.

UCX wants one agent per process, so each lander runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import msgspec
import pytest
import torch

from ec_p2p.node.device import device_for
from ec_p2p.node.lander import Lander
from ec_p2p.node.messages import Landed, Missing, WantItem
from ec_p2p.transport import nixl_available
from tests.node.conftest import Fleet, until
from tests.transport.ends import PATIENCE_S, start_process, stop_process

pytestmark = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]

KIB = 1 << 10


def land(pipe, config, reader, device):
    """A worker's lander, and its loads: sends the bytes of each (incarnation, read) that it is asked for."""
    failures = []
    lander = Lander(config, "engine", reader, device_for(device), lambda *what: failures.append(repr(what)))
    pipe.send(lander.free_bytes)
    with contextlib.suppress(EOFError):
        while (asked := pipe.recv()) is not None:
            if asked == "free":
                pipe.send((lander.free_bytes, failures))
                continue
            try:
                pipe.send(lander.view(*asked).view(torch.uint8).cpu().numpy().tobytes())
            except LookupError as error:
                pipe.send(str(error))
    lander.close()


class Reader:
    """A lander's process."""

    def __init__(self, node, rank=0, device="cpu"):
        config = msgspec.structs.replace(node.config, landing_size=1 << 20)
        self.process, self._pipe = start_process(land, config, rank, device)
        self.all_free = self._answer()

    def ask(self, *question):
        self._pipe.send(question if len(question) > 1 else question[0])
        return self._answer()

    def free(self):
        free, failures = self.ask("free")
        assert not failures
        return free

    def _answer(self):
        assert self._pipe.poll(PATIENCE_S), "the lander does not answer"
        return self._pipe.recv()

    def close(self):
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def fleet():
    fleet = Fleet("nixl")
    yield fleet
    fleet.close()


@pytest.fixture
def reader_of():
    with contextlib.ExitStack() as readers:

        def start(node):
            reader = Reader(node)
            readers.callback(reader.close)
            return reader

        yield start


class Engine:
    """The scheduler of an engine with landers: what its connector says, and hears."""

    def __init__(self, fleet, node, readers=1):
        self.client = fleet.client(node, "tool", "engine")
        self.readers = readers

    def ask(self, *identities, wait_s=PATIENCE_S, readers=None):
        items = [WantItem(identity, 0) for identity in identities]
        readers = readers or self.readers
        return self.client.node.want(items, readers=readers, wait_s=wait_s, expect_s=wait_s, landing="device")

    def answer(self, want, index):
        return self.client.expect((Landed, Missing), lambda m: (m.want, m.index) == (want, index))

    def want(self, *identities, **settings):
        want = self.ask(*identities, **settings)
        return [self.answer(want, index) for index in range(len(identities))]

    def release(self, *answers):
        self.client.release(*answers)
        self.client.sync()

    def all_free(self, readers):
        for reader in readers:
            until(lambda r=reader: r.free() == r.all_free, "the devices' memory to be free")

    def landers(self, count):
        until(lambda: self.client.inspect().gauges["landers"] == count, f"{count} landers")

    def reads(self, outcome):
        return self.client.inspect().counters.get(f"device_reads{{outcome={outcome}}}", 0)


def payload(number, nbytes=256 * KIB):
    return bytes([number]) * (nbytes // 2) + bytes(reversed(range(256))) * (nbytes // 512)


@pytest.fixture(scope="module")
def fleet_of_two():
    """A holder, and a host with an engine of two readers."""
    with contextlib.closing(Fleet("nixl")) as fleet, contextlib.ExitStack() as resources:
        (_, holder), (b, client) = fleet.connected("a", "b")
        readers = [resources.enter_context(contextlib.closing(Reader(b, rank))) for rank in range(2)]
        engine = Engine(fleet, b, readers=2)
        engine.landers(2)
        yield SimpleNamespace(holder=holder, client=client, readers=readers, engine=engine)


@pytest.fixture
def holder(fleet_of_two):
    return fleet_of_two.holder


@pytest.fixture
def client(fleet_of_two):
    return fleet_of_two.client


@pytest.fixture
def readers(fleet_of_two):
    return fleet_of_two.readers


@pytest.fixture
def engine(fleet_of_two):
    return fleet_of_two.engine


def fresh():
    """An identity that no other test has."""
    return next(_identities).to_bytes(32, "big")


_identities = itertools.count(1)


def test_an_entry_lands_on_the_device_of_every_reader_and_nowhere_else(holder, client, readers, engine):
    before = engine.reads("landed")
    identity = fresh()
    holder.store(identity, payload(1))

    (landed,) = engine.want(identity)
    assert isinstance(landed, Landed)
    assert landed.read
    assert (landed.source, landed.nbytes, landed.rows, landed.dim) == ("remote", 256 * KIB, 2048, 64)
    for reader in readers:
        assert reader.ask(engine.client.node.incarnation, landed.read) == payload(1)
        assert reader.free() == reader.all_free - 256 * KIB
    gauges = client.inspect().gauges
    assert (gauges["entries"], gauges["leases"], gauges["device_entries"]) == (0, 1, 1)

    engine.release(landed)
    engine.all_free(readers)
    for reader in readers:
        assert "has not landed here" in reader.ask(engine.client.node.incarnation, landed.read)
    assert client.inspect().gauges["device_entries"] == 0
    assert engine.reads("landed") == before + 1


def test_each_reader_lets_go_by_itself_and_the_last_frees_it(holder, client, readers, engine):
    identity = fresh()
    holder.store(identity, payload(2))
    (landed,) = engine.want(identity)
    engine.client.node.dispatched(landed.lease)
    engine.client.node.release(landed.lease, 0)
    engine.client.sync()
    assert client.inspect().gauges["device_entries"] == 1
    assert readers[1].ask(engine.client.node.incarnation, landed.read) == payload(2)
    engine.client.node.release(landed.lease, 1)
    engine.all_free(readers)


def test_who_wants_what_is_there_shares_it(holder, readers, engine):
    identity = fresh()
    holder.store(identity, payload(3))
    (one,) = engine.want(identity)
    (other,) = engine.want(identity)
    assert (one.read, other.source) == (other.read, "local")
    engine.client.node.release(one.lease)
    engine.client.sync()
    assert readers[0].ask(engine.client.node.incarnation, other.read) == payload(3)
    engine.release(other)
    engine.all_free(readers)


def test_two_that_wait_for_the_same_one_get_it_by_one_read(holder, readers, engine):
    before = engine.reads("landed")
    identity = fresh()
    wants = [engine.ask(identity) for _ in range(2)]
    holder.store(identity, payload(4))
    answers = [engine.answer(want, 0) for want in wants]
    assert answers[0].read == answers[1].read != 0
    assert engine.reads("landed") == before + 1
    engine.release(*answers)
    engine.all_free(readers)


def test_what_the_devices_have_no_room_for_lands_in_the_arena(holder, readers, engine):
    identities = [fresh() for _ in range(6)]
    for number, identity in enumerate(identities):
        holder.store(identity, payload(number))
    answers = engine.want(*identities)
    on_devices = [answer for answer in answers if answer.read]
    in_arena = [answer for answer in answers if not answer.read]
    assert 1 <= len(on_devices) <= 3, "a MiB has room for three, beside its table"
    assert len(in_arena) == 6 - len(on_devices)
    for answer in on_devices:
        number = answers.index(answer)
        assert readers[0].ask(engine.client.node.incarnation, answer.read) == payload(number)
    for answer in in_arena:
        assert engine.client.bytes_of(answer) == payload(answers.index(answer))
    assert engine.reads("no_memory") >= 1
    engine.release(*answers)
    engine.all_free(readers)


def test_what_this_host_has_is_promised_from_its_arena(client, engine):
    identity = fresh()
    client.store(identity, payload(5))
    (landed,) = engine.want(identity)
    assert (landed.source, landed.read) == ("local", 0)
    engine.release(landed)


def test_with_a_reader_without_a_lander_nothing_lands_on_devices(holder, engine):
    identity = fresh()
    holder.store(identity, payload(6))
    (landed,) = engine.want(identity, readers=3)
    assert (landed.source, landed.read) == ("remote", 0)
    engine.release(landed)


def test_an_entry_of_no_rows(holder, readers, engine):
    identity = fresh()
    holder.store(identity, b"")
    (landed,) = engine.want(identity)
    assert landed.read
    assert readers[1].ask(engine.client.node.incarnation, landed.read) == b""
    engine.release(landed)


def test_a_forgotten_want_leaves_nothing_behind(holder, readers, engine):
    identity = fresh()
    holder.store(identity, payload(7))
    engine.client.node.forget(engine.ask(identity))
    engine.all_free(readers)


def test_a_lander_that_dies_fails_nothing(holder, client, readers, engine):
    """Last: the readers of this fleet are no more."""
    identities = [fresh() for _ in range(3)]
    for number, identity in enumerate(identities):
        holder.store(identity, payload(number))
    (landed,) = engine.want(identities[0])
    assert landed.read
    stop_process(readers[1].process.pid)
    want = engine.ask(identities[1])
    until(lambda: client.inspect().gauges["device_entries"] == 2, "the READ to be ordered")
    readers[1].process.kill()
    answer = engine.answer(want, 0)
    assert (answer.read, engine.client.bytes_of(answer)) == (0, payload(1))
    assert engine.reads("gone") == 1
    assert readers[0].ask(engine.client.node.incarnation, landed.read) == payload(0)
    engine.release(landed, answer)
    until(lambda: readers[0].free() == readers[0].all_free)
    (later,) = engine.want(identities[2])
    assert (later.source, later.read) == ("remote", 0)
    engine.release(later)


def test_what_a_node_promised_can_be_loaded_when_it_is_gone(fleet, reader_of):
    (_, holder), (b, _) = fleet.connected("a", "b")
    reader = reader_of(b)
    engine = Engine(fleet, b)
    engine.landers(1)
    identity = fresh()
    holder.store(identity, payload(8))
    (landed,) = engine.want(identity)
    incarnation = engine.client.node.incarnation
    b.kill()
    again = fleet.node("b")
    engine = Engine(fleet, again)
    engine.landers(1)
    until(lambda: engine.client.inspect().gauges["peers_ready"] == 1, "the holder")
    assert engine.client.node.incarnation != incarnation
    assert reader.ask(incarnation, landed.read) == payload(8)
    (new,) = engine.want(identity)
    assert reader.ask(engine.client.node.incarnation, new.read) == payload(8)
    engine.release(new)
