"""What one key costs the first tier's index."""

from __future__ import annotations

import gc
import tracemalloc

import msgspec

from ec_p2p.engine.arena import PAGE, Arena
from ec_p2p.engine.cpu import LocalCPUBackend
from ec_p2p.engine.generation import SLAB_BYTES_PER_RECORD
from ec_p2p.engine.policy import make_policy
from ec_p2p.engine.storage import SLAB_BYTES


class _Stored(msgspec.Struct, array_like=True, gc=False):
    """One entry as it arrives in a message: every value an object of its own."""

    identity: bytes
    rows: int
    dim: int
    dtype: str


def index_bytes_per_key(count: int, policy: str = "LRU") -> float:
    """Bytes of Python objects per entry of a tier that holds `count` entries of one page each, identities included;
    every other one was used since it was stored.

    The arena is left out, and is sparse: its record tables are all that is touched (64 bytes per entry).
    """
    with Arena.create(count * SLAB_BYTES_PER_RECORD + SLAB_BYTES, SLAB_BYTES) as arena:
        cpu = LocalCPUBackend(arena, policy=make_policy(policy))
        encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(_Stored).decode
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(count):
                rows = 300 + number % 700
                message = decode(encode(_Stored(number.to_bytes(32, "big"), rows, PAGE // rows, "uint8")))
                nbytes = message.rows * message.dim
                cpu.publish(cpu.reserve(nbytes), message.identity, nbytes, message.rows, message.dim, message.dtype)
                if number % 2:
                    cpu.get(message.identity)
            del message
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(cpu) == count
        return (after - before) / count
