from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_p2p.engine import generation
from ec_p2p.engine.arena import PAGE, Arena, Slab
from ec_p2p.engine.entry import layout_of
from ec_p2p.engine.generation import (
    RECORD_BYTES,
    GenerationTable,
    Record,
    check,
    itemsize,
    landing_record_at,
    pack,
    proves,
    record_at,
    records_in,
    table_bytes,
    unpack,
)

IDENTITY = bytes(range(32))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(64 * PAGE, 64 * PAGE) as arena:
        yield arena


def test_the_layout_is_the_documented_one() -> None:
    data = pack(Record(0x1122334455667788, IDENTITY, 3 * 5 * 2, 3, 5, "bfloat16"))
    assert len(data) == RECORD_BYTES
    assert data == struct.pack("<Q", 0x1122334455667788) + IDENTITY + struct.pack("<QIIQ", 30, 3, 5, 1)


def test_dtype_codes_never_change() -> None:
    names = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
    names += ["int8", "uint8", "int16", "int32", "int64", "bool"]
    codes = [struct.unpack("<Q", pack(Record(1, IDENTITY, itemsize(name), 1, 1, name))[-8:])[0] for name in names]
    assert codes == list(range(1, 13))


def test_itemsizes_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name in ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]:
        assert itemsize(name) == getattr(torch, name).itemsize
    for name in ["int8", "uint8", "int16", "int32", "int64", "bool"]:
        assert itemsize(name) == getattr(torch, name).itemsize


@given(
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**31 - 1),
    st.sampled_from(["bfloat16", "float32", "bool"]),
)
def test_pack_and_unpack_are_inverse(generation: int, identity: bytes, rows: int, dim: int, dtype: str) -> None:
    if rows * dim * itemsize(dtype) < 2**64:
        record = Record(generation, identity, rows * dim * itemsize(dtype), rows, dim, dtype)
        assert unpack(pack(record)) == record


@given(st.binary(min_size=64, max_size=64))
def test_unpack_takes_any_64_bytes(data: bytes) -> None:
    record = unpack(data)
    assert record.dtype == "" or itemsize(record.dtype)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ((b"short", 2, 1, 1, "bfloat16"), "not 32 bytes"),
        (("x" * 32, 2, 1, 1, "bfloat16"), "not 32 bytes"),
        ((IDENTITY, 2, -1, 1, "bfloat16"), "does not fit"),
        ((IDENTITY, 2, 1, 2**32, "bfloat16"), "does not fit"),
        ((IDENTITY, 3, 1, 1, "bfloat16"), "3 bytes are not"),
        ((IDENTITY, 2, 1, 1, "float3"), "cannot be stored; accepted: bfloat16"),
    ],
)
def test_what_cannot_be_a_record_is_refused(fields: tuple[bytes, int, int, int, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(*fields)
    with pytest.raises(ValueError, match=complaint):
        pack(Record(1, *fields))


def test_tables_are_whole_pages_with_two_records_per_16_kib() -> None:
    assert (records_in(Slab(0, 256 << 20)), table_bytes(Slab(0, 256 << 20))) == (16384, 2 << 20)
    assert (records_in(Slab(0, 80 << 10)), table_bytes(Slab(0, 80 << 10))) == (5, PAGE)
    assert (records_in(Slab(0, PAGE)), table_bytes(Slab(0, PAGE))) == (1, PAGE)


@pytest.mark.parametrize("nbytes", [2 * PAGE, 80 << 10, 256 << 20])
def test_what_lands_as_a_record_has_a_place_of_its_own_in_the_table(nbytes: int) -> None:
    slab = Slab(4 << 30, nbytes)
    slots = range(records_in(slab))
    ours = [record_at(slab, slot) for slot in slots]
    landing = [landing_record_at(slab, slot) for slot in slots]
    places = [*ours, *landing]
    assert places == list(range(slab.offset, slab.offset + len(places) * RECORD_BYTES, RECORD_BYTES))
    assert places[-1] + RECORD_BYTES <= slab.offset + table_bytes(slab)


def test_a_record_proves_what_it_says_and_nothing_else() -> None:
    layout = layout_of(3, 2, "float32")
    record = pack(Record(7, IDENTITY, 24, 3, 2, "float32"))
    assert proves(record, 7, IDENTITY, layout)
    assert proves(memoryview(record), 7, IDENTITY, layout)
    assert not proves(record, 8, IDENTITY, layout)
    assert not proves(record, 7, bytes(32), layout)
    for other in (layout_of(2, 3, "float32"), layout_of(3, 2, "int32"), layout_of(3, 1, "float32")):
        assert not proves(record, 7, IDENTITY, other)
    for at in range(RECORD_BYTES):
        assert not proves(record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :], 7, IDENTITY, layout)


@pytest.mark.parametrize("generation", [0, -1, 1 << 64])
def test_no_record_proves_what_no_generation_can_be(generation: int) -> None:
    layout = layout_of(3, 2, "float32")
    record = pack(Record(0, IDENTITY, 24, 3, 2, "float32"))
    assert not proves(record, generation, IDENTITY, layout)


def test_no_record_proves_a_dtype_that_is_not_known() -> None:
    record = pack(Record(7, IDENTITY, 24, 3, 2, "float32"))
    assert not proves(record, 7, IDENTITY, Record(7, IDENTITY, 24, 3, 2, "float4_of_tomorrow"))


def test_publish_invalidate_publish(arena: Arena) -> None:
    table = GenerationTable(arena)
    assert table.read(128).generation == 0
    first = table.publish(128, IDENTITY, layout_of(3, 2, "float32"))
    assert table.read(128) == (first, IDENTITY, 24, 3, 2, "float32")
    table.invalidate(128)
    assert table.read(128).generation == 0
    second = table.publish(128, bytes(32), layout_of(0, 7, "float16"))
    assert table.read(128) == (second, bytes(32), 0, 0, 7, "float16")
    assert second > first > 0
    assert bytes(arena.buffer[:128]) == bytes(128)
    assert bytes(arena.buffer[192:4096]) == bytes(4096 - 192)


READER = """
import sys
from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.generation import unpack

fd, nbytes, payload = map(int, sys.argv[1:])
arena = Arena.attach(fd, nbytes, nbytes)
trusted = doubted = 0
while trusted < 3000 or doubted < 300:
    before = unpack(arena.buffer[0:64])
    if before.generation == 0:
        continue
    data = bytes(arena.buffer[PAGE : PAGE + payload])
    after = unpack(arena.buffer[0:64])
    if (after.generation, after.identity) != (before.generation, before.identity):
        doubted += 1
        continue
    trusted += 1
    stamp = before.generation.to_bytes(8, "little")
    assert after.identity == stamp * 4, "the identity of one generation came with another"
    assert data == stamp * (payload // 8), f"generation {before.generation} was trusted and torn"
"""


def test_a_reader_never_trusts_bytes_that_changed_under_it(arena: Arena) -> None:
    """One writer rewrites an extent; a reader in another process, which takes no lock, validates what it copied."""
    payload = 32 * PAGE
    argv = [sys.executable, "-c", READER, str(arena.fd), str(arena.nbytes), str(payload)]
    with subprocess.Popen(argv, pass_fds=[arena.fd], stderr=subprocess.PIPE, text=True) as reader:
        table = GenerationTable(arena)
        generation = 0
        while reader.poll() is None:
            table.invalidate(0)
            stamp = (generation + 1).to_bytes(8, "little")
            for at in range(PAGE, PAGE + payload, PAGE):  # in pieces, so that a torn copy is likely
                arena.buffer[at : at + PAGE] = stamp * (PAGE // 8)
            generation = table.publish(0, stamp * 4, layout_of(1, payload, "uint8"))
            time.sleep(generation % 4 * 1e-4)  # some generations live long enough to be read whole
        _, complaint = reader.communicate()
    assert reader.returncode == 0, complaint


def test_the_fence_stands_between_the_stores_that_must_keep_their_order(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, layout = GenerationTable(arena), layout_of(3, 5, "bfloat16")
    offset = record_at(Slab(0, arena.nbytes), 0)
    seen: list[Record] = []
    monkeypatch.setattr(generation, "fence", lambda: seen.append(table.read(offset)))
    number = table.publish(offset, IDENTITY, layout)
    assert seen == [Record(0, IDENTITY, 30, 3, 5, "bfloat16")], "all but the generation is there"
    assert table.read(offset).generation == number
    table.invalidate(offset)
    assert seen[1:] == [Record(0, IDENTITY, 30, 3, 5, "bfloat16")], "the generation is gone"


def test_a_machine_that_keeps_no_order_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            taken.append("acquire")

        def __exit__(self, *_: object) -> None:
            taken.append("release")

    monkeypatch.setattr(generation, "_FENCE", Lock())
    for keeps_order, expected in ((True, []), (False, ["acquire", "release"] * 2)):
        monkeypatch.setattr(generation, "_KEEPS_ORDER", keeps_order)
        generation.fence()
        assert taken == expected
