"""The main job of a node: what one host stores, another fetches, whole."""

from __future__ import annotations

import os

import pytest

from ec_p2p.node.messages import CloseWindow, Commit, Landed, Missing, Pending, SaveSkipped, WantItem

from .conftest import PATIENCE_S, until

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def item(identity):
    return WantItem(identity, 0)


@pytest.mark.parametrize("nbytes", [128, 80 << 10, 4 << 20])
def test_an_entry_of_one_host_lands_whole_on_another(fleet, nbytes):
    (_, holder), (_, reader) = fleet.connected("a", "b")
    payload = os.urandom(nbytes)
    holder.store(A, payload)
    [answer] = reader.want(A, rows=nbytes // 128, expect_s=PATIENCE_S)
    assert isinstance(answer, Landed)
    assert (answer.source, answer.rows, answer.dim, answer.dtype) == ("remote", nbytes // 128, 64, "bfloat16")
    assert answer.seconds > 0
    assert reader.bytes_of(answer) == payload
    assert reader.inspect().counters["fetches{outcome=landed}"] == 1
    assert reader.inspect().counters["fetched_bytes"] == nbytes


def test_the_second_want_of_a_host_needs_no_network(fleet):
    (_, holder), (node, reader) = fleet.connected("a", "b")
    holder.store(A, os.urandom(1 << 20))
    reader.want(A, expect_s=PATIENCE_S)
    other = fleet.client(node, instance="other")
    [answer] = other.want(A)
    assert (answer.source, answer.seconds) == ("local", 0.0)
    assert sum(v for k, v in reader.inspect().counters.items() if k.startswith("fetches{")) == 1


def test_wants_for_one_entry_share_one_fetch(fleet):
    (_, holder), (node, reader) = fleet.connected("a", "b")
    others = [fleet.client(node, instance=str(n)) for n in range(4)]
    holder.store(A, os.urandom(8 << 20))
    reader.has_landed(A)
    reader_entries = reader.inspect().gauges["entries"]
    holder.store(B, os.urandom(8 << 20))
    wants = [client.node.want([item(B)], readers=0, wait_s=PATIENCE_S, expect_s=PATIENCE_S) for client in others]
    answers = [c.expect(Landed, lambda m, w=w: m.want == w) for c, w in zip(others, wants, strict=True)]
    assert len({answer.offset for answer in answers}) == 1
    assert reader.inspect().gauges["entries"] == reader_entries + 1
    assert reader.inspect().counters["fetches{outcome=landed}"] == 2  # A once, B once


def test_nobody_has_it(zmq_fleet):
    (_, client), _ = zmq_fleet.connected("a", "b")
    [answer] = client.want(A)
    assert isinstance(answer, Missing)
    assert answer.reason == "no_source"


def test_an_expected_entry_is_waited_for(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b")
    want = reader.node.want([item(A)], readers=0, wait_s=PATIENCE_S, expect_s=PATIENCE_S)
    assert reader.expect(Pending).why == "expected"
    holder.store(A, b"x" * 128)
    assert reader.expect(Landed).want == want


def test_an_expected_entry_that_never_comes_is_missing(zmq_fleet):
    (_, client), _ = zmq_fleet.connected("a", "b")
    [answer] = client.want(A, expect_s=0.05)
    assert answer.reason == "no_source"


def test_an_entry_being_encoded_elsewhere_is_waited_for(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b")
    holder.node.encoding([A])
    holder.sync()

    def pending():
        want = reader.node.want([item(A)], readers=0, wait_s=PATIENCE_S, expect_s=0)
        answer = reader.expect((Pending, Missing), lambda m: m.want == want)
        return answer if isinstance(answer, Pending) else None

    answer = until(pending, "the pending advert")
    assert answer.why == "encoding"
    holder.store(A, b"x" * 128)
    assert reader.expect(Landed, lambda m: m.want == answer.want).nbytes == 128


def test_an_encode_that_never_happens_is_not_waited_for_beyond_the_deadline(zmq_fleet):
    ((node, client),) = zmq_fleet.connected("a")
    other = zmq_fleet.client(node, instance="other")
    client.node.encoding([A])
    client.sync()
    [answer] = other.want(A, wait_s=0.3)
    assert answer.reason == "deadline"
    [answer] = client.want(A, wait_s=0.3)  # nobody waits for itself
    assert answer.reason == "no_source"


def waits_for_an_encode(zmq_fleet):
    """A worker and its scheduler, which has announced A; somebody of another instance who waits for that, its want."""
    ((node, _),) = zmq_fleet.connected("a")
    scheduler = zmq_fleet.client(node, kind="scheduler", instance="x")
    worker = zmq_fleet.client(node, kind="worker", instance="x", rank=0)
    scheduler.node.encoding([A])
    scheduler.sync()
    other = zmq_fleet.client(node, instance="y")
    want = other.node.want([item(A)], readers=0, wait_s=PATIENCE_S, expect_s=0)
    assert other.expect(Pending).why == "encoding"
    return worker, scheduler, other, want


def leaves(fleet, scheduler):
    scheduler.close()
    fleet.clients.remove(scheduler)


def saves_nothing(fleet, scheduler):
    scheduler.node.send(SaveSkipped("error", A))


@pytest.mark.parametrize("gives_up", [leaves, saves_nothing])
def test_an_encode_of_several_instances_is_waited_for_until_the_last_gives_up(zmq_fleet, gives_up):
    _, first, other, want = waits_for_an_encode(zmq_fleet)
    second = zmq_fleet.client(zmq_fleet.nodes[0], "scheduler", "second")
    second.node.encoding([A])
    waits_for_the_first = second.node.want([item(A)], readers=0, wait_s=PATIENCE_S, expect_s=0)
    assert second.expect(Pending).why == "encoding"
    gives_up(zmq_fleet, first)
    assert second.expect(Missing).want == waits_for_the_first  # nobody waits for itself
    other.sync()
    assert not [message for message in other.heard if isinstance(message, Missing)]
    gives_up(zmq_fleet, second)
    answer = other.expect(Missing)
    assert (answer.want, answer.reason) == (want, "no_source")


def test_what_one_of_several_instances_gives_up_the_other_still_brings(zmq_fleet):
    worker, _, other, want = waits_for_an_encode(zmq_fleet)
    second = zmq_fleet.client(zmq_fleet.nodes[0], "scheduler", "second")
    second.node.encoding([A])
    second.sync()
    leaves(zmq_fleet, second)
    until(lambda: other.inspect().gauges["sessions"] == len(zmq_fleet.clients), "the second to be gone")
    worker.store(A, b"x" * 128)
    assert other.expect((Landed, Missing), lambda m: m.want == want).nbytes == 128


def test_an_old_scheduler_of_an_instance_gives_up_nothing_of_the_new_ones(zmq_fleet):
    worker, _, other, want = waits_for_an_encode(zmq_fleet)
    old = zmq_fleet.client(zmq_fleet.nodes[0], "scheduler", "x")
    leaves(zmq_fleet, old)
    until(lambda: other.inspect().gauges["sessions"] == len(zmq_fleet.clients), "the old one to be gone")
    worker.store(A, b"x" * 128)
    assert other.expect((Landed, Missing), lambda m: m.want == want).nbytes == 128


def test_an_encode_that_is_given_up_is_withdrawn_although_the_entry_was_fetched_meanwhile(zmq_fleet):
    (holder, of_it), (node, fetching), (_, reader) = zmq_fleet.connected(
        "a", "b", "c", share_fetched=False, a={"embedded_directory": False}
    )
    scheduler = zmq_fleet.client(node, "scheduler", "x")
    scheduler.node.encoding([A])
    scheduler.sync()
    of_it.store(A, b"x" * 128)
    fetching.has_landed(A)
    holder.process.terminate()
    until(lambda: reader.inspect().gauges["peers_ready"] == 1, "the holder to be gone")
    want = reader.node.want([item(A)], readers=0, wait_s=PATIENCE_S, expect_s=0)
    assert reader.expect(Pending, lambda m: m.want == want).why == "encoding"
    leaves(zmq_fleet, scheduler)
    assert reader.expect(Missing, lambda m: m.want == want).reason == "no_source"


def test_an_encode_whose_commit_is_refused_is_not_waited_for(zmq_fleet):
    worker, scheduler, other, want = waits_for_an_encode(zmq_fleet)
    window = worker.window(4096)
    worker.node.send(Commit(window.window, A, window.offset, 4096, 7, 64, "bfloat16"))
    assert scheduler.expect(SaveSkipped) == SaveSkipped("error", A)
    answer = other.expect(Missing)
    assert (answer.want, answer.reason) == (want, "no_source")


def test_a_reason_of_a_workers_own_is_counted_as_an_error(zmq_fleet):
    node = zmq_fleet.node("a")
    worker = zmq_fleet.client(node, "worker", "engine/dp0", 0)
    scheduler = zmq_fleet.client(node, "scheduler", "engine/dp0")
    for reason in ("layout", "whatever", ""):
        worker.node.send(SaveSkipped(reason, A))
    worker.sync()
    assert [scheduler.expect(SaveSkipped).reason for _ in range(3)] == ["layout", "error", "error"]
    counted = {name: value for name, value in worker.inspect().counters.items() if name.startswith("saves_skipped")}
    assert counted == {"saves_skipped{reason=layout}": 1, "saves_skipped{reason=error}": 2}


def test_only_who_encodes_can_say_that_nothing_comes_of_it(zmq_fleet):
    worker, _, other, want = waits_for_an_encode(zmq_fleet)
    other.node.send(SaveSkipped("error", A))
    other.sync()
    worker.store(A, b"x" * 128)
    assert other.expect((Landed, Missing), lambda m: m.want == want).nbytes == 128


def test_rows_that_do_not_match_are_not_a_hit(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b")
    holder.store(A, b"x" * 1280)
    [answer] = holder.want(A, rows=11)
    assert answer.reason == "rows"
    reader.has_landed(A)
    reader_b = reader.want(A, rows=11)[0]
    assert reader_b.reason == "rows"
    assert isinstance(reader.want(A, rows=10)[0], Landed)


def test_rows_that_do_not_match_are_not_even_fetched(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b")
    holder.store(A, b"x" * 1280)

    def refused():
        return reader.want(A, rows=11)[0].reason == "rows"

    until(refused, "the advert")
    assert reader.inspect().gauges["entries"] == 0


def test_items_that_cannot_be_together_are_refused_at_once(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b", a={"max_local_cpu_size": "64MiB"})
    names = [bytes([n]) * 32 for n in range(40, 43)]
    for name in names:
        holder.store(name, bytes(9 << 20))
    reader.has_landed(names[2])
    answers = reader.want(*names, expect_s=PATIENCE_S)
    # Two slabs of 16 MiB take one entry of 9 MiB each.
    assert [type(a).__name__ for a in answers] == ["Landed", "Landed", "Missing"]
    assert answers[2].reason == "too_large"


def test_a_local_want_never_fetches(zmq_fleet):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b")
    holder.store(A, b"x" * 128)
    reader.has_landed(A)
    holder.store(B, b"x" * 128)
    until(lambda: isinstance(reader.want(C, wait_s=0.1)[0], Missing))
    assert reader.want(B, local_only=True)[0].reason == "no_source"
    assert reader.want(A, local_only=True)[0].source == "local"


def test_two_hundred_fetches_through_a_pool_of_a_few(fleet):
    (_, holder), (_, reader) = fleet.connected("a", "b", max_local_cpu_size="8MiB", slab_size="8MiB")
    names = [n.to_bytes(32, "big") for n in range(1, 21)]
    window = holder.window(5 << 20)
    size = 256 << 10
    arena = holder.node.arena(holder.node.incarnation)
    for n, name in enumerate(names):
        offset = window.offset + n * size
        arena.buffer[offset : offset + size] = name * (size // 32)
        holder.node.send(Commit(window.window, name, offset, size, size // 128, 64, "bfloat16"))
    holder.node.send(CloseWindow(window.window))
    holder.sync()
    reader.has_landed(names[-1])
    leases = set()
    wants = {}
    for n in range(200):
        name = names[n % 20]
        wants[reader.node.want([item(name)], readers=0, wait_s=PATIENCE_S, expect_s=PATIENCE_S)] = name
    for _ in range(200):
        answer = reader.expect(Landed, lambda m: m.want in wants)
        name = wants.pop(answer.want)
        assert reader.bytes_of(answer) == name * (size // 32)
        leases.add(answer.lease)
        reader.release(answer)
    assert len(leases) == 200
    reader.sync()
    gauges = reader.inspect().gauges
    assert gauges["leases"] == 0
    assert gauges["arena_bytes{kind=pinned}"] == 0
    assert gauges["arena_bytes{kind=reserved}"] == 0
