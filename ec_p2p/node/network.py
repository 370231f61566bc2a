"""Which addresses a node binds to and is dialled at, what it moves bytes with there, and what is said of who can reach
them."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable

import zmq

from ec_p2p.config import Config, ConfigError
from ec_p2p.control.directories import host_of
from ec_p2p.engine.arena import Arena
from ec_p2p.transport import open_transport
from ec_p2p.transport.interconnect import Interconnect
from ec_p2p.transport.interface import Transport
from ec_p2p.wire.curve import Security, key_text

logger = logging.getLogger(__name__)


def hosts(config: Config) -> tuple[str, str]:
    """(address that peers dial, address that sockets bind to).

    Raises ConfigError when no address of this host leads to the directory.
    """
    advertise = config.advertise_host or _own_address_towards(_directory_host(config))
    if config.bind_host:
        return advertise, config.bind_host
    return advertise, advertise if is_loopback(advertise) else "0.0.0.0"


def interconnect_of(config: Config) -> Interconnect:
    return Interconnect(config.nixl_backend, config.nixl_params, config.ucx_tls)


def transport_of(
    config: Config,
    incarnation: bytes,
    arena: Arena,
    context: zmq.Context[zmq.Socket[bytes]],
    advertise: str,
    bind: str,
    security: Security | None,
) -> Transport:
    """What a node moves bytes with; `advertise` and `bind` are its `hosts`. Raises TransportError."""
    transport = open_transport(
        config.transport,
        incarnation.hex(),
        arena.base,
        arena.nbytes,
        context=context,
        bind_host=bind,
        advertise_host=advertise,
        security=security,
        interconnect=interconnect_of(config),
    )
    if security and transport.kind == "nixl":
        level = logging.WARNING if config.require_encryption else logging.INFO
        logger.log(level, "what NIXL moves between hosts is not encrypted; with transport zmq it is")
    return transport


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def say_who_gets_in(security: Security | None, hosts: Iterable[str]) -> None:
    """One line at the start of a process that listens at, or talks to, these addresses."""
    if security is not None:
        others = len(security.allow) - 1
        logger.info(
            "ZMQ connections need keys; ours is %r, and %d others are allowed", key_text(security.public), others
        )
        return
    reachable = sorted({host for host in hosts if not is_loopback(host)})
    if reachable:
        logger.warning(
            "no `security` is set: whoever reaches the ports at %s can read entries and advertise false ones",
            ", ".join(reachable),
        )


def _directory_host(config: Config) -> str:
    """The first directory's host: `ec_ip`, unless directories are listed."""
    return host_of(config.directories[0])


def _own_address_towards(host: str) -> str:
    """The address from which this host would talk to `host`. Nothing is sent: connecting a datagram socket only asks
    the kernel for the route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise ConfigError(
                f"the directory's host {host!r} cannot be reached from here ({error}); set ec_ip or directory to an "
                "address that can be, or advertise_host to the address that peers dial"
            ) from None
        return str(probe.getsockname()[0])
