"""Tensors over arena memory, and the copies into and out of it.

Owns the translation from an extent's bytes to a torch tensor that aliases them. Must never outlive its borrower's right
to the extent: callers hold a pin, a lease or a reserved extent for as long as they use the view.
"""

from __future__ import annotations

import ctypes

import torch

from ec_p2p.engine.arena import Arena
from ec_p2p.engine.generation import itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """The torch name without its prefix: 'bfloat16'. ValueError for a dtype that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    itemsize(name)
    return name


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. ValueError for a name that cannot be stored."""
    itemsize(name)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "the table of storable names holds torch dtypes"
    return dtype


def tensor_view(arena: Arena, offset: int, rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A (rows, dim) tensor that aliases the arena from byte `offset`. Valid only while those bytes are the caller's."""
    if rows * dim == 0:
        return torch.empty((rows, dim), dtype=dtype)
    return torch.frombuffer(arena.buffer, dtype=dtype, count=rows * dim, offset=offset).view(rows, dim)


def copy_in(arena: Arena, offset: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Write a 2-D tensor of any device, layout and dtype to the arena at `offset`, as contiguous `dtype`, in one copy.

    The caller owns the bytes; they are in place on return. The interpreter lock is free during a plain copy.
    """
    _mapped = arena.buffer  # raises if the arena is closed, and keeps the mapping until the copy is over
    # torch splits even a plain copy over its thread pool, and then waits for the slowest thread: 20 times a memcpy's
    # time at 1 MiB as soon as the cores are busy.
    if tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous():
        ctypes.memmove(arena.base + offset, tensor.data_ptr(), tensor.nbytes)
    else:
        rows, dim = tensor.shape
        tensor_view(arena, offset, rows, dim, dtype).copy_(tensor.detach())


def copy_out(arena: Arena, offset: int, tensor: torch.Tensor) -> None:
    """Fill a contiguous 2-D tensor of any device from the arena at `offset`; complete on return, as `copy_in`."""
    _mapped = arena.buffer  # as above
    if tensor.is_cpu and tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), arena.base + offset, tensor.nbytes)
    else:
        rows, dim = tensor.shape
        tensor.copy_(tensor_view(arena, offset, rows, dim, tensor.dtype))
