"""Announcers, replicas and views with a real directory, of each kind: what is said arrives, and what is lost is said
again."""

from __future__ import annotations

from ec_p2p.control.interface import Replicates
from ec_p2p.control.messages import InstanceInfo, NodeInfo
from tests.control.harness import NEVER_S, Loop, Served, advert, await_closed, node, opened

ONE, TWO = advert(1).identity, advert(2).identity


def in_step(directory: Served, replica: Replicates) -> bool:
    """The replica stands where the directory stands."""
    return replica.position == directory.stands() and replica.fresh


def test_an_entry_is_found_until_it_is_withdrawn(loop: Loop, kind: str) -> None:
    changes: list[bytes] = []
    nodes: list[tuple[NodeInfo, bool]] = []
    directory = loop.serve(kind, node_timeout_s=NEVER_S)
    announcer = loop.announcer(directory.endpoint, node(1), timeout_s=NEVER_S)
    replica = loop.replica(
        directory.endpoint,
        on_change=changes.append,
        on_node=lambda node, up: nodes.append((node, up)),
        node_timeout_s=NEVER_S,
    )
    announcer.store(advert(1))
    announcer.store(advert(2))
    loop.until(lambda: replica.lookup(ONE) and replica.lookup(TWO))
    announcer.store(advert(2, generation=2))
    loop.until(lambda: replica.lookup(TWO) == [(node(1), advert(2, generation=2))])
    announcer.withdraw(ONE)
    announcer.withdraw(b"never stored".ljust(32))
    loop.until(lambda: not replica.lookup(ONE))
    loop.until(lambda: replica.fresh and announcer.connected and not announcer.pending)
    assert (len(replica), replica.nodes(), replica.identities()) == (1, [node(1)], [TWO])
    assert replica.held_by(node(1).incarnation) == [advert(2, generation=2)]
    announcer.goodbye()
    loop.until(lambda: not replica.nodes())
    assert replica.lookup(TWO) == []
    assert changes == [ONE, TWO, TWO, ONE, TWO]
    assert nodes == [(node(1), True), (node(1), False)]
    assert not announcer.connected


def test_a_silent_node_disappears(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind)
    announcers = [loop.announcer(directory.endpoint, node(number)) for number in (1, 2)]
    replica = loop.replica(directory.endpoint)
    for announcer in announcers:
        announcer.store(advert(1))
    loop.until(lambda: len(replica.lookup(ONE)) == 2)
    loop.forget(announcers[0])
    loop.until(lambda: replica.lookup(ONE) == [(node(2), advert(1))])


def test_nobody_needs_the_directory_at_start(loop: Loop, kind: str) -> None:
    probe = loop.serve(kind)
    probe.close()
    announcer = loop.announcer(probe.endpoint, node(1))
    replica = loop.replica(probe.endpoint)
    announcer.store(advert(1))
    for _ in range(20):
        loop.turn()
    assert not announcer.connected
    assert not replica.fresh
    assert announcer.pending == 1
    loop.serve(kind, probe.endpoint)
    loop.until(lambda: replica.lookup(ONE) and replica.fresh and announcer.connected)


def test_a_directory_that_comes_back_empty_is_told_again(loop: Loop, kind: str) -> None:
    first = loop.serve(kind)
    announcers = [loop.announcer(first.endpoint, node(number)) for number in (1, 2)]
    replica = loop.replica(first.endpoint, node_timeout_s=2.0)
    encoder = InstanceInfo("engine-0", "producer", "ab" * 32)
    for announcer in announcers:
        announcer.store(advert(1))
        announcer.describe([encoder])
    loop.until(lambda: in_step(first, replica) and len(replica.lookup(ONE)) == 2)
    first.close()
    announcers[0].withdraw(ONE)
    announcers[1].store(advert(2))
    second = loop.serve(kind, first.endpoint)

    def converged() -> bool:
        assert replica.lookup(ONE), "the other node holds it all the time"
        return replica.lookup(ONE) == [(node(2), advert(1))] and bool(replica.lookup(TWO))

    loop.until(converged)
    loop.until(lambda: in_step(second, replica))
    assert second.entries() == len(replica) == 2
    assert [replica.instances(node(number).incarnation) for number in (1, 2)] == [[encoder], [encoder]]


def test_a_restarted_node_replaces_its_former_life_at_once(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind, node_timeout_s=NEVER_S)
    former = loop.announcer(directory.endpoint, node(1), timeout_s=NEVER_S)
    replica = loop.replica(directory.endpoint)
    former.store(advert(1))
    loop.until(lambda: replica.lookup(ONE))
    loop.forget(former)
    reborn = loop.announcer(directory.endpoint, node(1, life=1), timeout_s=NEVER_S)
    reborn.store(advert(2))
    loop.until(lambda: replica.lookup(TWO))
    assert replica.nodes() == [node(1, life=1)]
    assert replica.lookup(ONE) == []


def test_a_node_that_moves_leaves_nothing_at_its_old_address(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind, node_timeout_s=NEVER_S)
    replica = loop.replica(directory.endpoint)
    before = loop.announcer(directory.endpoint, node(1), timeout_s=NEVER_S)
    before.store(advert(1))
    loop.until(lambda: replica.lookup(ONE))
    loop.forget(before)
    moved = NodeInfo(node(1).incarnation, "host-1", "tcp://10.0.0.77:1")
    after = loop.announcer(directory.endpoint, moved, timeout_s=NEVER_S)
    after.store(advert(1))
    loop.until(lambda: replica.lookup(ONE) == [(moved, advert(1))])
    assert replica.nodes() == [moved]
    # Another one may live there now: what is known of the place must not be the moved one's.
    neighbour = NodeInfo(node(2).incarnation, "host-1", node(1).address)
    loop.announcer(directory.endpoint, neighbour, timeout_s=NEVER_S).store(advert(2))
    loop.until(lambda: replica.lookup(TWO) == [(neighbour, advert(2))])
    assert replica.lookup(ONE) == [(moved, advert(1))]


def test_a_late_joiner_gets_everything_in_bounded_chunks(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind, node_timeout_s=NEVER_S)
    announcer = loop.announcer(directory.endpoint, node(1), timeout_s=NEVER_S)
    for number in range(20_000):
        announcer.store(advert(number))
    loop.until(lambda: announcer.connected and not announcer.pending)
    loop.until(lambda: directory.entries() == 20_000)
    replica = loop.replica(directory.endpoint)
    loop.until(lambda: in_step(directory, replica))
    assert len(replica) == 20_000
    assert replica.lookup(advert(19_999).identity) == [(node(1), advert(19_999))]
    assert replica.counters["bad_frames"] == 0


def test_joining_in_the_middle_of_a_burst_ends_equal(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind)
    announcer = loop.announcer(directory.endpoint, node(1))
    replicas = []
    held = set()
    for number in range(5_000):
        announcer.store(advert(number))
        held.add(advert(number).identity)
        if number % 3 == 0:
            announcer.withdraw(advert(number // 2).identity)
            held.discard(advert(number // 2).identity)
        if number % 50 == 0:
            loop.turn(0)
        if number % 1_000 == 0:
            replicas.append(loop.replica(directory.endpoint))
    loop.until(lambda: announcer.connected and not announcer.pending)
    loop.until(lambda: directory.entries() == len(held), "what was sent has been read")
    loop.until(lambda: all(in_step(directory, replica) for replica in replicas))
    loop.until(lambda: all(set(replica.identities()) == held for replica in replicas), "doubts to end")


def test_one_of_two_directories_dies_and_comes_back(loop: Loop, kind: str) -> None:
    first, second = loop.serve(kind, node_timeout_s=NEVER_S), loop.serve("zmq", node_timeout_s=NEVER_S)
    endpoints = [first.endpoint, second.endpoint]
    changes: list[bytes] = []
    nodes: list[tuple[NodeInfo, bool]] = []
    view = loop.view(endpoints, on_change=changes.append, on_node=lambda node, up: nodes.append((node, up)))
    announcers = [loop.announcer(endpoint, node(1), timeout_s=NEVER_S) for endpoint in endpoints]
    for announcer in announcers:
        announcer.store(advert(1))
    loop.until(lambda: all(replica.fresh and replica.lookup(ONE) for replica in view.replicas))
    assert view.lookup(ONE) == [(node(1), advert(1))]
    assert view.nodes() == [node(1)]

    first.close()
    for announcer in announcers:
        announcer.store(advert(2))
        announcer.withdraw(ONE)
    loop.until(lambda: view.lookup(TWO))
    loop.until(lambda: not view.lookup(ONE), "what only the dead directory still says does not count")
    assert view.replicas[0].lookup(ONE)
    loop.until(lambda: view.fresh)

    again = loop.serve(kind, endpoints[0])
    loop.until(lambda: in_step(again, view.replicas[0]) and view.replicas[0].lookup(TWO))
    assert view.lookup(TWO) == [(node(1), advert(2))]
    assert nodes == [(node(1), True)]
    assert {ONE, TWO} <= set(changes)


def test_a_view_of_dead_directories_keeps_what_it_knew(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind)
    announcer = loop.announcer(directory.endpoint, node(1))
    view = loop.view([directory.endpoint])
    announcer.store(advert(1))
    loop.until(lambda: view.fresh and view.lookup(ONE))
    directory.close()
    loop.until(lambda: not view.fresh)
    assert view.lookup(ONE) == [(node(1), advert(1))]
    assert view.nodes() == [node(1)]


def test_a_view_takes_the_newest_generation_of_each_node(loop: Loop, kind: str) -> None:
    directories = [loop.serve("zmq"), loop.serve(kind)]
    view = loop.view([directory.endpoint for directory in directories])
    for generation, directory in enumerate(directories, start=1):
        loop.announcer(directory.endpoint, node(1)).store(advert(1, generation))
        loop.announcer(directory.endpoint, node(generation + 1)).store(advert(1))
    newest = [(node(1), advert(1, 2)), (node(2), advert(1)), (node(3), advert(1))]
    loop.until(lambda: sorted(view.lookup(ONE), key=lambda holder: holder[0].name) == newest)


def test_replicas_know_the_instances_of_each_node(loop: Loop, kind: str) -> None:
    directory = loop.serve(kind)
    announcer = loop.announcer(directory.endpoint, node(1))
    early = loop.replica(directory.endpoint)
    encoder = InstanceInfo("engine-0", "producer", "ab" * 32)
    announcer.describe([encoder])
    loop.until(lambda: early.instances(node(1).incarnation) == [encoder])
    late = loop.replica(directory.endpoint)
    loop.until(lambda: late.instances(node(1).incarnation) == [encoder])
    announcer.describe([])
    loop.until(lambda: not early.instances(node(1).incarnation) and not late.instances(node(1).incarnation))
    announcer.goodbye()
    loop.until(lambda: not early.nodes())
    assert early.instances(node(1).incarnation) == []


def test_closing_leaves_no_thread_and_no_descriptor(kind: str) -> None:
    before = opened()
    for _ in range(3):
        loop = Loop()
        directory = loop.serve(kind)
        announcer = loop.announcer(directory.endpoint, node(1))
        replica = loop.replica(directory.endpoint)
        announcer.store(advert(1))
        loop.until(lambda replica=replica: replica.lookup(ONE))
        loop.close()
    await_closed(before)
