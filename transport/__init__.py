"""Moves bytes between the arenas of two nodes, one-sided where the hardware allows it.

Owns the choice of a transport; must never import one that was not asked for. `interface` says
what a transport is.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from ec_p2p.transport.interconnect import Interconnect
from ec_p2p.transport.interface import Reading, Span, State, Transport, TransportError

if TYPE_CHECKING:
    import zmq

    from ec_p2p.wire.curve import Security

__all__ = [
    "Interconnect",
    "Reading",
    "Span",
    "State",
    "Transport",
    "TransportError",
    "chosen_kind",
    "nixl_available",
    "open_transport",
]

logger = logging.getLogger(__name__)

NIXL_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Where NIXL may be installed, in order of preference."""


def nixl_available() -> bool:
    """Whether some build of NIXL is installed. Imports nothing."""
    return any(importlib.util.find_spec(package) for package in NIXL_PACKAGES)


def chosen_kind(kind: str) -> str:
    """What 'auto' stands for on this host."""
    if kind == "auto":
        return "nixl" if nixl_available() else "zmq"
    return kind


def open_transport(
    kind: str,
    name: str,
    base: int,
    nbytes: int,
    *,
    context: zmq.Context[zmq.Socket[bytes]],
    bind_host: str,
    advertise_host: str,
    security: Security | None = None,
    interconnect: Interconnect | None = None,
) -> Transport:
    """Make the transport called `kind`: 'nixl', 'zmq', or 'auto' for NIXL where it is installed.

    name: unique in the fleet; peers know the transport by it. base, nbytes: address and size of the arena's mapping.
    bind_host: where it listens. context, advertise_host, security: used by 'zmq' only; with `security` the context has
    a gate. interconnect: used by 'nixl' only. Raises TransportError."""
    kind = chosen_kind(kind)
    if kind == "nixl":
        from ec_p2p.transport.nixl import NixlTransport

        return NixlTransport(name, base, nbytes, bind_host=bind_host, interconnect=interconnect)
    if kind == "zmq":
        if interconnect and str(interconnect):
            logger.info("%s: no effect, since the transport is zmq", interconnect)
        from ec_p2p.transport.zmq import ZmqTransport

        return ZmqTransport(
            name,
            base,
            nbytes,
            context=context,
            bind_host=bind_host,
            advertise_host=advertise_host,
            security=security,
        )
    raise TransportError(f"transport={kind!r}; accepted: auto, nixl, zmq")
