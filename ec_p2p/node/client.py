"""A process's connection to its host's node.

Owns the link to the node and the mapped arenas. It must never block longer than it was told to, and never
raise for anything that the node or the machine does: a client without a node goes on without sharing, and attaches to
the next one. Used by one thread at a time; it has none of its own, so an idle client costs nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ec_p2p.config import Config
from ec_p2p.control.codec import BadFrame, encode
from ec_p2p.engine.arena import Arena
from ec_p2p.node import figures
from ec_p2p.node.address import attach_address
from ec_p2p.node.link import Link, hail, hear_answer
from ec_p2p.node.messages import (
    CLIENT_PROTOCOL_VERSION,
    Attach,
    Attached,
    CloseWindow,
    Commit,
    Dispatched,
    Encoding,
    Forget,
    FromNode,
    Release,
    SaveSkipped,
    ToNode,
    Want,
    WantItem,
)
from ec_p2p.node.spawn import Spawning

logger = logging.getLogger(__name__)

_ENDING = (Forget, Dispatched, Release, Commit, SaveSkipped, CloseWindow)
"""Lost, these would pin memory, or be waited for."""
_ANSWER_TIMEOUT_S = 2.0
_FIRST_RETRY_S = 0.25
_MAX_RETRY_S = 30.0
_QUIET_S = 2.0
"""A node that is just coming up is not worth a warning."""
_SPAWN_TIMEOUT_S = 30.0
_SPAWN_POLL_S = 0.02
_STABLE_S = 10.0
"""A node that ends sooner than this after attaching is not asked again at once: it might end each time."""
OLD_ARENA_S = 60.0
"""What a node that is gone has promised from its arena can be loaded for so long after attaching to the next."""


class Detached(NamedTuple):
    """The node is gone: every want, lease and window of that incarnation is void. What was promised from its arena
    can still be loaded."""

    incarnation: bytes


class NodeClient:
    """One client of the host's node. See DESIGN's words: a scheduler wants, a worker saves and loads, a tool looks."""

    def __init__(
        self,
        config: Config,
        kind: Literal["scheduler", "worker", "lander", "tool"],
        instance: str,
        rank: int = -1,
        *,
        role: str = "",
        namespace: str = "",
    ) -> None:
        """`role` and `namespace` are for people who look at the fleet: see Attach."""
        self.config = config
        self._hello = Attach(CLIENT_PROTOCOL_VERSION, kind, instance, rank, role, namespace)
        self._link: Link | None = None
        self._arenas: dict[bytes, Arena] = {}
        self._hailed: socket.socket | None = None
        """Connected, and waiting for the node's answer."""
        self._answer_until = 0.0
        self._drop_old_arena_at = 0.0
        self._spawning: Spawning | None = None
        self._spawn_until = 0.0
        self._retry_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._warned = False
        self._failing_since = 0.0
        self._ids = itertools.count(1)
        self._lost: list[Detached] = []
        self._closed = False

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def incarnation(self) -> bytes:
        return self._link.attached.incarnation if self._link else b""

    @property
    def node_name(self) -> str:
        return self._link.attached.node_name if self._link else self.config.name

    @property
    def attached(self) -> Attached | None:
        return self._link.attached if self._link else None

    def arena(self, incarnation: bytes) -> Arena | None:
        """The mapped arena of a node this client is, or was lately, attached to."""
        return self._arenas.get(incarnation)

    # -------------------------------------------------------- attaching

    def attach(self, timeout_s: float = 0.0) -> bool:
        """True if attached. Otherwise tries to be: connects, starts the node if configured, waits at most `timeout_s`.

        Cheap while attached, and between tries: call it at the head of every hook."""
        if self._closed:
            return False
        deadline = time.monotonic() + timeout_s
        while not self._check():
            now = time.monotonic()
            self._advance(now)
            if self._link is not None:
                break
            if now >= deadline:
                return False
            # Sleeping is right here: only start-up waits, for a process that takes a second to come up.
            time.sleep(min(0.01, max(0.0, deadline - now)))
        return True

    def _check(self) -> bool:
        if self._link is None:
            return False
        if self._link.alive():
            if len(self._arenas) > 1 and time.monotonic() >= self._drop_old_arena_at:
                self._drop_arenas(1)
            return True
        self._detach(time.monotonic())
        return False

    def _detach(self, now: float) -> None:
        assert self._link is not None
        logger.warning("the node %s is gone: going on without sharing until another is there", self.node_name)
        self._lost.append(Detached(self._link.attached.incarnation))
        if now - self._link.since >= _STABLE_S:
            self._retry_s = _FIRST_RETRY_S
        self._retry_at = 0.0 if now - self._link.since >= _STABLE_S else self._back_off(now)
        self._link.close()
        self._link = None

    def _back_off(self, now: float) -> float:
        delay, self._retry_s = self._retry_s, min(2 * self._retry_s, _MAX_RETRY_S)
        return now + delay

    def _advance(self, now: float) -> None:
        """One step towards being attached: say hello, or look for the answer. Blocks nowhere."""
        if self._hailed is None and now < self._retry_at:
            return
        try:
            if self._hailed is None:
                self._hailed = hail(attach_address(self.config), self._hello)
                self._answer_until = now + _ANSWER_TIMEOUT_S
            answer = hear_answer(self._hailed)
            if answer is not None:
                self._adopt(self._hailed, *answer, now)
            elif now >= self._answer_until:
                raise TimeoutError("the node does not answer")
        except (OSError, BadFrame, ValueError) as error:
            if self._hailed is not None:
                self._hailed.close()
                self._hailed = None
            self._not_attached(now, error)

    def _adopt(self, sock: socket.socket, answer: Attached, fd: int, now: float) -> None:
        try:
            # The others read nothing from it, and a mapping would keep the memory of a dead node.
            arena = None
            if self._hello.kind in ("worker", "tool"):
                arena = Arena.attach(fd, answer.arena_bytes, answer.slab_bytes)
        finally:
            os.close(fd)
        self._link = Link(sock, answer, now)
        self._hailed = None
        if arena is not None:
            self._keep(answer.incarnation, arena, now)
        self._stop_spawning()
        self._warned = False
        self._failing_since = 0.0
        logger.info(
            "attached to node %s (incarnation %s, %s)",
            answer.node_name,
            answer.incarnation.hex()[:8],
            figures.where(answer.metrics_port),
        )

    def _not_attached(self, now: float, error: Exception) -> None:
        self._failing_since = self._failing_since or now
        if self._spawning is not None:
            if now < self._spawn_until and not self._spawning.failed():
                self._retry_at = now + _SPAWN_POLL_S
                return
            self._stop_spawning()
            logger.warning("the node %s did not come up", self.config.name)
        elif self.config.spawn_node and isinstance(error, ConnectionRefusedError | FileNotFoundError):
            self._spawning = Spawning.begin(self.config)
            self._spawn_until = now + _SPAWN_TIMEOUT_S
            if self._spawning is not None:
                self._retry_at = now + _SPAWN_POLL_S
                return
            # Another client holds the lock: the node is on its way all the same.
        if not self._warned and now - self._failing_since >= _QUIET_S:
            self._warned = True
            logger.warning("not attached to node %s, so nothing is shared for now: %s", self.config.name, error)
        self._retry_at = self._back_off(now)

    def _stop_spawning(self) -> None:
        if self._spawning is not None:
            self._spawning.close()
            self._spawning = None

    def _keep(self, incarnation: bytes, arena: Arena, now: float) -> None:
        """The new arena, and, in a worker, the one before it: what was promised from it can still be loaded."""
        self._arenas[incarnation] = arena
        self._drop_arenas(1 if self._hello.kind == "tool" else 2)
        self._drop_old_arena_at = now + OLD_ARENA_S

    def _drop_arenas(self, keep: int) -> None:
        while len(self._arenas) > keep:
            self._arenas.pop(next(iter(self._arenas))).close()

    # -------------------------------------------------------- talking

    def want(
        self,
        items: Sequence[WantItem],
        *,
        readers: int,
        wait_s: float,
        expect_s: float,
        local_only: bool = False,
        landing: str = "host",
    ) -> int:
        """Ask for entries; the answers come from `poll`. Returns the want's id, or 0 if there is no node."""
        want = next(self._ids)
        message = Want(want, list(items), readers, round(wait_s * 1000), round(expect_s * 1000), local_only, landing)
        return want if self.send(message) else 0

    def forget(self, want: int) -> None:
        self.send(Forget(want))

    def dispatched(self, lease: int) -> None:
        self.send(Dispatched(lease))

    def release(self, lease: int, reader: int = -1) -> None:
        self.send(Release(lease, reader))

    def encoding(self, identities: Sequence[bytes]) -> None:
        self.send(Encoding(list(identities)))

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, message: ToNode) -> bool:
        """False if there is no node, or it does not take messages."""
        if self._link is None:
            return False
        send = self._link.send_in_any_case if isinstance(message, _ENDING) else self._link.send
        if not send(encode(message)):
            logger.debug("the node %s does not take messages", self.node_name)
            return False
        return True

    def poll(self, timeout_s: float = 0.0) -> list[FromNode | Detached]:
        """Everything that has arrived, after waiting at most `timeout_s` for the first."""
        found: list[FromNode | Detached] = []
        if self._link is not None:
            self._link.flush()
            self._receive(found)
            if not found and timeout_s > 0:
                self._link.wait(timeout_s)
                self._receive(found)
            if not found:
                self._check()
        if self._lost:
            found.extend(self._lost)
            self._lost.clear()
        return found

    def _receive(self, found: list[FromNode | Detached]) -> None:
        assert self._link is not None
        while True:
            try:
                heard = self._link.receive()
            except BadFrame as error:
                logger.warning("a message of the node could not be read: %s", error.reason)
                continue
            if not heard:
                return
            found.extend(heard)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_spawning()
        if self._hailed is not None:
            self._hailed.close()
            self._hailed = None
        if self._link is not None:
            self._link.close()
            self._link = None
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
