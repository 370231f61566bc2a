"""Which vLLM instances a node serves, out of who is attached to it.

Pure. Must never make what the control plane's messages do not take: a directory would drop the whole announcement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from ec_p2p.control.messages import MAX_INSTANCES, InstanceInfo
from ec_p2p.node.messages import Attach

logger = logging.getLogger(__name__)

_UNKNOWN = "unknown"
"""The role of an instance whose clients do not tell it."""


def instances_of(attached: Iterable[Attach]) -> list[InstanceInfo]:
    """The instances, by name. Any client of an instance may tell its role, and its namespace; tools are of none."""
    roles: dict[str, str] = {}
    namespaces: dict[str, str] = {}
    for hello in attached:
        if hello.kind != "tool":
            roles[hello.instance] = roles.get(hello.instance) or hello.role
            namespaces[hello.instance] = namespaces.get(hello.instance) or hello.namespace
    known = [_sayable(InstanceInfo(name, roles[name] or _UNKNOWN, namespaces[name])) for name in sorted(roles)]
    return [info for info in known if info is not None][:MAX_INSTANCES]


def _sayable(info: InstanceInfo) -> InstanceInfo | None:
    """Without its namespace where that is too long to be told: half of one would be another. None: not even so."""
    for candidate in (info, InstanceInfo(info.name, info.role, "")):
        try:
            return msgspec.convert(msgspec.to_builtins(candidate), InstanceInfo)
        except msgspec.ValidationError as error:
            logger.debug("instance %.64r cannot be told in full: %s", info.name, error)
    return None
