"""What NIXL moves bytes with: its backend, what that one is given, and what UCX may use.

Owns the operator's choice, and every word about one that cannot be had. UCX is configured by its environment only,
which it reads when the backend is made: what was chosen has to be there by then. Must never import NIXL itself.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import msgspec

from ec_p2p.transport.interface import TransportError

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    # With keepalives, a READ from a process that is stopped never ends; a dead one is noticed without them, too.
    "UCX_KEEPALIVE_INTERVAL": "inf",
    # UCX would take SIGHUP for itself and answer it with a flood of messages.
    "UCX_DEBUG_SIGNO": "0",
    # Patching mmap and its kin takes half a second; it serves a cache of registrations, and we register for good.
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "NIXL_LOG_LEVEL": "ERROR",
}
_OF_TCP = {
    # UCX would wait in connect() itself: whoever calls it stands still for as long as nobody answers.
    "UCX_TCP_CONN_NB": "y",
    # The kernel's own limit on unanswered connection attempts is two minutes; this is 15 s.
    "UCX_TCP_SYN_CNT": "3",
    # The kernel's own limit on unacknowledged data is a quarter of an hour, for which a READ keeps its landing memory.
    # Connections on which nothing is under way UCX ends after about as long as this by itself.
    "UCX_TCP_USER_TIMEOUT": "30s",
}
"""Without TCP, UCX would warn of variables that it does not use."""
_TOLD = ("UCX_TLS", "UCX_NET_DEVICES")
"""What decides most often whether UCX finds a way at all."""
_MEMORY = {"DRAM_SEG", "VRAM_SEG"}
"""A backend that knows other things than memory moves bytes to and from storage."""


class Interconnect(msgspec.Struct, frozen=True):
    """The settings nixl_backend, nixl_params and ucx_tls."""

    backend: str = "UCX"
    params: dict[str, str] = {}
    ucx_tls: str = ""

    def __str__(self) -> str:
        """What was chosen, as it is in the configuration; empty: nothing."""
        chosen = {"nixl_backend": self.backend, "nixl_params": self.params, "ucx_tls": self.ucx_tls}
        defaults = msgspec.structs.astuple(Interconnect())
        return ", ".join(
            f"{name}={value!r}"
            for (name, value), default in zip(chosen.items(), defaults, strict=True)
            if value != default
        )


class Backends(NamedTuple):
    """The plugins of the installed NIXL, each in one of the lists."""

    between_hosts: list[str]
    of_storage: list[str]
    not_loadable: list[str]


def set_environment(bind_host: str, ucx_tls: str) -> None:
    """Of what the user has exported, only UCX_TLS gives way, and that to the configuration."""
    if bind_host in ("localhost", "::1") or bind_host.startswith("127."):
        # Otherwise it listens on every interface of the host.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if ucx_tls:
        exported = os.environ.get("UCX_TLS", ucx_tls)
        if exported != ucx_tls:
            logger.info("ucx_tls=%r of the configuration replaces UCX_TLS=%r of the environment", ucx_tls, exported)
        os.environ["UCX_TLS"] = ucx_tls
    for name, value in {**_ENVIRONMENT, **(_OF_TCP if _tcp_may_be_used() else {})}.items():
        os.environ.setdefault(name, value)


def backends(agent: Any) -> Backends:
    """Loads every plugin that there is, to see whether it can be, and what for. `agent` is the library's."""
    found = Backends([], [], [])
    for name in sorted(agent.getAvailPlugins()):
        plugin = _plugin(agent, name)
        if plugin is None:
            found.not_loadable.append(name)
        else:
            (found.between_hosts if set(plugin[1]) <= _MEMORY else found.of_storage).append(name)
    return found


def make_backend(agent: Any, interconnect: Interconnect) -> None:
    """Let the library's `agent` have the backend that was chosen. Raises TransportError."""
    name, params = interconnect.backend, interconnect.params
    plugin = _plugin(agent, name)
    if plugin is None or not set(plugin[1]) <= _MEMORY:
        raise TransportError(f"nixl_backend={name!r}: {_why_not(agent, name)}")
    listed = plugin[0]
    unlisted = sorted(params.keys() - listed.keys())
    if unlisted:
        logger.warning(
            "nixl_params: %s does not list %s, and may ignore it; it lists %s", name, ", ".join(unlisted), _told(listed)
        )
    if interconnect.ucx_tls and not name.startswith("UCX"):
        logger.info("ucx_tls=%r has no effect, since nixl_backend is %s", interconnect.ucx_tls, name)
    try:
        agent.createBackend(name, params)
    except Exception as error:  # the library's errors share no base class
        environment = [f"{name}={os.environ[name]!r} in this process" for name in _TOLD if name in os.environ]
        raise TransportError(
            f"cannot make a NIXL agent with backend {name}: {said(error)} "
            f"(given: {', '.join([f'nixl_params={params!r}', *environment])}; {name} lists {_told(listed)}; "
            "the library's own words are in the log)"
        ) from error


def _tcp_may_be_used() -> bool:
    transports = os.environ.get("UCX_TLS", "all")
    names = {name.strip() for name in transports.lstrip("^").split(",")}
    return "tcp" not in names if transports.startswith("^") else bool(names & {"tcp", "all"})


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _plugin(agent: Any, name: str) -> tuple[dict[str, str], list[str]] | None:
    """Its parameters with their defaults, and the kinds of memory that it knows. None: it cannot be loaded."""
    try:
        plugin: tuple[dict[str, str], list[str]] = agent.getPluginParams(name)
    except Exception as error:
        logger.debug("NIXL's plugin %s: %s", name, said(error))
        return None
    return plugin


def _why_not(agent: Any, name: str) -> str:
    found = backends(agent)
    if name in found.of_storage:
        why = "moves bytes to and from storage, not between hosts"
    elif name in found.not_loadable:
        why = "is installed, but cannot be loaded (NIXL_LOG_LEVEL=INFO says why, mostly a library that is missing)"
    else:
        why = "the installed NIXL has no plugin of this name"
    others = f" (installed, but not loadable: {', '.join(found.not_loadable)})" if found.not_loadable else ""
    return f"{why}; accepted: {', '.join(found.between_hosts) or 'none'}{others}"


def _told(listed: dict[str, str]) -> str:
    return ", ".join(f"{name} ({default or 'empty'})" for name, default in sorted(listed.items())) or "no parameter"
