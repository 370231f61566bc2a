"""Entries that can be checked by their name alone: shape and content follow from it."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import torch

DTYPE = torch.bfloat16
DIM = 64
ROW_BYTES = 2 * DIM
PAGE_ROWS = 32
"""Rows of an entry that takes one page."""


def rows_of(name: str) -> int:
    """None, few, or so many that it is written in more than one piece."""
    return random.Random(name).choice([0, 1, 7, 100, 1000, 9000])


def embedding(name: str, rows: int = PAGE_ROWS) -> torch.Tensor:
    if rows == 0:
        return torch.empty((0, DIM), dtype=DTYPE)
    data = bytearray(random.Random(f"{name} {rows}").randbytes(rows * ROW_BYTES))
    return torch.frombuffer(data, dtype=DTYPE).view(rows, DIM)


def is_right(got: torch.Tensor | None, name: str, rows: int = PAGE_ROWS) -> bool:
    """Whether this is the entry, bit for bit."""
    return got is not None and same(got, embedding(name, rows))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, NaNs included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def bytes_in(folder: Path) -> int:
    """Bytes of all files below, while others may be removing some."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total
