"""RDMA devices, ports, and who answers on them."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.config import Config, ConfigError
from ec_p2p.node.client import NodeClient
from ec_p2p.node.network import hosts, is_loopback
from ec_p2p.wire.notation import without_password

_CONNECT_S = 1.0
_ATTACH_S = 1.0


def rdma(root: Path = Path("/sys/class/infiniband")) -> list[tuple[str, str]]:
    """(device/port, state) of every RDMA port, such as ('mlx5_0/1', '4: ACTIVE, 400 Gb/sec, Ethernet')."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        words = [_read(port / name) for name in ("state", "rate", "link_layer")]
        found.append((f"{port.parts[-3]}/{port.name}", ", ".join(word for word in words if word)))
    return found


def rdma_devices(ports: list[tuple[str, str]]) -> Finding:
    if not ports:
        return note(
            "rdma",
            "no device: between hosts NIXL goes over TCP",
            "over plain TCP transport: zmq is the safe choice (README, limits); containers need /dev/infiniband",
        )
    says = "; ".join(f"{name}: {state}" for name, state in ports)
    if not any("ACTIVE" in state for _, state in ports):
        return problem(
            "rdma", f"no port is active: {says}", "check cables and `ibstat`; for RoCE, bring the interface up"
        )
    return ok("rdma", says)


def addresses(config: Config) -> Finding:
    """What peers are told to dial."""
    try:
        advertise, bind = hosts(config)
    except ConfigError as error:
        return problem("address", str(error), "set ec_ip, directory or advertise_host")
    says = f"peers dial {advertise}, sockets bind to {bind}"
    if is_loopback(advertise):
        return note(
            "address", f"{says}: only this host can", "for a fleet, set ec_ip or directory to what all hosts reach"
        )
    return ok("address", says)


def directories(config: Config) -> list[Finding]:
    """Whether somebody listens where the directories should be."""
    return [_directory(config, endpoint) for endpoint in config.directories]


def node(config: Config) -> Finding:
    """Whether this host has its node."""
    with NodeClient(msgspec.structs.replace(config, spawn_node=False), "tool", "doctor") as client:
        if client.attach(_ATTACH_S):
            return ok("node", f"{config.name!r} runs on this host")
    if config.spawn_node:
        return ok("node", f"none called {config.name!r} yet: the first instance will start it")
    return note("node", f"none called {config.name!r}, and spawn_node is off", "start `ec-p2p node`")


def _directory(config: Config, endpoint: str) -> Finding:
    thing = f"directory {without_password(endpoint)}"
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_S):
            return ok(thing, "somebody listens there")
    except OSError as error:
        said = error.strerror or str(error)
    if not config.directory and config.embedded_directory and _can_bind(config.ec_ip, config.ec_port):
        return ok(thing, "nobody listens there yet: the first node on this host will host it")
    mend = "start `ec-p2p directory` there, open the port in the firewall, or correct ec_ip, ec_port or directory"
    return problem(thing, f"cannot be reached ({said})", mend)


def _can_bind(host: str, port: int) -> bool:
    """Whether this host could serve the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
