"""The one typed configuration of a node and of its clients.

Owns names, defaults, kinds and the check of every value; an unknown name or a bad value is an error that names the key,
the value and what is accepted. Where the values come from (a file, the environment, vLLM, a command line) is the
business of config_sources.
"""

from __future__ import annotations

import dataclasses
import difflib
import socket
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

import msgspec

from ec_p2p.config_kinds import (
    GIB,
    KIB,
    Endpoints,
    Folder,
    KeyRing,
    Keys,
    Kind,
    Name,
    Parameters,
    Port,
    Seconds,
    Size,
    Switch,
    Text,
    Word,
    shown,
)

_LONGEST_HOST = 243
"""Bytes of an address that peers dial: with 'tcp://' and a port it is at most 255, which is what directories take."""


class ConfigError(ValueError):
    """A setting is unknown or has a value that cannot be used."""

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names
        """The settings that contradict each other, if that is what is wrong."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, with its kind and its default. Sizes are bytes, times are seconds."""

    # the host's node
    node_name: Annotated[str, Text(longest=200)] = ""
    """Name of the node this process belongs to. Empty: the host name. Several names on one host make several nodes."""
    node_socket: Annotated[str, Text(longest=100)] = ""
    """Path of the node's Unix socket, for containers that share a folder but no network namespace. Empty: an abstract
    socket named after the user and `node_name`."""
    node_group: Annotated[str, Text()] = ""
    """Members of this Unix group may attach, besides the node's own user and root. Needs `node_socket`."""
    spawn_node: Annotated[bool, Switch()] = True
    """Start the host's node when there is none."""
    grace_s: Annotated[float, Seconds(or_zero=True)] = 60.0
    """A spawned node leaves this long after its last client."""
    metrics_port: Annotated[int, Port(least=-1)] = 0
    """Port of the node's /metrics. 0: any free port of the loopback, told to the clients; -1: none."""
    metrics_host: Annotated[str, Text()] = "127.0.0.1"
    log_file: Annotated[str, Text()] = ""
    """Where a spawned node writes its log, anew at each start. Empty: a file named after the user and the node in the
    folder for temporary files."""
    log_level: Annotated[str, Word(("DEBUG", "INFO", "WARNING", "ERROR"))] = "INFO"

    # the engine
    local_cpu: Annotated[bool, Switch()] = True
    """The first tier is always on; here because LMCache has a setting of this name."""
    max_local_cpu_size: Annotated[int, Size(bare_unit=GIB, least=64 * KIB)] = GIB
    slab_size: Annotated[int, Size(least=64 * KIB)] = 256 << 20
    """The arena grows, and is registered for RDMA, in steps of this size; no entry can be larger."""
    cache_policy: Annotated[str, Word(("LRU", "GDSF"))] = "LRU"
    """Which entry a full tier gives up first: 'LRU', or 'GDSF', which weighs use against size."""
    local_disk: Annotated[str, Folder()] = ""
    """Folder of the disk tier, which other nodes may share. Empty: none."""
    max_local_disk_size: Annotated[int, Size(bare_unit=GIB)] = 64 * GIB
    """Bytes of files that the folder may hold, those of other nodes included."""
    disk_queue_size: Annotated[int, Size()] = 256 << 20
    """Bytes that may wait to be written; what is stored while the queue is full stays in memory only."""
    disk_fsync: Annotated[bool, Switch()] = False
    """Flush each file to the device before it counts. Without it, a power cut may cost entries, never their truth."""

    # the data plane
    transport: Annotated[str, Word(("auto", "nixl", "zmq"))] = "auto"
    """'nixl', 'zmq', or 'auto': NIXL where it can be imported."""
    nixl_backend: Annotated[str, Name()] = "UCX"
    """The plugin of NIXL that moves the bytes."""
    nixl_params: Annotated[dict[str, str], Parameters()] = {}
    """What this plugin is given, such as {'num_workers': '2'}."""
    ucx_tls: Annotated[str, Text()] = ""
    """What UCX may use, such as 'rc,cuda,sm': the node's UCX_TLS. Empty: what the environment says, or UCX's choice."""
    landing: Annotated[str, Word(("host", "device"))] = "host"
    """Where fetched entries land: in the node's arena, from which workers copy, or, with NIXL, in the memory of each
    worker's device."""
    landing_size: Annotated[int, Size(least=64 * KIB)] = 256 << 20
    """Memory of each worker's device for entries between landing there and being used; with `landing: device` only."""
    fetch_policy: Annotated[str, Word(("always", "cheaper", "never"))] = "always"
    """For entries that the instance could encode itself. 'cheaper': fetch what takes less time than encoding has taken
    on this host, as far as both were measured."""
    fetch_timeout_s: Annotated[float, Seconds()] = 5.0
    """A request waits this long for its entries, then encodes locally or fails alone."""
    read_timeout_s: Annotated[float, Seconds()] = 2.0
    """One READ from one holder may take this long; then the next holder is tried."""
    expect_s: Annotated[float, Seconds(or_zero=True)] = 1.0
    """An entry that a hint promises, or that someone is encoding, is waited for this long before it is advertised."""
    inline_wait_s: Annotated[float, Seconds(or_zero=True)] = 0.003
    """The scheduler may wait this long inside one step for entries that are about to land."""
    share_fetched: Annotated[bool, Switch()] = True
    """Advertise fetched entries too, so that popular ones have several holders."""

    # the control plane
    directory: Annotated[tuple[str, ...], Endpoints()] = ()
    """Endpoints of the directories. Empty: the one at ec_ip:ec_port."""
    embedded_directory: Annotated[bool, Switch()] = True
    """The node on the host `ec_ip` hosts the directory when nobody else does."""
    directory_pub_port: Annotated[int, Port()] = 0
    """PUB port of an embedded directory. 0: ec_port + 1."""
    bind_host: Annotated[str, Text()] = ""
    """Address the node's sockets bind to. Empty: the loopback if `advertise_host` is a loopback address, else all."""
    advertise_host: Annotated[str, Text(_LONGEST_HOST)] = ""
    """Address that peers dial. Empty: the address from which this host reaches the (first) directory."""
    peer_port: Annotated[int, Port()] = 0
    """Port on which peers ask for the card. 0: any free port."""
    heartbeat_s: Annotated[float, Seconds()] = 1.0
    node_timeout_s: Annotated[float, Seconds()] = 4.0

    # between hosts
    security: Annotated[str | KeyRing, Keys()] = ""
    """Keys of this node, or the path of a file with them: what has others stays outside. Empty: anybody may connect."""
    require_encryption: Annotated[bool, Switch()] = False
    """Refuse to start without `security`."""

    # the connector
    namespace: Annotated[str, Text()] = ""
    """Overrides the computed namespace; change it when weights are replaced in place."""
    window_size: Annotated[int, Size()] = 64 << 20
    """Stretch of the arena that a worker holds for its next saves."""

    # from vLLM
    ec_ip: Annotated[str, Text()] = "127.0.0.1"
    ec_port: Annotated[int, Port(least=1)] = 14579

    @property
    def directories(self) -> tuple[str, ...]:
        return self.directory or (f"tcp://{self.ec_ip}:{self.ec_port}",)

    @property
    def name(self) -> str:
        return self.node_name or socket.gethostname()


MOST_SLABS = 2048
"""Each is registered by itself, and takes 50 bytes or more, by each rail of the network, of a card of at most 1 MiB."""

DEFAULTS = Config()
KINDS: dict[str, Kind] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Config, include_extras=True).items()
}


def make_config(settings: Mapping[str, Any]) -> Config:
    """Check `settings` (plain names, as in `ec_connector_extra_config`) and fill in the defaults.

    Raises ConfigError naming the key, the value and what is accepted.
    """
    values = {}
    for name, value in settings.items():
        if name not in KINDS:
            raise unknown_setting(name, value)
        values[name] = check_value(name, value)
    return combine(values)


def combine(values: Mapping[str, Any]) -> Config:
    """A configuration out of values from `check_value`. Raises ConfigError if they contradict each other."""
    config = Config(**{**values, "local_cpu": True})  # on, whatever is asked for
    if config.node_group and not config.node_socket:
        raise ConfigError(
            f"node_group={config.node_group!r} without node_socket; accepted: both, since the abstract socket that "
            "stands for an empty node_socket belongs to one user",
            ("node_group", "node_socket"),
        )
    if config.node_timeout_s <= config.heartbeat_s:
        raise ConfigError(
            f"node_timeout_s={config.node_timeout_s!r}; accepted: more than heartbeat_s ({config.heartbeat_s!r})",
            ("node_timeout_s", "heartbeat_s"),
        )
    if config.max_local_cpu_size > MOST_SLABS * config.slab_size:
        least = -(-config.max_local_cpu_size // MOST_SLABS)
        raise ConfigError(
            f"slab_size={config.slab_size!r} with max_local_cpu_size={config.max_local_cpu_size!r}; accepted: "
            f"{least} bytes or more, so that the arena has at most {MOST_SLABS} slabs",
            ("slab_size", "max_local_cpu_size"),
        )
    if config.require_encryption and not config.security:
        raise ConfigError(
            "require_encryption=True without security; accepted: both, with keys as `ec-p2p keygen` makes them",
            ("require_encryption", "security"),
        )
    plain = [endpoint for endpoint in config.directory if endpoint.startswith(("valkey://", "redis://"))]
    if config.require_encryption and plain:
        raise ConfigError(
            f"require_encryption=True with directory={shown(plain[0])}; accepted: 'valkeys://', which is TLS",
            ("require_encryption", "directory"),
        )
    return config


def check_value(name: str, value: object) -> Any:
    """`value` as the configuration holds it. Raises ConfigError naming the key, the value and what is accepted."""
    return _check(name, value, KINDS[name])


def read_value(name: str, text: str) -> object:
    """What `text` stands for as a value of this setting, for `check_value`. Raises ConfigError if for nothing."""
    try:
        return KINDS[name].read(text)
    except ValueError:
        raise ConfigError(f"{name}={shown(text)}; accepted: {KINDS[name].accepted}") from None


def parse_size(key: str, value: object, *, bare_unit: int) -> int:
    """Bytes from a number in `bare_unit` (LMCache gives GiB) or from text such as '512MiB'."""
    nbytes: int = _check(key, value, Size(bare_unit=bare_unit))
    return nbytes


def _check(key: str, value: object, kind: Kind) -> Any:
    try:
        return kind.check(value)
    except ValueError:
        raise ConfigError(f"{key}={shown(value)}; accepted: {kind.accepted}") from None


def unknown_setting(key: str, value: object) -> ConfigError:
    return ConfigError(f"unknown setting {key!r} (value {shown(value)}); the nearest known one is {nearest(key)!r}")


def nearest(key: str) -> str:
    """The setting whose name resembles `key` most."""
    return difflib.get_close_matches(str(key).lower(), KINDS, n=1, cutoff=0.0)[0]


def as_settings(config: Config) -> dict[str, Any]:
    """What an operator would have written: the settings that differ from the defaults, such that `make_config` of them
    gives `config` again. Secrets are among them."""
    values = {name: value for name, value in msgspec.structs.asdict(config).items() if value != getattr(DEFAULTS, name)}
    return {name: _as_written(KINDS[name], value) for name, value in values.items()}


def _as_written(kind: Kind, value: Any) -> Any:
    if isinstance(kind, Size):
        return f"{value}B"
    return dataclasses.asdict(value) if isinstance(value, KeyRing) else value
