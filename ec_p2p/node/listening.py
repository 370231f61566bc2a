"""The Unix socket on which clients attach, and with it the node's name.

Owns the listener, and of a `node_socket` its file and the lock beside it. It must never remove a file that is another
node's. An abstract socket is its own lock, and nothing is left of it. A file is left behind by a node that was killed,
and two that start then could each take it for the other's remains: so whoever binds, or unlinks, holds a lock on
`<node_socket>.lock`, which the kernel takes back from the dead. That file stays: were it removed, two could hold it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat

from ec_p2p.config import Config, ConfigError
from ec_p2p.node.address import attach_address

_BACKLOG = 128


class AlreadyRunning(Exception):
    """A node of this name is alive on this host."""


class Listening:
    """From construction to `close`. Raises AlreadyRunning when the name is taken, OSError when it cannot be had,
    ConfigError for a group that there is not. `group`: the number of `node_group`, where that is set."""

    def __init__(self, config: Config) -> None:
        self.group = _group_id(config.node_group) if config.node_group else None
        self._path = config.node_socket
        with contextlib.ExitStack() as resources:
            if self._path:
                resources.callback(os.close, _lock(self._path))
                _remove_remains(self._path)
            self.socket = resources.enter_context(_listen(attach_address(config)))
            if self._path:
                self._open_to_group()
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Give up the name."""
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self._resources.close()

    def _open_to_group(self) -> None:
        """The kernel lets connect to a socket file whoever may write to it."""
        if self.group is not None:
            os.chown(self._path, -1, self.group)
        os.chmod(self._path, 0o600 if self.group is None else 0o660)


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AlreadyRunning(f"a node already listens on {address!r}") from None
        raise OSError(error.errno, f"cannot listen on {address!r}: {error.strerror}") from None
    return listener


def _lock(path: str) -> int:
    """The descriptor whose life is the lock's."""
    name = f"{path}.lock"
    with contextlib.ExitStack() as resources:
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            resources.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"a node already listens on {path!r}") from None
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {path!r}: {name!r}: {error.strerror}") from None
        resources.pop_all()
    return lock


def _remove_remains(path: str) -> None:
    """A socket file whose owner was killed refuses connections; so does any file that is no socket, which stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError(errno.EEXIST, f"cannot listen on {path!r}: a file is there that is no socket") from None
            os.unlink(path)
        except OSError:
            pass  # there is none; or what can be said of it is said when it is to be bound


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"node_group={name!r}: this host has no such group") from None
