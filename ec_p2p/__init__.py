"""Peer-to-peer encoder cache for vLLM.

The names below are resolved on first use: the node process and the command line start without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ec_p2p.config_sources import load_ec_engine_config
    from ec_p2p.engine import ECCacheEngine, MemoryFormat, StorageManager
    from ec_p2p.identity import CacheEngineKey, stable_u64

__version__ = "0.1.0"

_HOMES = {
    "CacheEngineKey": "ec_p2p.identity",
    "ECCacheEngine": "ec_p2p.engine",
    "MemoryFormat": "ec_p2p.engine",
    "StorageManager": "ec_p2p.engine",
    "load_ec_engine_config": "ec_p2p.config_sources",
    "stable_u64": "ec_p2p.identity",
}

__all__ = [
    "CacheEngineKey",
    "ECCacheEngine",
    "MemoryFormat",
    "StorageManager",
    "__version__",
    "load_ec_engine_config",
    "stable_u64",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
