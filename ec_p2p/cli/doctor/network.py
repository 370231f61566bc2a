"""RDMA devices, and the addresses that peers dial."""

from __future__ import annotations

from pathlib import Path

from ec_p2p.cli.doctor import ucx
from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.config import Config, ConfigError
from ec_p2p.node.network import hosts, is_loopback
from ec_p2p.transport import chosen_kind


def rdma(root: Path = Path("/sys/class/infiniband")) -> list[tuple[str, str]]:
    """(device/port, state) of every RDMA port, such as ('mlx5_0/1', '4: ACTIVE, 400 Gb/sec, Ethernet')."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        words = [_read(port / name) for name in ("state", "rate", "link_layer")]
        found.append((f"{port.parts[-3]}/{port.name}", ", ".join(word for word in words if word)))
    return found


def rdma_devices(config: Config, ports: list[tuple[str, str]]) -> Finding:
    says = "; ".join(f"{name}: {state}" for name, state in ports) or "no device"
    if chosen_kind(config.transport) == "zmq":
        return ok("rdma", f"{says}; none is used, since the transport is zmq")
    if not ports:
        mend = "containers need /dev/infiniband"
        if not ucx.is_used(config):
            return note("rdma", f"{says}: it depends on {config.nixl_backend} what bytes go over between hosts", mend)
        may = ucx.allowed(config)
        if not may.may_use("tcp"):
            return note("rdma", f"{says}, and {may.setting} allows no TCP between hosts (see ucx)", mend)
        mend = f"over plain TCP transport: zmq is the safe choice (README, limits); {mend}"
        return note("rdma", f"{says}: between hosts NIXL goes over TCP", mend)
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


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
