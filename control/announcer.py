"""One node's side towards one directory: what it holds is said there, and said again whenever that may be needed.

Owns a DEALER socket and the changes not yet sent. Must never block, spin, or queue more than one change per identity.
The directory may be absent, restart empty, or lose anything: the announcer starts over with a hello and everything it
holds.
"""

from __future__ import annotations

import logging
import time
from itertools import islice

import zmq

from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Advert,
    Announce,
    FromDirectory,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    InstanceInfo,
    NodeInfo,
    Refused,
    Welcome,
)
from ec_p2p.control.sockets import Context, open_socket, receive_now, send_now, split_endpoint

log = logging.getLogger(__name__)

_BATCH = 1024
_BATCHES_PER_TICK = 4
_MESSAGES_PER_TURN = 256
_HWM = 64
_LINGER_MS = 500
_RETRY_FIRST_S = 0.01
_RETRY_LAST_S = 0.25
_REFUSED_RETRY_S = 10.0


class Announcer:
    """Driven by the loop of the thread that made it: poll `socket` for input and then call `on_readable`; call `tick`
    after every turn, and again no later than it says. Times are `time.monotonic()`.

    `store` and `withdraw` only note the change; the next `tick` sends it. Raises ValueError for an endpoint that is
    not TCP.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        node: NodeInfo,
        *,
        heartbeat_s: float = 1.0,
        timeout_s: float = 4.0,
    ) -> None:
        split_endpoint(endpoint)
        self.endpoint = endpoint
        self.refused = ""
        """Why the directory will not talk to this node; empty while it does."""
        self.counters = dict.fromkeys(("hellos", "announces", "heartbeats", "bad_frames"), 0)
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._entries: dict[bytes, Advert] = {}
        self._pending: dict[bytes, Advert | None] = {}
        self._instances: list[InstanceInfo] = []
        self._instances_pending = False
        self._epoch: bytes | None = None
        self._welcomed = False
        self._left = False
        self._seq = 0
        self._heard = 0.0
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._retry_s = _RETRY_FIRST_S
        self.socket = open_socket(context, zmq.DEALER, endpoint, send_hwm=_HWM, linger_ms=_LINGER_MS)
        self.socket.connect(endpoint)

    @property
    def connected(self) -> bool:
        """The directory knows this node and was heard from recently."""
        return self._welcomed and time.monotonic() - self._heard <= self._timeout_s

    @property
    def pending(self) -> int:
        """Changes not yet handed to the socket; everything, while not welcomed."""
        return len(self._pending) if self._welcomed else len(self._entries)

    def store(self, advert: Advert) -> None:
        """This node holds the entry, from now on, as described."""
        self._entries[advert.identity] = advert
        if self._welcomed:
            self._pending[advert.identity] = advert

    def withdraw(self, identity: bytes) -> None:
        """This node does not hold the entry any more. Unknown identities are ignored."""
        if self._entries.pop(identity, None) is not None and self._welcomed:
            self._pending[identity] = None

    def describe(self, instances: list[InstanceInfo]) -> None:
        """These instances are attached to this node, from now on."""
        self._instances = instances
        self._instances_pending = self._welcomed

    def goodbye(self) -> None:
        """Leave: everything of this node goes from the directory, and nothing more is sent."""
        if self._welcomed:
            send_now(self.socket, encode(Goodbye(self._node.incarnation)))
        self._left = True
        self._welcomed = False
        self._pending.clear()

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
                message = decode(frames[0], FromDirectory)
            except BadFrame as error:
                self.counters["bad_frames"] += 1
                log.debug("dropped a frame from %s: %r", self.endpoint, error.reason)
                continue
            if not self._left:
                self._handle(message, time.monotonic())

    def tick(self, now: float) -> float:
        """Send what is due. Returns the seconds until the next call is wanted; 0.0 when there is more to send."""
        if self._left:
            return self._heartbeat_s
        if self._welcomed and now - self._heard > self._timeout_s:
            log.warning("directory %s is silent", self.endpoint)
            self._start_over(now)
        if not self._welcomed:
            return self._greet(now)
        if self._something_to_say and not self._flush():
            return self._blocked()
        if now >= self._next_heartbeat:
            if not send_now(self.socket, encode(Heartbeat(self._node.incarnation, self._seq))):
                return self._blocked()
            self.counters["heartbeats"] += 1
            self._next_heartbeat = now + self._heartbeat_s
        self._retry_s = _RETRY_FIRST_S
        return 0.0 if self._something_to_say else self._next_heartbeat - now

    @property
    def _something_to_say(self) -> bool:
        return self._instances_pending or bool(self._pending)

    def _greet(self, now: float) -> float:
        if now >= self._next_hello:
            if not send_now(self.socket, encode(Hello(PROTOCOL_VERSION, self._node))):
                return self._blocked()
            self.counters["hellos"] += 1
            self._retry_s = _RETRY_FIRST_S
            self._next_hello = now + (_REFUSED_RETRY_S if self.refused else self._heartbeat_s)
        return self._next_hello - now

    def _flush(self) -> bool:
        """Whether the socket took all it was offered."""
        for _ in range(_BATCHES_PER_TICK):
            if not self._something_to_say:
                break
            if not self.socket.poll(0, zmq.POLLOUT):
                return False
            batch = dict(islice(self._pending.items(), _BATCH))
            adverts = [advert for advert in batch.values() if advert is not None]
            withdrawn = [identity for identity, advert in batch.items() if advert is None]
            instances = self._instances if self._instances_pending else None
            announce = Announce(self._node.incarnation, self._seq + 1, adverts, withdrawn, instances)
            if not send_now(self.socket, encode(announce)):
                return False
            self._seq += 1
            self._instances_pending = False
            self.counters["announces"] += 1
            for identity in batch:
                del self._pending[identity]
        return True

    def _blocked(self) -> float:
        """The socket takes nothing (not connected, or the directory does not read): delay before trying again."""
        delay, self._retry_s = self._retry_s, min(2 * self._retry_s, _RETRY_LAST_S)
        return delay

    def _handle(self, message: FromDirectory, now: float) -> None:
        if isinstance(message, Refused) or (isinstance(message, Welcome) and message.version != PROTOCOL_VERSION):
            self._be_refused(message, now)
            return
        self._heard = now
        if isinstance(message, Welcome):
            if not self._welcomed:
                self._be_welcomed(message, now)
            elif message.epoch != self._epoch:
                self._start_over(now)
        # One in answer to what was sent before the last hello says nothing new: until the welcome they are ignored.
        elif isinstance(message, HelloAgain) and self._welcomed:
            log.info("directory %s asks for everything again", self.endpoint)
            self._start_over(now)

    def _be_welcomed(self, message: Welcome, now: float) -> None:
        log.info("directory %s knows this node; announcing %d entries", self.endpoint, len(self._entries))
        self._welcomed = True
        self.refused = ""
        self._epoch = message.epoch
        self._seq = 0
        self._pending = dict(self._entries)
        self._instances_pending = bool(self._instances)
        self._next_heartbeat = now + self._heartbeat_s

    def _be_refused(self, message: Refused | Welcome, now: float) -> None:
        reason = message.reason if isinstance(message, Refused) else f"it speaks version {message.version}"
        if reason != self.refused:
            log.error("directory %s refuses this node: %r", self.endpoint, reason)
        self.refused = reason or "no reason given"
        self._welcomed = False
        self._pending.clear()
        self._next_hello = now + _REFUSED_RETRY_S

    def _start_over(self, now: float) -> None:
        self._welcomed = False
        self._pending.clear()
        self._next_hello = now
