"""The node's side of the control plane: announcing to every directory, replicating every directory, hosting one if
nobody does.

Owns the links and the embedded directory. Directories are equal and
independent; a node that reaches one of them sees what that one sees.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from ec_p2p.config import Config
from ec_p2p.control.directories import announce_to
from ec_p2p.control.directory import Directory
from ec_p2p.control.directory_figures import source_of
from ec_p2p.control.exposition import Source
from ec_p2p.control.interface import Announces, Pollable
from ec_p2p.control.messages import Advert, InstanceInfo, NodeInfo
from ec_p2p.control.security import Security
from ec_p2p.control.view import View
from ec_p2p.wire.notation import without_password

logger = logging.getLogger(__name__)

_TRY_TO_HOST_S = 1.0
_FAREWELL_S = 2.0
_LOOK_AGAIN_S = 0.002


class DirectoryLinks:
    """Loop-driven like the rest of the node: `poll_targets`, `on_ready`, `tick`, `flush`.

    `on_change(identity)`, `on_up(info)` and `on_down(incarnation)` are called from `on_ready` and `tick`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        info: NodeInfo,
        bind_host: str,
        on_change: Callable[[bytes], None],
        on_up: Callable[[NodeInfo], None],
        on_down: Callable[[bytes], None],
        *,
        security: Security | None = None,
    ) -> None:
        self._context = context
        self._security = security
        self._config = config
        self._info = info
        self._bind_host = bind_host
        self._announcers: list[Announces] = [
            announce_to(
                context,
                endpoint,
                info,
                heartbeat_s=config.heartbeat_s,
                timeout_s=config.node_timeout_s,
                security=security,
            )
            for endpoint in config.directories
        ]
        self._view = View(
            context,
            config.directories,
            on_change=on_change,
            on_node=lambda node, up: on_up(node) if up else on_down(node.incarnation),
            node_timeout_s=config.node_timeout_s,
            security=security,
        )
        self._owner: dict[Pollable, Announces] = {
            socket: announcer for announcer in self._announcers for socket in announcer.sockets
        }
        self._embedded: Directory | None = None
        self._hosted_figures: Source | None = None
        self._try_at = 0.0
        self._unreached_since: float | None = None
        self._complained = False
        self._pending = True
        self._due = 0.0
        self._host_if_nobody_does(0.0)

    @property
    def connected(self) -> int:
        """How many directories answer."""
        return sum(announcer.connected for announcer in self._announcers)

    @property
    def hosted_figures(self) -> list[Source]:
        """Of the directory that is hosted here, if one is. From any thread."""
        figures = self._hosted_figures
        return [figures] if figures else []

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        return self._view.lookup(identity)

    def store(self, advert: Advert) -> None:
        for announcer in self._announcers:
            announcer.store(advert)
        self._pending = True

    def withdraw(self, identity: bytes) -> None:
        for announcer in self._announcers:
            announcer.withdraw(identity)
        self._pending = True

    def describe(self, instances: list[InstanceInfo]) -> None:
        """These instances are attached to this node, from now on."""
        for announcer in self._announcers:
            announcer.describe(instances)
        self._pending = True

    def flush(self, now: float) -> None:
        """Send what was stored or withdrawn since the last flush."""
        if self._pending:
            self._pending = False
            self.tick(now)

    def next_tick(self, now: float) -> float:
        return now if self._pending else self._due

    def tick(self, now: float) -> None:
        waits = [announcer.tick(now) for announcer in self._announcers]
        self._due = now + min(*waits, self._view.tick(now))
        self._host_if_nobody_does(now)
        self._complain(now)

    def poll_targets(self) -> list[Pollable]:
        return [*self._owner, *self._view.sockets]

    def on_ready(self, target: Pollable) -> None:
        announcer = self._owner.get(target)
        if announcer is not None:
            announcer.on_readable()
        else:
            self._view.on_readable(target)
        # A welcome may be followed by everything this node holds, and a gap wants a snapshot now: not at the next tick.
        self._pending = True

    def close(self) -> None:
        for announcer in self._announcers:
            announcer.goodbye()
        for announcer in self._announcers:
            announcer.close()
        self._view.close()
        if self._embedded is not None:
            # Who is left hears of the end of this node from nobody else.
            until = time.monotonic() + _FAREWELL_S
            while self._embedded.knows(self._info.incarnation) and time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)
            self._embedded.close()
            self._embedded = None

    def _complain(self, now: float) -> None:
        """Once, when no directory has answered for a while: such a node shares with nobody, and looks healthy."""
        if self.connected:
            self._unreached_since = None
        elif self._unreached_since is None:
            self._unreached_since = now
        elif not self._complained and now - self._unreached_since > self._config.node_timeout_s:
            self._complained = True
            endpoints = ", ".join(map(without_password, self._config.directories))
            keys = " (nor would one with other keys, or that does not allow ours)" if self._security else ""
            logger.warning("no directory answers at %s%s: nothing is shared with others", endpoints, keys)

    # -------------------------------------------------------- hosting

    def _host_if_nobody_does(self, now: float) -> None:
        """Only the default directory is ever embedded: who lists directories runs them."""
        if self._embedded is not None and not self._embedded.running:
            logger.error("the embedded directory has ended; looking for another host of it")
            self._embedded.close()
            self._embedded = self._hosted_figures = None
        if self._embedded is not None or self._config.directory or not self._config.embedded_directory:
            return
        if now < self._try_at or self.connected:
            return
        self._try_at = now + _TRY_TO_HOST_S
        bind = f"tcp://{self._config.ec_ip}:{self._config.ec_port}"
        try:
            self._embedded = Directory(
                bind,
                pub_port=self._config.directory_pub_port or self._config.ec_port + 1,
                node_timeout_s=self._config.node_timeout_s,
                heartbeat_s=self._config.heartbeat_s,
                security=self._security,
            )
        except (OSError, zmq.ZMQError) as error:
            logger.debug(
                "not hosting the directory at %s: %s", bind, error
            )  # another node does, or another host is meant
            return
        self._embedded.start()
        self._hosted_figures = source_of(self._embedded)
        logger.info("hosting the directory at %s", bind)
