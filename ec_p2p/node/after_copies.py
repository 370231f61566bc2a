"""What a worker may tell the node only after its copies into the arena.

Owns the order of commits and of windows that are given back. It must never let a message leave before the copies that
were made before it are over: the node would share bytes that are not there yet, or hand out memory that a device still
writes to.

    held, with the mark of its copy -> that mark, and all before it, have passed -> sent
    held -> the node that it was meant for is gone -> dropped
"""

from __future__ import annotations

import logging
import time
from collections import deque

from ec_p2p.node.client import NodeClient
from ec_p2p.node.device import Mark
from ec_p2p.node.messages import CloseWindow, Commit, SaveSkipped

logger = logging.getLogger(__name__)

MOST_HELD = 256
"""Messages. Each stands for a copy that the device is behind with: who has more to copy waits for it."""
_POLL_S = 0.001


class AfterCopies:
    """Not thread-safe: belongs to whoever the client belongs to. Where marks have always passed, nothing is held."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client
        self._held: deque[tuple[Mark, Commit | CloseWindow]] = deque()

    @property
    def oldest(self) -> Mark | None:
        """What `settle` waits for. None: nothing is held."""
        return self._held[0][0] if self._held else None

    def make_room(self) -> None:
        """Before a copy: wait for the oldest one if too many are under way."""
        if len(self._held) >= MOST_HELD:
            try:
                self._held[0][0].wait()
            except RuntimeError:
                pass  # `settle` tells
            self.settle()

    def send(self, mark: Mark, message: Commit | CloseWindow) -> None:
        """Send the message as soon as the mark, and those of all messages before, have passed: at once if they have,
        else with a later `settle`. Never waits."""
        self._held.append((mark, message))
        self.settle()

    def settle(self) -> None:
        """Send what can be sent. Never waits."""
        while self._held:
            mark, message = self._held[0]
            try:
                if not mark.passed():
                    return
            except RuntimeError as error:
                logger.warning("a device failed to copy an encoder output into the arena: %s", error)
                self._held.popleft()
                if isinstance(message, Commit):
                    self._client.send(SaveSkipped("error", message.identity))
                continue
            self._held.popleft()
            self._client.send(message)

    def finish(self, timeout_s: float) -> bool:
        """Wait until nothing is held. False: a device is not done after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.settle()
        while self._held:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
            self.settle()
        return True

    def drop(self) -> None:
        """The windows of these messages are no more. Their copies go on, into the arena of a node that is gone."""
        self._held.clear()
