"""What a Valkey or Redis server keeps, and how it changes: who comes late or twice changes nothing, what is damaged is
left out, and nothing stays or grows for ever."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgpack
import pytest

from ec_p2p.control import valkey_scripts, valkey_server
from ec_p2p.control.codec import encode
from ec_p2p.control.messages import Announce, Changed, InstanceInfo, NodeDown, NodeUp
from ec_p2p.control.valkey_server import BadEndpoint, Connection, Position, Refuses, Unreachable, parse
from tests.control.harness import Loop, advert, node
from tests.control.valkey_process import ValkeyProcess, needs_server

pytestmark = needs_server

ONE, TWO = advert(1).identity, advert(2).identity
FIRST, SECOND = node(1).incarnation, node(2).incarnation
OLD, NEW = b"session1", b"session2"


@pytest.fixture
def connection(server: ValkeyProcess) -> Iterator[Connection]:
    with parse(server.endpoint).connect(5.0, 60.0) as connection:
        yield connection


def announce(seq: int, *stored: int, withdrawn: tuple[int, ...] = (), instances: list[InstanceInfo] | None = None):
    adverts = [advert(number, generation=seq) for number in stored]
    return Announce(FIRST, seq, adverts, [advert(number).identity for number in withdrawn], instances)


def held(connection: Connection) -> dict[bytes, int]:
    """Generation of each entry of the first node."""
    page = connection.page(FIRST, 0)
    assert (page.cursor, page.bad) == (0, 0)
    return {entry.identity: entry.generation for entry in page.adverts}


def events(connection: Connection, after: Position) -> list[object]:
    return [entry.event for entry in connection.changes(after, 0.001)]


# ---------------------------------------------------------------- what is said


def test_a_node_and_its_entries_are_there_until_it_says_goodbye(connection: Connection) -> None:
    start = connection.look()
    assert (len(start.epoch), start.seq, start.nbytes) == (16, 0, 0)
    engine = InstanceInfo("engine-0", "producer", "ab" * 32)
    assert connection.hello(node(1), OLD) == start.epoch
    assert connection.announce(announce(1, 1, 2, instances=[engine]), OLD)
    assert connection.announce(announce(2, 3, withdrawn=(1,)), OLD)
    assert connection.heartbeat(FIRST, OLD, 2) == start.epoch
    assert connection.nodes() == [FIRST]
    assert connection.describe(FIRST) == (node(1), [engine])
    assert held(connection) == {TWO: 1, advert(3).identity: 2}
    connection.goodbye(FIRST)
    connection.goodbye(FIRST)
    assert (connection.nodes(), connection.describe(FIRST), held(connection)) == ([], None, {})
    assert events(connection, start) == [
        NodeUp(node(1)),
        Changed(FIRST, [advert(1), advert(2)], [], [engine]),
        Changed(FIRST, [advert(3, 2)], [ONE]),
        NodeDown(FIRST),
    ]
    log = connection.changes(start, 0.001)
    assert [entry.at.seq for entry in log] == [1, 2, 3, 4]
    assert connection.look() == log[-1].at


def test_a_batch_of_the_largest_size_goes_through_whole(connection: Connection) -> None:
    connection.look()
    connection.hello(node(1), OLD)
    everything = range(4096)
    assert connection.announce(announce(1, *everything), OLD)
    found, cursor = set(), 0
    while True:
        page = connection.page(FIRST, cursor)
        found |= {entry.identity for entry in page.adverts}
        cursor = page.cursor
        if not cursor:
            break
    assert found == {advert(number).identity for number in everything}
    assert connection.announce(announce(2, withdrawn=tuple(everything)), OLD)
    assert held(connection) == {}


def test_what_comes_twice_is_done_once(connection: Connection) -> None:
    start = connection.look()
    connection.hello(node(1), OLD)
    for _ in range(2):
        assert connection.announce(announce(1, 1), OLD)
    assert connection.announce(announce(2, withdrawn=(1,)), OLD)
    assert connection.announce(announce(1, 1), OLD), "of a connection that was thought dead"
    assert held(connection) == {}
    assert len(events(connection, start)) == 3


def test_what_was_said_before_the_last_hello_changes_nothing(connection: Connection) -> None:
    """Also where its number would fit: it was sent over a connection that the network held up."""
    connection.look()
    connection.hello(node(1), OLD)
    assert connection.announce(announce(1, 1), OLD)
    connection.hello(node(1), NEW)
    assert held(connection) == {}
    assert not connection.announce(announce(1, 1), OLD)
    assert not connection.announce(announce(2, 1), OLD)
    assert connection.heartbeat(FIRST, OLD, 0) is None
    assert held(connection) == {}
    assert connection.announce(announce(1, 2), NEW)
    assert held(connection) == {TWO: 1}


def test_a_gap_in_the_numbers_is_answered_with_no(connection: Connection) -> None:
    start = connection.look()
    connection.hello(node(1), OLD)
    assert not connection.announce(announce(2, 1), OLD)
    assert connection.heartbeat(FIRST, OLD, 1) is None
    assert connection.heartbeat(FIRST, OLD, 0) == start.epoch
    assert connection.heartbeat(FIRST, OLD, None) == start.epoch
    assert held(connection) == {}


def test_who_is_not_known_is_told_so(connection: Connection) -> None:
    assert connection.hello(node(1), OLD) is None, "there is no epoch yet"
    connection.look()
    assert not connection.announce(announce(1, 1), OLD)
    assert connection.heartbeat(FIRST, OLD, None) is None
    assert connection.nodes() == []


def test_another_node_at_the_same_place_ends_the_former_one(connection: Connection) -> None:
    start = connection.look()
    reborn = node(1, life=1)
    connection.hello(node(1), OLD)
    connection.hello(reborn, OLD)
    assert connection.nodes() == [reborn.incarnation]
    assert not connection.announce(announce(1, 1), OLD)
    assert events(connection, start) == [NodeUp(node(1)), NodeDown(FIRST), NodeUp(reborn)]


# ---------------------------------------------------------------- leases, epochs


def test_a_lease_that_is_over_is_ended_by_whoever_looks(server: ValkeyProcess, connection: Connection) -> None:
    start = connection.look()
    connection.hello(node(1), OLD)
    connection.hello(node(2), OLD)
    with server.client() as client:
        assert client.zscore(server.key("leases"), FIRST) > 60_000
        client.zadd(server.key("leases"), {FIRST: 1})
        checked = int(client.hget(server.key("about"), "checked"))
        client.hset(server.key("about"), "checked", checked - 10_000)
    assert connection.heartbeat(SECOND, OLD, 0) == start.epoch
    assert connection.nodes() == [SECOND]
    assert events(connection, start) == [NodeUp(node(1)), NodeUp(node(2)), NodeDown(FIRST)]
    assert connection.heartbeat(FIRST, OLD, 0) is None


def test_a_lost_lease_is_not_renewed(server: ValkeyProcess, connection: Connection) -> None:
    """Nobody who took a snapshot meanwhile knows the node, and only a hello tells them."""
    connection.look()
    connection.hello(node(1), OLD)
    connection.hello(node(2), OLD)
    with server.client() as client:
        client.zrem(server.key("leases"), FIRST)
    assert connection.heartbeat(FIRST, OLD, 0) is None
    assert connection.heartbeat(FIRST, OLD, None) is None
    assert connection.nodes() == [SECOND]


@pytest.mark.parametrize("step_ms", [-40_000, 40_000])
def test_after_a_pause_or_a_step_of_the_clock_nobody_is_taken_for_dead(
    server: ValkeyProcess, connection: Connection, step_ms: int
) -> None:
    connection.look()
    connection.hello(node(1), OLD)
    with server.client() as client:
        client.zadd(server.key("leases"), {FIRST: 1})
        checked = int(client.hget(server.key("about"), "checked"))
        client.hset(server.key("about"), "checked", checked + step_ms)
    connection.look()
    assert connection.nodes() == [FIRST]


def test_another_life_of_the_server_is_another_epoch(server: ValkeyProcess, connection: Connection) -> None:
    start = connection.look()
    connection.hello(node(1), OLD)
    connection.announce(announce(1, 1), OLD)
    with server.client() as client:
        client.hset(server.key("about"), "run", "of another life")
    assert connection.look().epoch == start.epoch, "this connection has seen only one life"
    with parse(server.endpoint).connect(5.0, 60.0) as later:
        epoch = later.look().epoch
    assert epoch != start.epoch
    assert connection.look().epoch == epoch
    assert (connection.nodes(), held(connection)) == ([], {})
    assert not connection.announce(announce(2, 2), OLD)
    assert events(connection, Position(start.epoch, 0, 0)) == []


def test_a_connection_ends_with_the_life_of_the_server(server: ValkeyProcess, connection: Connection) -> None:
    connection.look()
    server.kill()
    server.start()
    with pytest.raises(Unreachable):
        connection.look()


def test_every_key_goes_by_itself_once_nobody_is_there(server: ValkeyProcess, connection: Connection) -> None:
    connection.look()
    connection.hello(node(1), OLD)
    connection.announce(announce(1, 1), OLD)
    with server.client() as client:
        client.hset(server.key("about"), "checked", 1)
        connection.look()
        keys = client.keys("*")
        assert {key.decode() for key in keys if b":n:" not in key} == {
            server.key(name) for name in ("about", "leases", "places", "events")
        }
        assert len(keys) == 5
        assert all(0 < client.pttl(key) <= 600_000 for key in keys)


def test_the_log_is_cut_by_its_length(
    server: ValkeyProcess, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HELLO", "ANNOUNCE"):
        script = getattr(valkey_scripts, name)
        assert str(valkey_scripts.LOG_BYTES) in script
        monkeypatch.setattr(valkey_scripts, name, script.replace(str(valkey_scripts.LOG_BYTES), "100000"))
    with parse(server.endpoint).connect(5.0, 60.0) as small:
        start = small.look()
        small.hello(node(1), OLD)
        for seq in range(1, 101):
            assert small.announce(announce(seq, *range(40)), OLD)
        end = small.look()
        entries = small.changes(start, 0.001)
    assert end.nbytes > 240_000
    assert sum(entry.nbytes for entry in entries) < 150_000
    assert entries[-1].at == end
    assert entries[0].at.seq > 1, "who stood at the start sees the gap"


def test_nodes_of_another_version_are_kept_apart(server: ValkeyProcess, connection: Connection) -> None:
    start = connection.look()
    connection.hello(node(1), OLD)
    with server.client() as client:
        client.hset(server.key("about"), "version", 99)
        with pytest.raises(Refuses, match=r"speak version b'99', accepted: 1"):
            connection.look()
        client.delete(server.key("leases"))
    assert connection.look().epoch != start.epoch, "nobody is left there"


# ---------------------------------------------------------------- what strangers see, and do


def test_anyone_can_read_it_with_a_client_and_msgpack(server: ValkeyProcess, connection: Connection) -> None:
    start = connection.look()
    connection.hello(node(1), OLD)
    connection.announce(announce(1, 1), OLD)
    said = [ONE, 1, 4096, 16, 128, "bfloat16", 4096, 64, 1]
    with server.client() as client:
        key = f"{server.key('n')}:".encode() + FIRST
        assert msgpack.unpackb(client.hget(key, ONE)) == said
        assert msgpack.unpackb(client.hget(key, "info")) == [FIRST, "host-1", "tcp://10.0.0.1:5000", 0, b""]
        log = client.xrange(server.key("events"))
    assert [fields[b"epoch"] for _, fields in log] == [start.epoch, start.epoch]
    assert [msgpack.unpackb(fields[b"event"])[0] for _, fields in log] == ["up", "changed"]
    assert msgpack.unpackb(log[1][1][b"event"]) == ["changed", FIRST, [said], [], None]


def test_the_scripts_write_an_end_as_the_codec_does(connection: Connection) -> None:
    prefix = encode(NodeDown(bytes(16)))[:-16]
    text = valkey_scripts.DOWN
    assert text == r"\146\164down\196\16"
    assert prefix == struct.pack("BB4sBB", 146, 164, b"down", 196, 16)


def test_damaged_adverts_are_left_out_and_counted(server: ValkeyProcess, connection: Connection, loop: Loop) -> None:
    connection.look()
    connection.hello(node(1), OLD)
    connection.announce(announce(1, 1, 2, 3), OLD)
    with server.client() as client:
        key = f"{server.key('n')}:".encode() + FIRST
        client.hset(key, TWO, b"not MessagePack \xc1")
        client.hset(key, b"x" * 32, b"\x01")
    page = connection.page(FIRST, 0)
    assert {entry.identity for entry in page.adverts} == {ONE, advert(3).identity}
    assert page.bad == 2
    replica = loop.replica(server.endpoint)
    loop.until(lambda: replica.fresh and len(replica) == 2)
    assert replica.counters["bad_frames"] == 2


def test_a_damaged_node_is_left_out(server: ValkeyProcess, connection: Connection, loop: Loop) -> None:
    connection.look()
    connection.hello(node(1), OLD)
    connection.hello(node(2), OLD)
    with server.client() as client:
        client.hset(f"{server.key('n')}:".encode() + FIRST, "info", b"\xc1")
    replica = loop.replica(server.endpoint)
    loop.until(lambda: replica.fresh and replica.nodes() == [node(2)])


def test_a_damaged_event_costs_a_snapshot(server: ValkeyProcess, connection: Connection, loop: Loop) -> None:
    connection.look()
    connection.hello(node(1), OLD)
    replica = loop.replica(server.endpoint, node_timeout_s=60.0)
    loop.until(lambda: replica.fresh and replica.nodes() == [node(1)])
    with server.client() as client:
        seq = client.hincrby(server.key("about"), "seq", 1)
        nbytes = client.hincrby(server.key("about"), "bytes", 1)
        client.xadd(server.key("events"), {"nothing": "of ours"}, id=f"{nbytes}-{seq}")
    assert connection.announce(announce(1, 1), OLD)
    loop.until(lambda: replica.counters["snapshots"] == 2 and replica.lookup(ONE))
    assert replica.counters["bad_frames"] == 1


def test_fleets_with_other_prefixes_do_not_see_each_other(loop: Loop, server: ValkeyProcess) -> None:
    other = server.endpoint.replace("fleet-1", "fleet-2")
    replicas = [loop.replica(server.endpoint), loop.replica(other)]
    loop.announcer(server.endpoint, node(1)).store(advert(1))
    loop.announcer(other, node(2)).store(advert(1))
    loop.until(lambda: all(replica.fresh and replica.lookup(ONE) for replica in replicas))
    assert [replica.nodes() for replica in replicas] == [[node(1)], [node(2)]]


# ---------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("valkey://h:1", ("h", 1, "ec-p2p", False, None, None)),
        ("redis://h:1/", ("h", 1, "ec-p2p", False, None, None)),
        ("rediss://h:1/a.b-c", ("h", 1, "a.b-c", True, None, None)),
        ("valkeys://me:p%40ss%2C@[::1]:6379/7", ("::1", 6379, "7", True, "me", "p@ss,")),
        ("valkey://:secret@10.0.0.1:6379/x", ("10.0.0.1", 6379, "x", False, None, "secret")),
    ],
)
def test_what_an_endpoint_means(endpoint: str, expected: tuple[object, ...]) -> None:
    server = parse(endpoint)
    options = server.options
    assert (
        server.host,
        server.port,
        server.prefix,
        options["ssl"],
        options.get("username"),
        options.get("password"),
    ) == expected
    assert "secret" not in repr(server)


@pytest.mark.parametrize(
    "endpoint",
    [
        "valkey://h",
        "valkey://h:0",
        "valkey://h:1/a/b",
        "valkey://h:1/a:b",
        "valkey://h:1/{a}",
        "valkey://h:1/a?db=2",
        "http://h:1",
        "valkey://h:1/a?ssl_ca_certs=/ca.pem",
        "valkey://u:pass@word@h:1",
        "valkeys://h:1/a?password_file=here",
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_without_its_password(endpoint: str) -> None:
    with pytest.raises(BadEndpoint, match=r"directory=.*; accepted: text like 'tcp://host:14579', or") as caught:
        parse(endpoint)
    assert "pass@word" not in str(caught.value)


def test_without_the_client_library_the_extra_is_named(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'redis'")

    monkeypatch.setattr(valkey_server, "_library", missing)
    for make in (lambda: loop.replica("valkey://h:1"), lambda: loop.announcer("valkey://h:1", node(1))):
        with pytest.raises(BadEndpoint, match=r"needs the Python package 'redis' .* extra 'valkey' of ec-p2p"):
            make()
