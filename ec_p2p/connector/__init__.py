"""What vLLM loads: the connector and the plugin that makes it known by name.

Only this room imports vLLM, and only on first use: vLLM's front end imports the connector class just for its metrics,
and the plugin's entry point runs in every vLLM process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ec_p2p.connector.connector import ECP2PConnector

__all__ = ["ECP2PConnector"]


def __getattr__(name: str) -> Any:
    if name == "ECP2PConnector":
        from importlib import import_module

        return import_module("ec_p2p.connector.connector").ECP2PConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
