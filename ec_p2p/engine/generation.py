"""The generation table: 64 bytes per extent that tell a one-sided reader whether what it read was intact.

Owns the layout of a record, where records lie in a slab, our own and those that were READ, the order in which their
words are written, and the counter of generations. Must never touch payload bytes or decide which extent lives.

A reader takes the payload first and the record afterwards. It trusts the payload only if the record still names the
generation and the identity it was promised. So generation 0 must be in the record before one byte of the extent
changes, and a new generation must be the last word of a record to arrive.
"""

from __future__ import annotations

import itertools
import platform
import struct
import sys
import threading
from typing import NamedTuple, Protocol

from ec_p2p.engine.arena import PAGE, Arena, Slab

RECORD_BYTES = 64
SLAB_BYTES_PER_RECORD = 16 << 10
IDENTITY_BYTES = 32

if sys.byteorder != "little":
    raise ImportError("ec-p2p's generation records are little-endian and are written in place; this machine is not")

_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine does loads in program order, and stores, too."""
_FENCE = threading.Lock()

_RECORD = struct.Struct("<Q32sQIIQ")
_AFTER_GENERATION = struct.Struct("<32sQIIQ")

# Part of the format that peers read: a code is never changed or given to another dtype.
_DTYPES = {
    "bfloat16": (1, 2),
    "float16": (2, 2),
    "float32": (3, 4),
    "float64": (4, 8),
    "float8_e4m3fn": (5, 1),
    "float8_e5m2": (6, 1),
    "int8": (7, 1),
    "uint8": (8, 1),
    "int16": (9, 2),
    "int32": (10, 4),
    "int64": (11, 8),
    "bool": (12, 1),
}
_NAMES = {code: name for name, (code, _) in _DTYPES.items()}


class RecordedLayout(Protocol):
    """What a record says of a payload, all of which passed `check`."""

    @property
    def rows(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Record(NamedTuple):
    """What a record says of its extent. `generation` 0: nothing, the extent may be changing right now."""

    generation: int
    identity: bytes
    nbytes: int
    rows: int
    dim: int
    dtype: str


def itemsize(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by its name without the `torch.` prefix. ValueError if unknown."""
    try:
        return _DTYPES[dtype][1]
    except KeyError:
        raise ValueError(f"dtype {dtype!r} cannot be stored; accepted: {', '.join(_DTYPES)}") from None


def tensor_bytes(rows: int, dim: int, dtype: str) -> int:
    """Bytes of a contiguous tensor. ValueError unless a record can say its shape and dtype."""
    if not (0 <= rows < 1 << 32 and 0 <= dim < 1 << 32):
        raise ValueError(f"shape ({rows}, {dim}) does not fit a record; accepted: two numbers below 2**32")
    return rows * dim * itemsize(dtype)


def check(identity: bytes, nbytes: int, rows: int, dim: int, dtype: str) -> None:
    """Raise ValueError unless these can be one entry's record and agree with each other."""
    if not isinstance(identity, bytes) or len(identity) != IDENTITY_BYTES:
        raise ValueError(f"identity {identity!r} is not {IDENTITY_BYTES} bytes")
    if nbytes != tensor_bytes(rows, dim, dtype):
        raise ValueError(f"{nbytes} bytes are not a ({rows}, {dim}) tensor of {dtype}")


def pack(record: Record) -> bytes:
    """The 64 bytes of a record. Raises ValueError as `check` does."""
    check(*record[1:])
    code, _ = _DTYPES[record.dtype]
    return _RECORD.pack(record.generation, record.identity, record.nbytes, record.rows, record.dim, code)


def unpack(data: bytes | bytearray | memoryview) -> Record:
    """Read 64 bytes that may come from anywhere: an unknown dtype code gives the name ''."""
    generation, identity, nbytes, rows, dim, code = _RECORD.unpack(data)
    return Record(generation, identity, nbytes, rows, dim, _NAMES.get(code, ""))


def proves(record: bytes | memoryview, generation: int, identity: bytes, layout: RecordedLayout) -> bool:
    """Whether what was read before these 64 bytes is what was promised, and was whole for as long as it was being
    read."""
    if not 0 < generation < 1 << 64 or layout.dtype not in _DTYPES:
        return False
    code, _ = _DTYPES[layout.dtype]
    return record == _RECORD.pack(generation, identity, layout.nbytes, layout.rows, layout.dim, code)


def records_in(slab: Slab) -> int:
    """Number of records, and so the largest number of extents, of a slab."""
    return slab.nbytes // SLAB_BYTES_PER_RECORD or 1


def table_bytes(slab: Slab) -> int:
    """Bytes at the start of a slab that hold its records, and as many places for those of others: whole pages."""
    return -(-2 * records_in(slab) * RECORD_BYTES // PAGE) * PAGE


def record_at(slab: Slab, slot: int) -> int:
    """Where the record of the extent with this slot is."""
    return slab.offset + RECORD_BYTES * slot


def landing_record_at(slab: Slab, slot: int) -> int:
    """Where the record lands that proves what was READ into the extent with this slot. Not in the extent's own: whoever
    READs from us could see half of one and half of the other there."""
    return slab.offset + RECORD_BYTES * (records_in(slab) + slot)


def fence() -> None:
    """Whatever this thread has loaded and stored before, it has done before whatever it does afterwards, as all others
    see it. Costs next to nothing where the machine keeps that order: CPython cannot change it across its own calls."""
    if _KEEPS_ORDER:
        return
    # What comes before may slide into a lock's section, and so may what comes after; but neither does across one that
    # is left before another is entered: to leave is a release, to enter an acquire, and those two keep their order.
    with _FENCE:
        pass
    with _FENCE:
        pass


class GenerationTable:
    """Writes the records of one arena and numbers the generations, which are never reused in its life.

    Callers take turns (the backend's lock); readers are other processes and other hosts, which take none.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._generations = itertools.count(1)

    def invalidate(self, offset: int) -> None:
        """Make the record at `offset` say generation 0. After the return the extent may be written again."""
        self._arena.words[offset // 8] = 0
        fence()

    def publish(self, offset: int, identity: bytes, layout: RecordedLayout) -> int:
        """Fill the invalidated record at `offset`, whose payload is in place; returns its new generation."""
        arena, generation = self._arena, next(self._generations)
        code, _ = _DTYPES[layout.dtype]
        _AFTER_GENERATION.pack_into(arena.buffer, offset + 8, identity, layout.nbytes, layout.rows, layout.dim, code)
        fence()
        # One aligned 64-bit store: struct would write it byte by byte, and a reader could see half of two generations.
        arena.words[offset // 8] = generation
        return generation

    def read(self, offset: int) -> Record:
        """The record at `offset` as it is now."""
        return unpack(self._arena.buffer[offset : offset + RECORD_BYTES])
