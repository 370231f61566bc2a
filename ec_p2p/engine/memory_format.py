"""How the bytes of an entry are to be understood."""

from __future__ import annotations

from enum import Enum


class MemoryFormat(Enum):
    EC_TD = "token, dim"
    """One row per token of the media item, contiguous, row-major."""
