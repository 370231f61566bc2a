"""One stretch of shared memory that holds every entry of a host.

Owns the memfd, its mapping and the geometry of slabs. Must never know what lies in the memory: records and
extents are the next layers' words. Torch-free: the node maps an arena without loading torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple, NoReturn

PAGE = mmap.PAGESIZE

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Slab(NamedTuple):
    """One growth step of an arena: bytes [offset, offset+nbytes)."""

    offset: int
    nbytes: int


class Arena:
    """`nbytes` of memory behind a memfd, mapped whole and committed page by page when first touched.

    Offsets are bytes from the arena's start. The size is sealed, so that no holder of the descriptor can make another
    process fault by shrinking it. Made by `create` (the owner) or `attach` (a process that was handed the descriptor).
    """

    def __init__(self, fd: int, nbytes: int, slab_bytes: int) -> None:
        """Private: `fd` becomes this object's own."""
        self.fd = fd
        self.nbytes = nbytes
        self.slab_bytes = slab_bytes
        mapping = mmap.mmap(fd, nbytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.buffer = memoryview(mapping)
        """The arena as writable bytes. Slices of it, and tensors over them, keep the mapping alive. ValueError once the
        arena is closed."""
        self.words = self.buffer.cast("Q")
        """The arena as 64-bit words of this machine: an item assignment is one store, never eight. As `buffer`."""

    @classmethod
    def create(cls, nbytes: int, slab_bytes: int) -> Arena:
        """A fresh, zeroed arena. `nbytes` and `slab_bytes` are rounded up to whole pages; with `nbytes` below
        `slab_bytes` there is one slab of `nbytes`, and the last slab may be short."""
        nbytes, slab_bytes = _whole_pages("nbytes", nbytes), _whole_pages("slab_bytes", slab_bytes)
        fd = os.memfd_create("ec-p2p-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, nbytes, slab_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, slab_bytes: int) -> Arena:
        """Map an arena that another process created. `fd` is duplicated: the caller still closes its own.

        Raises ValueError when the descriptor is not a sealed memfd of exactly `nbytes`.
        """
        if nbytes <= 0 or nbytes % PAGE or slab_bytes <= 0 or slab_bytes % PAGE:
            raise ValueError(
                f"cannot attach an arena of {nbytes!r} bytes in slabs of {slab_bytes!r}; "
                f"accepted: positive multiples of {PAGE}"
            )
        real = os.fstat(fd).st_size
        if real != nbytes:
            raise ValueError(f"arena descriptor holds {real} bytes, the owner says {nbytes}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError(f"arena descriptor is not a memfd: {error}") from None
        if seals & _SEALS != _SEALS:
            raise ValueError(f"arena descriptor has seals {seals:#x}: its size could still change under the mapping")
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            return cls(own, nbytes, slab_bytes)
        except BaseException:
            os.close(own)
            raise

    @property
    def slabs(self) -> list[Slab]:
        """The slabs in address order."""
        return [
            Slab(offset, min(self.slab_bytes, self.nbytes - offset))
            for offset in range(0, self.nbytes, self.slab_bytes)
        ]

    if not TYPE_CHECKING:  # which would take every name for one

        def __getattr__(self, name: str) -> NoReturn:
            # Of a closed arena there is neither; as attributes they cost each use less than a property would.
            if name in ("buffer", "words"):
                raise ValueError("the arena is closed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. Idempotent.

        The memory itself is unmapped with the last view of it: torch borrows a buffer without telling the mapping,
        so unmapping here would leave tensors of other threads pointing at nothing.
        """
        if self.fd < 0:
            return
        del self.buffer, self.words
        fd, self.fd = self.fd, -1
        os.close(fd)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _whole_pages(name: str, nbytes: int) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < 1 << 60:
        raise ValueError(f"{name}={nbytes!r} is not a size of memory; accepted: a positive number of bytes")
    return -(-nbytes // PAGE) * PAGE
