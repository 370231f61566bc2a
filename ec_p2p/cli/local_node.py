"""The figures of this host's node, asked for over its Unix socket.

Owns the socket. It must never start a node, nor keep the arena of one: the descriptor that an attachment brings is
closed at once. Never waits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ec_p2p.config import Config
from ec_p2p.control.codec import BadFrame, encode
from ec_p2p.node.address import attach_address
from ec_p2p.node.link import Link, hail, hear_answer
from ec_p2p.node.messages import CLIENT_PROTOCOL_VERSION, Attach, Inspect, Inspection

_TOOL = Attach(CLIENT_PROTOCOL_VERSION, "tool", "top", -1)


class LocalNode:
    """Call `ask` now and then; `latest` is what the node has answered last. None: there is no node here, or not yet an
    answer."""

    def __init__(self, config: Config) -> None:
        self._address = attach_address(config)
        self._hailed: socket.socket | None = None
        self._link: Link | None = None
        self._token = 0
        self.latest: Inspection | None = None

    def ask(self, now: float) -> None:
        """Take in what came, ask again. `now` is `time.monotonic()`."""
        try:
            if self._link is None:
                self._attach(now)
            if self._link is not None:
                self._listen(self._link)
                self._token += 1
                if not self._link.send(encode(Inspect(self._token))):
                    raise ConnectionResetError("the node does not take messages")
        except (OSError, BadFrame):
            self.close()

    def close(self) -> None:
        self.latest = None
        for opened in (self._hailed, self._link):
            if opened is not None:
                opened.close()
        self._hailed = self._link = None

    def _attach(self, now: float) -> None:
        if self._hailed is None:
            self._hailed = hail(self._address, _TOOL)
        answer = hear_answer(self._hailed)
        if answer is not None:
            attached, arena = answer
            os.close(arena)
            self._link, self._hailed = Link(self._hailed, attached, now), None

    def _listen(self, link: Link) -> None:
        if not link.alive():
            raise ConnectionResetError("the node is gone")
        while heard := link.receive():
            for message in heard:
                if isinstance(message, Inspection):
                    self.latest = message


def fetch_figures(counters: Mapping[str, float]) -> dict[str, float]:
    """Of an inspection's counters: READs that landed, READs that did not, payload bytes that landed."""
    figures = dict.fromkeys(("landed", "failed", "bytes"), 0.0)
    for name, value in counters.items():
        family, _, labels = name.partition("{")
        if family == "fetches":
            figures["landed" if labels.startswith("outcome=landed") else "failed"] += value
        elif family == "fetched_bytes":
            figures["bytes"] += value
    return figures
