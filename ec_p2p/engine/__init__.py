"""The engine room: the arena, the tiers in it, and the encoder cache over them.

The names below are resolved on first use, so that the node can import the torch-free modules without loading torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ec_p2p.engine.cpu import LocalCPUBackend
    from ec_p2p.engine.disk import LocalDiskBackend
    from ec_p2p.engine.ec_engine import ECCacheEngine
    from ec_p2p.engine.memory_format import MemoryFormat
    from ec_p2p.engine.storage import StorageManager

_HOMES = {
    "ECCacheEngine": "ec_p2p.engine.ec_engine",
    "LocalCPUBackend": "ec_p2p.engine.cpu",
    "LocalDiskBackend": "ec_p2p.engine.disk",
    "MemoryFormat": "ec_p2p.engine.memory_format",
    "StorageManager": "ec_p2p.engine.storage",
}

__all__ = ["ECCacheEngine", "LocalCPUBackend", "LocalDiskBackend", "MemoryFormat", "StorageManager"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
