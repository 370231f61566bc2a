"""The directory server: hears nodes on a ROUTER socket, tells replicas on a PUB socket.

Owns its two sockets, its epoch and its sequence numbers, all used by the one thread that is in `run`. Must never
block on a peer, queue without bound for one, or end because of what one sent. Everything it knows is soft: nodes say
it again to the next life.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import zmq

from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    TOPIC,
    Changed,
    Event,
    Events,
    Heartbeat,
    Hello,
    HelloAgain,
    NodeUp,
    Refused,
    SnapshotChunk,
    SnapshotRequest,
    ToDirectory,
    Welcome,
)
from ec_p2p.control.sockets import Context, bound_port, open_socket, receive_now, send_now, split_endpoint
from ec_p2p.control.state import DirectoryState, chunks

log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 256
_PUBLISH_BYTES = 256 << 10
_ROUTER_HWM = 100
_LONGEST_SUBSCRIPTION = 256
_SNAPSHOTS_AT_ONCE = 4
_SNAPSHOTS_WAITING = 10_000
_CHUNKS_PER_TURN = 4
_SNAPSHOT_STALLED_S = 2.0
_FULL_QUEUE_RETRY_S = 0.005


@dataclass(slots=True)
class _Outgoing:
    """One snapshot on its way to one replica. `frame` is the next to send; None when all are sent."""

    frames: Iterator[bytes]
    frame: bytes | None
    moved: float


class Directory:
    """Listens from construction on; `run` (or `start`, in a thread) serves until `stop` or `close`.

    `bind` is a TCP endpoint; port 0 or '*' takes any free port, and so does `pub_port` 0. Raises ValueError for another
    kind of endpoint and zmq.ZMQError (EADDRINUSE, EADDRNOTAVAIL) when it cannot listen; nothing stays open then.
    `stop` and `stats` may be called from any thread, `stop` also from a signal handler.
    """

    def __init__(
        self,
        bind: str = "tcp://0.0.0.0:14579",
        pub_port: int = 0,
        *,
        node_timeout_s: float = 4.0,
        heartbeat_s: float = 1.0,
        context: Context | None = None,
    ) -> None:
        host, port = split_endpoint(bind)
        self.epoch = os.urandom(16)
        self._heartbeat_s = heartbeat_s
        self._expiry_s = node_timeout_s / 8
        self._state = DirectoryState(node_timeout_s)
        self._seq = 0
        self._events: list[Event] = []
        self._next_expiry = self._next_heartbeat = 0.0
        self._waiting: dict[bytes, int] = {}
        self._outgoing: dict[bytes, _Outgoing] = {}
        self._counters = dict.fromkeys(("bad_frames", "refused", "unsent", "publishes", "snapshots"), 0)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._context: Context = context or zmq.Context()
        self._owns_context = context is None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._router = open_socket(self._context, zmq.ROUTER, bind, send_hwm=_ROUTER_HWM, receive_hwm=_ROUTER_HWM)
        # Without it a full queue loses frames silently, in the middle of a snapshot too.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # An XPUB also tells of new subscribers: they get the current sequence number at once.
        # What comes in there are subscriptions. ZMQ keeps one as a chain of a link per byte and frees it by recursion:
        # a stranger's long one would overflow the stack.
        self._pub = open_socket(self._context, zmq.XPUB, bind, max_frame=_LONGEST_SUBSCRIPTION)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            self._router.bind(f"{host}:{'*' if port == '0' else port}")
            self._pub.bind(f"{host}:{pub_port or '*'}")
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = f"{host}:{bound_port(self._router)}"
        self.pub_port = bound_port(self._pub)
        self._welcome = encode(Welcome(PROTOCOL_VERSION, self.epoch, self.pub_port))

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Serve in a daemon thread of its own."""
        self._thread = threading.Thread(target=self.run, name="ec-p2p-directory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopping = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop, wait for the thread of `start`, close the sockets. After a direct `run`: only once it has returned."""
        if self._wake < 0:
            return
        self.stop()
        if self._thread:
            self._thread.join()
        self._router.close()
        self._pub.close()
        os.close(self._wake)
        self._wake = -1
        if self._owns_context:
            self._context.term()

    @property
    def running(self) -> bool:
        """Whether the thread of `start` is alive."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        """Counters since construction, and gauges: `nodes`, `entries`, `seq`."""
        state = self._state
        return {
            **self._counters,
            "adverts": state.adverts,
            "withdrawals": state.withdrawals,
            "nodes": len(state),
            "entries": state.entries,
            "seq": self._seq,
        }

    def run(self) -> None:
        """Serve until `stop`."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        wait_s = 0.0
        while not self._stopping:
            ready = dict(poller.poll(math.ceil(max(0.0, wait_s) * 1000)))
            now = time.monotonic()
            if self._router in ready:
                self._receive(now)
            if self._pub in ready:
                self._greet_subscribers()
            if now >= self._next_expiry:
                self._next_expiry = now + self._expiry_s
                self._events += self._state.expire(now)
            if self._events:
                self._publish(now)
            if now >= self._next_heartbeat:
                self._send_events([], now)
            wait_s = min(self._next_expiry, self._next_heartbeat) - now
            if self._waiting or self._outgoing:
                wait_s = min(wait_s, self._send_snapshots(now))

    # -------------------------------------------------------- ROUTER

    def _receive(self, now: float) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            frames = receive_now(self._router)
            if frames is None:
                return
            route = frames[0]
            try:
                if len(frames) != 2:
                    raise BadFrame(f"{len(frames) - 1} frames in one message, accepted: 1")
                message = decode(frames[1], ToDirectory)
            except BadFrame as error:
                self._counters["bad_frames"] += 1
                log.debug("dropped a frame from %s: %r", route.hex(), error.reason)
                continue
            self._handle(route, message, now)

    def _handle(self, route: bytes, message: ToDirectory, now: float) -> None:
        if isinstance(message, Hello | SnapshotRequest) and message.version != PROTOCOL_VERSION:
            self._counters["refused"] += 1
            reason = f"protocol version {message.version} is not spoken here, accepted: {PROTOCOL_VERSION}"
            self._reply(route, encode(Refused(reason)))
            return
        if isinstance(message, SnapshotRequest):
            self._reply(route, self._welcome)
            self._outgoing.pop(route, None)
            if len(self._waiting) < _SNAPSHOTS_WAITING:
                self._waiting[route] = message.token
            return
        events = self._state.apply(message, route, now)
        if events is None:
            self._reply(route, encode(HelloAgain(self.epoch)))
            return
        self._events += events
        if isinstance(message, Hello | Heartbeat):
            self._reply(route, self._welcome)

    def _reply(self, route: bytes, frame: bytes) -> None:
        if not send_now(self._router, route, frame):
            self._counters["unsent"] += 1

    def _send_snapshots(self, now: float) -> float:
        """Move every snapshot on; seconds until it is worth trying again."""
        while self._waiting and len(self._outgoing) < _SNAPSHOTS_AT_ONCE:
            route = next(iter(self._waiting))
            frames = self._snapshot_frames(self._waiting.pop(route))
            self._outgoing[route] = _Outgoing(frames, next(frames), now)
            self._counters["snapshots"] += 1
        moved = False
        for route, outgoing in list(self._outgoing.items()):
            try:
                for _ in range(_CHUNKS_PER_TURN):
                    if outgoing.frame is None:
                        break
                    self._router.send_multipart((route, outgoing.frame), zmq.NOBLOCK)
                    outgoing.frame = next(outgoing.frames, None)
                    outgoing.moved = now
                    moved = True
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                outgoing.frame = None
            if outgoing.frame is None or now - outgoing.moved > _SNAPSHOT_STALLED_S:
                del self._outgoing[route]
        return 0.0 if moved else _FULL_QUEUE_RETRY_S

    def _snapshot_frames(self, token: int) -> Iterator[bytes]:
        seq = self._seq
        parts = list(chunks(self._state.snapshot()))
        for index, part in enumerate(parts):
            yield encode(SnapshotChunk(token, index, self.epoch, seq, index == len(parts) - 1, part))

    # -------------------------------------------------------- PUB

    def _greet_subscribers(self) -> None:
        while receive_now(self._pub) is not None:
            self._next_heartbeat = 0.0

    def _publish(self, now: float) -> None:
        batch: list[Event] = []
        room = _PUBLISH_BYTES
        for event in self._events:
            batch.append(event)
            room -= _size(event)
            if room <= 0:
                self._seq += 1
                self._send_events(batch, now)
                batch, room = [], _PUBLISH_BYTES
        if batch:
            self._seq += 1
            self._send_events(batch, now)
        self._events = []

    def _send_events(self, events: list[Event], now: float) -> None:
        self._counters["publishes"] += 1
        # A subscriber whose queue is full misses the message, sees the gap, and asks for a snapshot.
        self._pub.send_multipart((TOPIC, self._seq.to_bytes(8, "big"), encode(Events(self.epoch, events))))
        self._next_heartbeat = now + self._heartbeat_s


def _size(event: Event) -> int:
    """Bytes of an event on the wire, never less than the truth."""
    if isinstance(event, Changed):
        return 64 + 128 * len(event.adverts) + 36 * len(event.withdrawn)
    return 2200 if isinstance(event, NodeUp) else 64
