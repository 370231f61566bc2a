"""Who computes what, and until when that is believed."""

from __future__ import annotations

from ec_p2p.node.encodings import ENCODE_LIFETIME_S, Encodings

A = bytes(32)


def test_each_instance_has_a_time_of_its_own():
    encodings = Encodings()
    encodings.begin(A, "one", 1.0)
    encodings.begin(A, "two", 3.0)
    assert encodings.begun_at(A, "one") == 1.0
    assert encodings.begun_at(A, "two") == 3.0
    assert encodings.late(ENCODE_LIFETIME_S + 0.5) == []
    assert encodings.late(ENCODE_LIFETIME_S + 1.0) == [(A, "one")]
    assert encodings.late(ENCODE_LIFETIME_S + 3.0) == [(A, "one"), (A, "two")]


def test_it_ends_with_the_last_and_once_for_each():
    encodings = Encodings()
    for instance in ("one", "two"):
        encodings.begin(A, instance, 0.0)
    assert not encodings.end(A, "three")
    assert encodings.end(A, "two")
    assert not encodings.end(A, "two")
    assert A in encodings
    assert encodings.by_another(A, "two")
    assert not encodings.by_another(A, "one")
    assert encodings.end(A, "one")
    assert A not in encodings
    assert not encodings.by_another(A, "two")
    assert encodings.of("one") == []
