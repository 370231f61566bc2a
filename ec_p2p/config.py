"""The one typed configuration of a node and of its clients.

Owns names, defaults, units and the check of every value. It is built from vLLM's `ec_connector_extra_config` (plus
`ec_ip` and `ec_port`), from the command line, or from plain keyword arguments in tests; an unknown name or a bad
value is an error that names the key, the value and what is accepted.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

GIB = 1 << 30

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class ConfigError(ValueError):
    """A setting is unknown or has a value that cannot be used."""


def parse_size(key: str, value: object, *, bare_unit: int) -> int:
    """Bytes from a number in `bare_unit` (LMCache gives GiB) or from text such as '512MiB'."""
    accepted = f"accepted: a positive number of {'GiB' if bare_unit == GIB else 'bytes'}, or text like '512MiB'"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{key}={value!r} is not a size; {accepted}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = match and match[2].upper()
        if not match or unit not in _UNITS:
            raise ConfigError(f"{key}={value!r} is not a size; {accepted}")
        nbytes = float(match[1]) * (_UNITS[unit] if unit else bare_unit)
    else:
        nbytes = value * bare_unit
    if not 0 < nbytes < 1 << 60:
        raise ConfigError(f"{key}={value!r} is out of range; {accepted}")
    return int(nbytes)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting, with its default. Sizes are bytes, times are seconds."""

    # the host's node
    node_name: str = ""
    """Name of the node this process belongs to. Empty: the host name. Several names on one host make several nodes."""
    node_socket: str = ""
    """Path of the node's Unix socket, for containers that share a folder but no network namespace. Empty: an abstract
    socket named after the user and `node_name`."""
    node_group: str = ""
    """Members of this Unix group may attach, besides the node's own user and root. Needs `node_socket`."""
    spawn_node: bool = True
    """Start the host's node when there is none."""
    grace_s: float = 60.0
    """A spawned node leaves this long after its last client."""
    metrics_port: int = 0
    """Port of the node's /metrics. 0: any free port of the loopback, told to the clients; -1: none."""
    metrics_host: str = "127.0.0.1"
    log_file: str = ""
    """Where a spawned node writes its log, anew at each start. Empty: a file named after the user and the node in the
    folder for temporary files."""
    log_level: str = "INFO"

    # the engine
    local_cpu: bool = True
    """The first tier is always on; here because LMCache has a setting of this name."""
    max_local_cpu_size: int = GIB
    slab_size: int = 256 << 20
    """The arena grows, and is registered for RDMA, in steps of this size; no entry can be larger."""
    cache_policy: str = "LRU"
    """Which entry a full tier gives up first: 'LRU', or 'GDSF', which weighs use against size."""
    local_disk: str = ""
    """Folder of the disk tier, which other nodes may share. Empty: none."""
    max_local_disk_size: int = 64 * GIB
    """Bytes of files that the folder may hold, those of other nodes included."""
    disk_queue_size: int = 256 << 20
    """Bytes that may wait to be written; what is stored while the queue is full stays in memory only."""
    disk_fsync: bool = False
    """Flush each file to the device before it counts. Without it, a power cut may cost entries, never their truth."""

    # the data plane
    transport: str = "auto"
    """'nixl', 'zmq', or 'auto': NIXL where it can be imported."""
    fetch_timeout_s: float = 5.0
    """A request waits this long for its entries, then encodes locally or fails alone."""
    read_timeout_s: float = 2.0
    """One READ from one holder may take this long; then the next holder is tried."""
    expect_s: float = 1.0
    """An entry that a hint promises, or that someone is encoding, is waited for this long before it is advertised."""
    inline_wait_s: float = 0.003
    """The scheduler may wait this long inside one step for entries that are about to land."""
    share_fetched: bool = True
    """Advertise fetched entries too, so that popular ones have several holders."""

    # the control plane
    directory: tuple[str, ...] = ()
    """ZMQ endpoints of the directories. Empty: the one at ec_ip:ec_port."""
    embedded_directory: bool = True
    """The node on the host `ec_ip` hosts the directory when nobody else does."""
    directory_pub_port: int = 0
    """PUB port of an embedded directory. 0: ec_port + 1."""
    bind_host: str = ""
    """Address the node's sockets bind to. Empty: the loopback if `advertise_host` is a loopback address, else all."""
    advertise_host: str = ""
    """Address that peers dial. Empty: the address from which this host reaches the (first) directory."""
    peer_port: int = 0
    """Port on which peers ask for the card. 0: any free port."""
    heartbeat_s: float = 1.0
    node_timeout_s: float = 4.0

    # the connector
    namespace: str = ""
    """Overrides the computed namespace; change it when weights are replaced in place."""
    window_size: int = 64 << 20
    """Stretch of the arena that a worker holds for its next saves."""

    # from vLLM
    ec_ip: str = "127.0.0.1"
    ec_port: int = 14579

    @property
    def directories(self) -> tuple[str, ...]:
        return self.directory or (f"tcp://{self.ec_ip}:{self.ec_port}",)

    @property
    def name(self) -> str:
        return self.node_name or socket.gethostname()


_SIZES = {"max_local_cpu_size": GIB, "max_local_disk_size": GIB, "slab_size": 1, "window_size": 1, "disk_queue_size": 1}
_CHOICES = {
    "cache_policy": ("LRU", "GDSF"),
    "transport": ("auto", "nixl", "zmq"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}
_POSITIVE = ("fetch_timeout_s", "read_timeout_s", "heartbeat_s", "node_timeout_s")
_NOT_NEGATIVE = ("grace_s", "expect_s", "inline_wait_s")
_SMALLEST = 64 << 10
_LENGTHS = {"node_name": 200, "node_socket": 100}
"""The directory takes names up to 255 bytes; a socket's path has 107, of which the second one needs some."""
_PORTS = {"peer_port": 0, "directory_pub_port": 0, "metrics_port": -1, "ec_port": 1}


def make_config(settings: Mapping[str, Any]) -> Config:
    """Check `settings` (plain names, as in `ec_connector_extra_config`) and fill in the defaults.

    Raises ConfigError naming the key, the value and what is accepted.
    """
    known = Config.__struct_fields__
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown setting {key!r} (value {value!r}); the nearest known one is {near[0]!r}")
        if key in _SIZES:
            value = parse_size(key, value, bare_unit=_SIZES[key])
        elif key == "directory" and isinstance(value, str):
            value = (value,)
        values[key] = value
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0]
        raise ConfigError(f"{key}={values.get(key)!r} has the wrong type: {error}") from None
    for key, choices in _CHOICES.items():
        if getattr(config, key) not in choices:
            raise ConfigError(f"{key}={getattr(config, key)!r}; accepted: {', '.join(choices)}")
    for key in _POSITIVE:
        if not 0 < getattr(config, key) < float("inf"):
            raise ConfigError(f"{key}={getattr(config, key)!r}; accepted: a positive number of seconds")
    for key in _NOT_NEGATIVE:
        if not 0 <= getattr(config, key) < float("inf"):
            raise ConfigError(f"{key}={getattr(config, key)!r}; accepted: a number of seconds, 0 or more")
    for key, low in _PORTS.items():
        if not low <= getattr(config, key) < 65536:
            raise ConfigError(f"{key}={getattr(config, key)!r}; accepted: a port number from {low} to 65535")
    for endpoint in config.directory:
        if not re.fullmatch(r"tcp://[^/]+:\d+", endpoint):
            raise ConfigError(f"directory={endpoint!r} is not an endpoint; accepted: text like 'tcp://host:14579'")
    for key in ("max_local_cpu_size", "slab_size"):
        if getattr(config, key) < _SMALLEST:
            raise ConfigError(f"{key}={getattr(config, key)!r} bytes; accepted: {_SMALLEST} bytes or more")
    for key, longest in _LENGTHS.items():
        if len(getattr(config, key).encode()) > longest:
            raise ConfigError(f"{key}={getattr(config, key)!r}; accepted: at most {longest} bytes")
    if config.node_group and not config.node_socket:
        raise ConfigError(
            f"node_group={config.node_group!r} without node_socket; accepted: both, since the abstract socket that "
            "stands for an empty node_socket belongs to one user"
        )
    if config.node_timeout_s <= config.heartbeat_s:
        raise ConfigError(
            f"node_timeout_s={config.node_timeout_s!r}; accepted: more than heartbeat_s ({config.heartbeat_s!r})"
        )
    return config


def as_settings(config: Config) -> dict[str, Any]:
    """What an operator would have written: the settings that differ from the defaults, such that `make_config` of them
    gives `config` again."""
    default = Config()
    values = {key: value for key, value in msgspec.structs.asdict(config).items() if value != getattr(default, key)}
    return {key: f"{value}B" if key in _SIZES else value for key, value in values.items()}
