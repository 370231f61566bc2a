"""Where a host's node is found: the names of its sockets.

Owns the naming rule, nothing else. By default everything is in Linux's abstract socket namespace, so no file can be
left behind by a process that was killed. `node_socket` moves it to the file system, for containers that share a
folder but no network namespace.
"""

from __future__ import annotations

import hashlib
import os

from ec_p2p.config import Config

MAX_SUN_PATH = 107


def attach_address(config: Config) -> str:
    """Address of the Unix socket on which clients attach; also the lock that keeps a second node of this name away."""
    if config.node_socket:
        return config.node_socket
    return _abstract(f"ec-p2p/{os.getuid()}/{config.name}")


def spawn_lock_address(config: Config) -> str:
    """Abstract address held by the one client that is starting the node."""
    return _abstract(f"ec-p2p/{os.getuid()}/{config.name}{config.node_socket}/spawn")


def _abstract(name: str) -> str:
    """Abstract names have a limit; what is too long is replaced by its digest, never cut: two names must stay two."""
    if len(name.encode()) > MAX_SUN_PATH - 1:
        name = "ec-p2p/" + hashlib.sha256(name.encode()).hexdigest()
    return "\0" + name
