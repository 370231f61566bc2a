"""Which addresses a node binds to and is dialled at."""

from __future__ import annotations

import ipaddress
import socket

from ec_p2p.config import Config, ConfigError


def hosts(config: Config) -> tuple[str, str]:
    """(address that peers dial, address that sockets bind to).

    Raises ConfigError when no address of this host leads to `ec_ip`.
    """
    advertise = config.advertise_host or _own_address_towards(config.ec_ip)
    if config.bind_host:
        return advertise, config.bind_host
    return advertise, advertise if is_loopback(advertise) else "0.0.0.0"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_address_towards(host: str) -> str:
    """The address from which this host would talk to `host`. Nothing is sent: connecting a datagram socket only asks
    the kernel for the route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise ConfigError(
                f"ec_ip={host!r} cannot be reached from here ({error}); accepted: a host name or address of the "
                "directory's host, or set advertise_host"
            ) from None
        return str(probe.getsockname()[0])
