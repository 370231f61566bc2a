"""The view of who holds what, and what it tells about its changes."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.control.messages import Advert, NodeInfo
from ec_p2p.control.table import Table
from tests.control.harness import advert, node

A, B = node(1), node(2)


class Heard:
    def __init__(self) -> None:
        self.changes: list[bytes] = []
        self.nodes: list[tuple[NodeInfo, bool]] = []
        self.table = Table(self.changes.append, lambda node, up: self.nodes.append((node, up)))

    def take(self) -> tuple[list[bytes], list[tuple[NodeInfo, bool]]]:
        heard = (self.changes[:], self.nodes[:])
        self.changes.clear()
        self.nodes.clear()
        return heard


def test_lookup_names_every_holder_in_order() -> None:
    table = Heard().table
    for info in (A, B):
        table.put_node(info)
        table.change(info.incarnation, [advert(1)], [])
    assert table.lookup(advert(1).identity) == [(A, advert(1)), (B, advert(1))]
    table.change(A.incarnation, [], [advert(1).identity])
    assert table.lookup(advert(1).identity) == [(B, advert(1))]
    assert table.lookup(advert(2).identity) == []


def test_only_what_changed_is_told() -> None:
    heard = Heard()
    heard.table.put_node(A)
    heard.table.change(A.incarnation, [advert(1), advert(2)], [])
    assert heard.take() == ([advert(1).identity, advert(2).identity], [(A, True)])
    heard.table.put_node(A)
    heard.table.change(A.incarnation, [advert(1), advert(2, generation=2)], [advert(3).identity])
    assert heard.take() == ([advert(2).identity], [])
    assert heard.table.lookup(advert(2).identity) == [(A, advert(2, generation=2))]
    heard.table.drop_node(A.incarnation)
    assert heard.take() == ([advert(1).identity, advert(2).identity], [(A, False)])
    heard.table.drop_node(A.incarnation)
    assert heard.take() == ([], [])


def test_a_moved_node_leaves_its_adverts_behind() -> None:
    heard = Heard()
    heard.table.put_node(A)
    heard.table.change(A.incarnation, [advert(1)], [])
    moved = node(1, address="tcp://10.0.0.9:9")
    heard.table.put_node(moved)
    assert heard.table.nodes() == [moved]
    assert heard.table.lookup(advert(1).identity) == []
    assert heard.take()[1] == [(A, True), (A, False), (moved, True)]


def test_a_new_incarnation_at_the_same_place_ends_the_old_one() -> None:
    heard = Heard()
    heard.table.put_node(A)
    heard.table.change(A.incarnation, [advert(1)], [])
    reborn = node(1, life=1)
    heard.table.put_node(reborn)
    heard.table.change(A.incarnation, [advert(2)], [])
    assert heard.table.nodes() == [reborn]
    assert (len(heard.table), heard.table.identities()) == (0, [])


def test_the_table_has_changed_when_it_tells() -> None:
    seen = []
    table = Table(lambda identity: seen.append(len(table.lookup(identity))), lambda node, up: seen.append(up))
    table.put_node(A)
    table.change(A.incarnation, [advert(1)], [])
    table.drop_node(A.incarnation)
    assert seen == [True, 1, 0, False]


def test_holders_stay_in_the_order_in_which_their_adverts_came() -> None:
    table = Heard().table
    infos = [node(number) for number in (1, 2, 3)]
    for info in infos:
        table.put_node(info)
        table.change(info.incarnation, [advert(1), advert(info.incarnation[0] + 10)], [])
    table.change(B.incarnation, [], [advert(1).identity])
    assert [holder for holder, _ in table.lookup(advert(1).identity)] == [infos[0], infos[2]]
    table.change(A.incarnation, [advert(1, generation=2)], [])
    assert table.lookup(advert(1).identity) == [(infos[2], advert(1)), (A, advert(1, generation=2))]
    table.drop_node(infos[2].incarnation)
    assert table.lookup(advert(1).identity) == [(A, advert(1, generation=2))]


def test_the_garbage_collector_does_not_visit_entries() -> None:
    """Their number must not make a pause of it."""
    table = Heard().table
    for info in (A, B):
        table.put_node(info)
        table.change(info.incarnation, [advert(0)], [])
    gc.collect()
    before = len(gc.get_objects())
    for info in (A, B):
        table.change(info.incarnation, [advert(number) for number in range(1, 5_000)], [])
    table.change(A.incarnation, [advert(number, generation=2) for number in range(1, 5_000)], [])
    gc.collect()
    assert len(gc.get_objects()) - before < 100


infos = st.sampled_from([A, B, node(3)])
adverts = st.builds(advert, st.integers(0, 4), st.integers(1, 2))
changes = st.tuples(infos, st.lists(adverts, max_size=5), st.lists(st.integers(0, 4), max_size=3))


@given(st.lists(changes | infos, max_size=30))
def test_whatever_happens_the_table_is_equal_to_a_plain_one(steps: list[object]) -> None:
    heard = Heard()
    plain: dict[NodeInfo, dict[bytes, Advert]] = {}
    for step in steps:
        before = {identity: heard.table.lookup(identity) for identity in heard.table.identities()}
        withdrawn: list[bytes] = []
        if isinstance(step, NodeInfo):
            if step in plain:
                del plain[step]
                heard.table.drop_node(step.incarnation)
            else:
                plain[step] = {}
                heard.table.put_node(step)
        else:
            info, adverts, numbers = step  # type: ignore[misc]
            withdrawn = [advert(number).identity for number in numbers]
            heard.table.change(info.incarnation, adverts, withdrawn)
            if info in plain:
                for identity in withdrawn:
                    plain[info].pop(identity, None)
                plain[info].update({entry.identity: entry for entry in adverts})
        named, _ = heard.take()
        for number in range(5):
            identity = advert(number).identity
            found = heard.table.lookup(identity)
            assert sorted(found, key=repr) == sorted(
                ((info, held[identity]) for info, held in plain.items() if identity in held), key=repr
            )
            if identity not in withdrawn:
                assert (identity in named) == (found != before.get(identity, []))
            else:
                assert identity in named or found == before.get(identity, [])
        assert len(heard.table) == sum(map(len, plain.values()))
        for info, held in plain.items():
            assert heard.table.held_by(info.incarnation) == set(held)
            assert sorted(heard.table.adverts(info.incarnation), key=repr) == sorted(held.values(), key=repr)
