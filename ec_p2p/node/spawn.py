"""Starting the host's node when there is none.

Owns the command line of a spawned node and the lock that keeps several clients from starting several. The node
outlives whoever starts it: it is reparented at once, so that vLLM's way of stopping (kill the whole process tree)
does not reach it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import BinaryIO

from ec_p2p.config import Config, as_settings
from ec_p2p.config_kinds import KeyRing
from ec_p2p.node.address import spawn_lock_address

logger = logging.getLogger(__name__)

_STDIN = "/dev/stdin"
_locks: set[socket.socket] = set()
"""That this process holds. A fork without exec has them too, and would keep them for all its life."""


def _drop_locks() -> None:
    while _locks:
        _locks.pop().close()


os.register_at_fork(after_in_child=_drop_locks)


def node_command(config: Config) -> list[str]:
    """How a node with exactly this configuration is started by hand, apart from `--spawned`.

    Everybody on the host can read a command line: keys that are not in a file go through `keys_for` instead.
    """
    settings = as_settings(config)
    if isinstance(config.security, KeyRing):
        settings["security"] = _STDIN
    return [
        sys.executable,
        "-P",  # what lies in the starter's working directory is none of the node's modules
        "-m",
        "ec_p2p.cli",
        "node",
        "--name",
        config.name,
        "--settings",
        json.dumps(settings),
        "--exactly",
    ]


def keys_for(config: Config) -> BinaryIO:
    """What such a node needs as its standard input: the keys, where they are not in a file. To be closed."""
    if not isinstance(config.security, KeyRing):
        return open(os.devnull, "rb")
    file = os.fdopen(os.memfd_create("ec-p2p-keys", os.MFD_CLOEXEC), "wb")
    os.fchmod(file.fileno(), 0o600)
    file.write(json.dumps(dataclasses.asdict(config.security)).encode())
    file.flush()
    return file


class Spawning:
    """One attempt to start the node, and the lock on it. Close it once the node answers or the attempt is given up."""

    def __init__(self, lock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._lock = lock
        self._process = process

    @classmethod
    def begin(cls, config: Config) -> Spawning | None:
        """Start the node, detached. None if another client is doing so right now, or the command cannot run."""
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            lock.bind(spawn_lock_address(config))
        except OSError:
            lock.close()
            return None
        _locks.add(lock)
        try:
            with keys_for(config) as keys:
                process = subprocess.Popen(
                    [*node_command(config), "--spawned"],
                    stdin=keys,
                    # Its own once it has detached; until then, and for its refusals, what the starter has.
                    stdout=subprocess.DEVNULL,
                    # NIXL imports numpy, whose threads would spin while they start; the node computes nothing.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
        except OSError as error:
            logger.warning("cannot start the host's node: %s", error)
            _unlock(lock)
            return None
        return cls(lock, process)

    def failed(self) -> bool:
        """True if the launcher ended with an error. (It always ends soon: the node itself is detached from it.)"""
        return self._process.poll() not in (None, 0)

    def close(self) -> None:
        """Let others try, and have the launcher reaped. Never waits: a scheduler may be in the middle of a step."""
        _unlock(self._lock)
        if self._process.poll() is None:
            threading.Thread(target=_reap, args=(self._process,), name="ec-p2p-reaper", daemon=True).start()


def _unlock(lock: socket.socket) -> None:
    _locks.discard(lock)
    lock.close()


def _reap(launcher: subprocess.Popen[bytes]) -> None:
    """It detaches within a fraction of a second, unless its imports hang."""
    try:
        launcher.wait(timeout=10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
