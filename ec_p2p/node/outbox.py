"""What the node says to one client: all of one turn of its loop in one datagram, or a few.

Owns the messages that have not left yet. A datagram wakes its reader, and costs more than a message does to make: a
want of sixteen items that land together is answered with one. It must never wait for the client, nor keep more for it
than UNSENT messages. An inspection that is too long for a datagram loses what is too much, and says so; what else is
too long is lost, and the log says so.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections import deque

from ec_p2p.control.codec import encode
from ec_p2p.node.inspection import shortened
from ec_p2p.node.link import MAX_FRAME
from ec_p2p.node.messages import FromNode, Inspection, PeerCard, Several

logger = logging.getLogger(__name__)

UNSENT = 10_000
"""More messages for a client that does not read are lost."""
TOGETHER = 64
"""Messages in one datagram at most. One that may be long has one of its own."""
_LONG = (Inspection, PeerCard)


class Outbox:
    """Of the client `who`, for the log, at the other end of `sock`. Used by the node's loop only."""

    __slots__ = ("_complained_of", "_frame", "_messages", "_said", "_sock", "_who")

    def __init__(self, sock: socket.socket, who: str) -> None:
        self._sock = sock
        self._who = who
        self._messages: deque[FromNode] = deque()
        self._frame: bytes | None = None
        """One that the socket had no room for."""
        self._said: FromNode | Several | None = None
        """What is in it."""
        self._complained_of: set[type] = set()

    def __bool__(self) -> bool:
        """Whether `flush` has something to do."""
        return self._frame is not None or bool(self._messages)

    def add(self, message: FromNode) -> None:
        """To be said with the next `flush`."""
        if len(self._messages) >= UNSENT:
            logger.warning("%s does not read its messages; one is lost", self._who)
            return
        self._messages.append(message)

    def flush(self) -> None:
        """Say it, as far as the socket takes it; the rest stays."""
        while self:
            if self._frame is None:
                self._said = self._next()
                frame = encode(self._said)
                if len(frame) > MAX_FRAME:
                    self._too_long(len(frame))
                    continue
                self._frame = frame
            try:
                self._sock.send(self._frame)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    self._too_long(len(self._frame))
                else:  # gone, which the loop hears by itself
                    logger.debug("a message to %s is not sent: %s", self._who, error)
            self._frame = self._said = None

    def _too_long(self, nbytes: int) -> None:
        """What was to be said cannot be: say less, where that can be done. Logged once for each kind of message."""
        said = self._said
        if type(said) not in self._complained_of:
            self._complained_of.add(type(said))
            logger.warning(
                "%s of %d bytes is too long for one datagram to %s (at most %d, and see net.core.wmem_max)",
                type(said).__name__,
                nbytes,
                self._who,
                MAX_FRAME,
            )
        shorter = shortened(said) if isinstance(said, Inspection) else None
        if shorter is not None:
            self._messages.appendleft(shorter)

    def _next(self) -> FromNode | Several:
        first = self._messages.popleft()
        if isinstance(first, _LONG):
            return first
        together: list[FromNode] = [first]
        while self._messages and len(together) < TOGETHER and not isinstance(self._messages[0], _LONG):
            together.append(self._messages.popleft())
        return Several(together) if len(together) > 1 else first
