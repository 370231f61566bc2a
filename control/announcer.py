"""One node's side towards one directory, over a socket: what it holds is said there, and said again whenever that may
be needed.

Owns a DEALER socket; what goes over it is `announcing`'s. Must never block or spin. The directory may be absent,
restart empty, or lose anything.
"""

from __future__ import annotations

import logging
import time

import zmq

from ec_p2p.control.announcing import Announcing
from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import Advert, FromDirectory, InstanceInfo, NodeInfo
from ec_p2p.control.security import Security, secure_client
from ec_p2p.control.sockets import Context, Socket, open_socket, receive_now, send_now, split_endpoint
from ec_p2p.wire.dialling import Line

log = logging.getLogger(__name__)

_MESSAGES_PER_TICK = 4
_MESSAGES_PER_TURN = 256
# What waits in a queue is said late, and a heartbeat waits behind it. Here a later change takes an earlier one's place.
_HWM = 8
_LINGER_MS = 500
_RETRY_FIRST_S = 0.01
_RETRY_LAST_S = 0.25


class Announcer:
    """Driven by the loop of the thread that made it: poll `sockets` for input and then call `on_readable`; call `tick`
    after every turn, and again no later than it says. Times are `time.monotonic()`.

    `store`, `withdraw` and `describe` only note the change; the next `tick` sends it. Raises ValueError for an endpoint
    that is not TCP.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        node: NodeInfo,
        *,
        heartbeat_s: float = 1.0,
        timeout_s: float = 4.0,
        security: Security | None = None,
    ) -> None:
        split_endpoint(endpoint)
        self.endpoint = endpoint
        self._announcing = Announcing(endpoint, node, heartbeat_s, timeout_s)
        self._heartbeat_s = heartbeat_s
        self._bad_frames = 0
        self._retry_s = _RETRY_FIRST_S
        self.socket = open_socket(context, zmq.DEALER, endpoint, send_hwm=_HWM, linger_ms=_LINGER_MS)
        secure_client(self.socket, security, security.directory if security else b"")
        self._line = Line(self.socket, endpoint)

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """The same one for the announcer's whole life."""
        return (self.socket,)

    @property
    def refused(self) -> str:
        """Why the directory will not talk to this node; empty while it does."""
        return self._announcing.refused

    @property
    def counters(self) -> dict[str, int]:
        return {**self._announcing.counters, "bad_frames": self._bad_frames}

    @property
    def connected(self) -> bool:
        """The directory knows this node and was heard from recently."""
        return self._announcing.connected(time.monotonic())

    @property
    def pending(self) -> int:
        """Changes not yet handed to the socket; everything, while not welcomed."""
        return self._announcing.pending

    def store(self, advert: Advert) -> None:
        """This node holds the entry, from now on, as described."""
        self._announcing.store(advert)

    def withdraw(self, identity: bytes) -> None:
        """This node does not hold the entry any more. Unknown identities are ignored."""
        self._announcing.withdraw(identity)

    def describe(self, instances: list[InstanceInfo]) -> None:
        """These instances are attached to this node, from now on."""
        self._announcing.describe(instances)

    def goodbye(self) -> None:
        """Leave: everything of this node goes from the directory, and nothing more is sent."""
        message = self._announcing.leave()
        if message:
            send_now(self.socket, encode(message))

    def close(self) -> None:
        """Close the socket; what was sent may still leave for half a second."""
        self.socket.close()

    def on_readable(self) -> None:
        """Handle what the directory sent, a bounded number of messages."""
        for _ in range(_MESSAGES_PER_TURN):
            frames = receive_now(self.socket)
            if frames is None:
                return
            try:
                if len(frames) != 1:
                    raise BadFrame(f"{len(frames)} frames in one message, accepted: 1")
                message: FromDirectory = decode(frames[0], FromDirectory)
            except BadFrame as error:
                self._bad_frames += 1
                log.debug("dropped a frame from %s: %r", self.endpoint, error.reason)
                continue
            self._announcing.take(message, time.monotonic())

    def tick(self, now: float) -> float:
        """Send what is due. Returns the seconds until the next call is wanted; 0.0 when there is more to send."""
        announcing = self._announcing
        announcing.tick(now)
        for _ in range(_MESSAGES_PER_TICK):
            if now < announcing.next_event():
                break
            # Asked first, so that no batch is made for nothing.
            writable = bool(self.socket.poll(0, zmq.POLLOUT))
            self._line.look(now, writable)
            if not writable:
                return self._blocked()
            message = announcing.next_message(now)
            if message is None or not send_now(self.socket, encode(message)):
                return self._blocked()
            announcing.sent(message, now)
            self._retry_s = _RETRY_FIRST_S
        return min(max(0.0, announcing.next_event() - now), self._heartbeat_s)

    def _blocked(self) -> float:
        """The socket takes nothing (not connected, or the directory does not read): delay before trying again."""
        delay, self._retry_s = self._retry_s, min(2 * self._retry_s, _RETRY_LAST_S)
        return delay
