"""What UCX may use, as the environment and ucx_tls have it, judged by what UCX itself says of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.cli.doctor.loopback import Attempt
from ec_p2p.cli.doctor.ports import bind_host
from ec_p2p.config import Config
from ec_p2p.node.network import is_loopback
from ec_p2p.transport import chosen_kind

_SHARED_MEMORY = {"sm", "shm", "mm", "posix", "sysv", "cma", "xpmem", "knem"}
_WITHIN_A_HOST = _SHARED_MEMORY | {"self", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_ipc"}
"""UCX's transports that reach no other host."""
_UNAVAILABLE = re.compile(r"^UCX: transports? (.*) (?:is|are) not available")
_SAYS = "UCX: "


class Allowed(NamedTuple):
    """UCX_TLS as the node's process will have it."""

    setting: str
    """What the operator calls it."""
    names: frozenset[str]
    all_but: bool
    """`names` are those that UCX may not use."""

    def may_use(self, name: str) -> bool:
        return name not in self.names if self.all_but else bool(self.names & {name, "all"})


def allowed(config: Config, environment: Mapping[str, str] = os.environ) -> Allowed:
    text = config.ucx_tls or environment.get("UCX_TLS", "all")
    names = frozenset(name.strip() for name in text.lstrip("^").split(","))
    return Allowed("ucx_tls" if config.ucx_tls else "UCX_TLS", names, text.startswith("^"))


def is_used(config: Config) -> bool:
    return chosen_kind(config.transport) == "nixl" and config.nixl_backend.startswith("UCX")


def settings(config: Config, attempt: Attempt, environment: Mapping[str, str] = os.environ) -> Finding:
    """UCX is configured by its environment, of which ucx_tls replaces UCX_TLS. Some settings break what the node
    relies on."""
    if not is_used(config):
        return ok("ucx", "not asked for, with this transport and nixl_backend")
    shown = _shown(config, environment)
    if environment.get("UCX_KEEPALIVE_INTERVAL", "inf") != "inf":
        mend = "unset UCX_KEEPALIVE_INTERVAL: with keepalives a READ from a stopped process never ends"
        return problem("ucx", shown, mend)
    complaints = [word.removeprefix(_SAYS) for word in attempt.words if word.startswith(_SAYS)]
    says = f"{shown}. UCX says: {'; '.join(complaints)}" if complaints else shown
    may = allowed(config, environment)
    missing = _missing(attempt) & may.names
    if not may.all_but and _ends_with_the_host(may.names - missing, config):
        mend = f"add tcp, or rc where there is RDMA, to {may.setting}: without one that it has, UCX does not hear of "
        return problem("ucx", says, f"{mend}dead peers, and NIXL does not start")
    if attempt.error and complaints:
        return problem("ucx", says, f"let {may.setting} and UCX_NET_DEVICES name what UCX has here, or unset them")
    if missing:
        mend = (
            f"take {', '.join(sorted(missing))} out of {may.setting}, or look why UCX has none (device, driver, build)"
        )
        return note("ucx", says, mend)
    if not may.all_but and not may.names & {"all", *_SHARED_MEMORY}:
        mend = f"add sm to {may.setting}: without it READs on one host go through the network stack"
        return note("ucx", says, mend)
    return note("ucx", says) if complaints else ok("ucx", says)


def _ends_with_the_host(names: frozenset[str], config: Config) -> bool:
    return names <= _WITHIN_A_HOST and config.nixl_params.get("ucx_error_handling_mode") != "none"


def _missing(attempt: Attempt) -> set[str]:
    """Names of transports that UCX says it has not."""
    found = (_UNAVAILABLE.match(word) for word in attempt.words)
    return {name.strip("'") for match in found if match for name in match[1].split(",")}


def _shown(config: Config, environment: Mapping[str, str]) -> str:
    found = {name: value for name, value in environment.items() if name.startswith("UCX_")}
    if config.ucx_tls:
        found["UCX_TLS"] = config.ucx_tls
    shown = [f"{name}={value}" for name, value in sorted(found.items())]
    if "UCX_NET_DEVICES" not in found and is_loopback(bind_host(config)):
        shown.append("UCX_NET_DEVICES=lo (set by the node, as it binds to a loopback address: bind_host, ec_ip)")
    return ", ".join(shown) or "nothing set"
