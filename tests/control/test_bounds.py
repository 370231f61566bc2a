"""Every queue of a directory has an end, what does not fit is counted, and who missed something gets it anew."""

from __future__ import annotations

import functools
import multiprocessing
import socket
import struct
import time
from contextlib import suppress

import pytest
import zmq

from ec_p2p.control import directory as directory_module
from ec_p2p.control import replica as replica_module
from ec_p2p.control import snapshots as snapshots_module
from ec_p2p.control.announcer import Announcer
from ec_p2p.control.codec import MAX_FRAME, encode
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import PROTOCOL_VERSION, Announce, Hello, SnapshotRequest
from ec_p2p.control.replica import Replica
from ec_p2p.control.sockets import open_socket, split_endpoint
from tests.control.harness import Loop, advert, node

ENTRIES = 20_000


def in_step(directory: Directory, replica: Replica) -> bool:
    """The replica stands where the directory stands."""
    return replica.position == (directory.epoch, directory.stats()["seq"]) and replica.fresh


def flood(loop: Loop, announcer: Announcer, generation: int) -> None:
    """Say everything once more."""
    for number in range(ENTRIES):
        announcer.store(advert(number, generation))
    loop.until(lambda: not announcer.pending)


def test_a_subscriber_that_does_not_read_misses_what_does_not_fit_and_holds_nobody_up(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_PUB_HWM", 32)
    directory = loop.directory()
    replica = loop.replica(directory.endpoint)
    announcer = loop.announcer(directory.endpoint, node(1))
    host, _ = split_endpoint(directory.endpoint)
    with open_socket(loop.context, zmq.SUB, host, receive_hwm=1) as idle:
        idle.setsockopt(zmq.RCVBUF, 1 << 12)
        idle.subscribe(b"ec")
        idle.connect(f"{host}:{directory.pub_port}")
        assert idle.poll(10_000), "heard a heartbeat"
        rounds = 0
        while not directory.stats()["slow_subscribers"]:
            rounds += 1
            # Each is 20 publications of 75 KB: the queue takes 32 of them, and the kernel a few MB.
            assert rounds < 30, "the queue of one subscriber has no end"
            flood(loop, announcer, generation=rounds)
        latest = [(node(1), advert(1, generation=rounds))]
        loop.until(lambda: in_step(directory, replica) and replica.lookup(advert(1).identity) == latest)


def test_a_replica_that_did_not_read_is_brought_up_to_date(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_PUB_HWM", 2)
    monkeypatch.setattr(replica_module, "open_socket", functools.partial(open_socket, receive_hwm=2))
    directory = loop.directory(heartbeat_s=0.1)
    replica = loop.replica(directory.endpoint)
    announcer = loop.announcer(directory.endpoint, node(1))
    announcer.store(advert(1))
    loop.until(lambda: in_step(directory, replica) and replica.lookup(advert(1).identity))
    loop.driven.remove(replica)
    rounds = 0
    while not directory.stats()["slow_subscribers"]:
        rounds += 1
        assert rounds < 30, "the queue of one subscriber has no end"
        flood(loop, announcer, generation=rounds)
    announcer.withdraw(advert(1).identity)
    loop.until(lambda: directory.stats()["withdrawals"])
    loop.driven.append(replica)
    loop.until(lambda: in_step(directory, replica) and len(replica) == ENTRIES - 1)
    assert replica.counters["gaps"] + replica.counters["silences"] >= 1
    assert replica.lookup(advert(2).identity) == [(node(1), advert(2, generation=rounds))]


def test_what_a_flooding_peer_has_sent_waits_at_the_peer(loop: Loop) -> None:
    with (
        Directory("tcp://127.0.0.1:0") as directory,
        open_socket(loop.context, zmq.DEALER, directory.endpoint, send_hwm=1) as flooding,
    ):
        flooding.connect(directory.endpoint)
        assert flooding.poll(10_000, zmq.POLLOUT)
        sent = 0
        while flooding.poll(500, zmq.POLLOUT):  # The directory listens, but nobody has started it.
            flooding.send(b"\0" * MAX_FRAME)
            sent += 1
            assert sent < 64, "MiB of one peer that the directory has not read"
        announcer = loop.announcer(directory.endpoint, node(1))
        announcer.store(advert(1))
        directory.start()
        loop.until(lambda: directory.stats()["entries"] == 1)
        loop.until(lambda: directory.stats()["bad_frames"] == sent)


def test_a_snapshot_that_is_not_read_is_given_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "_STALLED_S", 0.2)
    directory = loop.directory()
    announcer = loop.announcer(directory.endpoint, node(1))
    # 15 MiB, which the kernel does not take for one connection.
    entries = 200_000
    for number in range(entries):
        announcer.store(advert(number))
    loop.until(lambda: directory.stats()["entries"] == entries)
    with open_socket(loop.context, zmq.DEALER, directory.endpoint, receive_hwm=1) as asking:
        asking.setsockopt(zmq.RCVBUF, 1 << 16)
        asking.connect(directory.endpoint)
        assert asking.poll(10_000, zmq.POLLOUT)
        asking.send(encode(SnapshotRequest(PROTOCOL_VERSION, 1)))
        loop.until(lambda: directory.stats()["snapshots_given_up"] == 1)
        assert directory.stats()["snapshot_bytes"] < 12 << 20
        replica = loop.replica(directory.endpoint)
        loop.until(lambda: len(replica) == entries and in_step(directory, replica))


def test_requests_for_snapshots_beyond_so_many_are_given_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "_WAITING", 3)
    with open_socket(loop.context, zmq.ROUTER, "tcp://127.0.0.1:0") as router:
        snapshots = snapshots_module.Snapshots(router, b"e" * 16)
        for token in range(2):
            for route in (b"a", b"b", b"c"):
                snapshots.ask(route, token)
        assert snapshots.counters["snapshots_given_up"] == 0
        snapshots.ask(b"d", 1)
        assert snapshots.counters["snapshots_given_up"] == 1


def test_replies_that_are_not_read_are_dropped_and_counted(loop: Loop) -> None:
    directory = loop.directory()
    unknown = encode(Announce(node(9).incarnation, 1, [], []))
    with open_socket(loop.context, zmq.DEALER, directory.endpoint, receive_hwm=1) as deaf:
        deaf.setsockopt(zmq.RCVBUF, 1 << 12)
        deaf.connect(directory.endpoint)
        assert deaf.poll(10_000, zmq.POLLOUT)
        deaf.send(encode(Hello(PROTOCOL_VERSION, node(1))))

        def unsent() -> int:
            for _ in range(2_000):
                deaf.send(unknown)  # Each is answered by a request to say hello.
            return directory.stats()["unsent"]

        loop.until(unsent)
    announcer = loop.announcer(directory.endpoint, node(2))
    loop.until(lambda: announcer.connected)


def connected_dealer(directory: Directory) -> socket.socket:
    """A connection that has said it is a DEALER, as ZMTP 3.0 has it. libzmq hangs up on some such greetings."""
    host, port = split_endpoint(directory.endpoint)
    while True:
        raw = socket.create_connection((host.removeprefix("tcp://"), int(port)), timeout=10.0)
        raw.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"NULL".ljust(52, b"\0"))
        if len(raw.recv(64, socket.MSG_WAITALL)) == 64:
            break
        raw.close()
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return raw


def be_flooded_and_left() -> None:
    """A peer fills the directory's queue and breaks the connection before the directory reads."""
    with Directory("tcp://127.0.0.1:0") as directory:
        with connected_dealer(directory) as flooding:
            flooding.settimeout(0.5)
            with suppress(TimeoutError):
                while True:
                    flooding.sendall(b"\0\xffhello".ljust(257) * 1000)
            flooding.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(2.0)  # A heartbeat of ZMQ's own, once a second, would end this process.
        directory.start()
        while not directory.stats()["bad_frames"]:
            time.sleep(0.01)


def test_a_peer_that_floods_and_leaves_does_not_end_the_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=be_flooded_and_left)
    process.start()
    process.join(60.0)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_a_directory_that_is_behind_with_reading_does_not_take_nodes_for_silent(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_BYTES_PER_TURN", 1)
    with Directory("tcp://127.0.0.1:0", node_timeout_s=4.0) as directory:
        router, _ = directory.sockets
        with open_socket(loop.context, zmq.DEALER, directory.endpoint) as peer:
            peer.connect(directory.endpoint)
            assert peer.poll(10_000, zmq.POLLOUT)

            def turn_that_may_leave_something_unread(now: float, frame: bytes = b"junk") -> int:
                peer.send(frame)
                assert router.poll(10_000)
                directory.turn({router}, now)
                return directory.stats()["nodes"]

            directory.turn((), 100.0)
            assert turn_that_may_leave_something_unread(100.0, encode(Hello(PROTOCOL_VERSION, node(1)))) == 1
            # In small steps, or it would think that it had slept.
            assert [turn_that_may_leave_something_unread(100.0 + second) for second in range(1, 17)] == [1] * 16
            assert turn_that_may_leave_something_unread(117.0) == 0, "that long nobody is believed in"
