"""Memory of a device that entries land in, without passing through the host.

Owns a stretch of the device's memory, which part of it is free, and a table for the records in the host's memory: the
CPU has to look at those. It must never know what an extent holds, nor copy anything.

It has the geometry of an arena of one slab: an extent's offset is beyond the table, and the place where its record
lands is in the table.
So a transport takes the table for its arena, and the device's memory for what lies beyond.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from ec_p2p.engine.arena import PAGE, Slab
from ec_p2p.engine.extents import Extent, Extents
from ec_p2p.engine.generation import RECORD_BYTES, table_bytes
from ec_p2p.engine.views import dtype_of
from ec_p2p.node.device import Device


class DevicePool:
    """`nbytes`, rounded up to whole pages, of `device`'s memory and of the host's, together. Not thread-safe, but for
    `view`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.slab_bytes = -(-nbytes // PAGE) * PAGE
        self.table_bytes = table_bytes(self.slabs[0])
        self._extents = Extents(self)
        self._table = mmap.mmap(-1, self.table_bytes)
        self.memory = device.memory(self.slab_bytes - self.table_bytes)
        """Of shape (bytes,): byte 0 is at offset `table_bytes`."""

    @property
    def slabs(self) -> list[Slab]:
        return [Slab(0, self.slab_bytes)]

    @property
    def table_address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._table))

    @property
    def free_bytes(self) -> int:
        return self._extents.free_bytes

    def reserve(self, nbytes: int) -> Extent | None:
        """An extent for an entry of `nbytes`, or None where there is no room."""
        return self._extents.reserve(nbytes)

    def release(self, extent: Extent) -> None:
        self._extents.free(extent)

    def landed_record(self, extent: Extent) -> bytes:
        """The 64 bytes that were READ after what lies in the extent."""
        return self._table[extent.landing_record : extent.landing_record + RECORD_BYTES]

    def view(self, extent: Extent, rows: int, dim: int, dtype: str) -> torch.Tensor:
        """A (rows, dim) tensor that aliases the extent."""
        kind = dtype_of(dtype)
        start = extent.offset - self.table_bytes
        return self.memory[start : start + rows * dim * kind.itemsize].view(kind).view(rows, dim)
