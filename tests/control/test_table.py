"""The view of who holds what, and what it tells about its changes."""

from __future__ import annotations

from ec_p2p.control.messages import NodeInfo
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
