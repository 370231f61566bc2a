"""What a directory tells all replicas: numbered messages of events, and its heartbeats.

Owns the XPUB socket's options, the sequence number, the events that are not published yet, and when they will be. Must
never wait for a subscriber, keep more than a few messages for one, or lose one without counting it.

To publish costs something for every subscriber. So that many nodes that say little do not make it a lot, what is to be
published is gathered for twice as long as the publication before it takes to be sent to all; with few subscribers that
is no time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import zmq

from ec_p2p.control.codec import encode
from ec_p2p.control.messages import PROTOCOL_VERSION, TOPIC, Changed, Event, Events, NodeDown, NodeUp
from ec_p2p.control.sockets import Socket, receive_now, send_now

log = logging.getLogger(__name__)

_PUBLISH_BYTES = 256 << 10
_SUBSCRIPTIONS_PER_TURN = 256
# About twice what a message, and each byte of it, take to be sent to one subscriber: half a core publishes, at most.
_S_PER_MESSAGE = 20e-6
_S_PER_BYTE = 2e-9
_LONGEST_GATHER_S = 0.1
_SUBSCRIBED, _UNSUBSCRIBED = b"\1" + TOPIC, b"\0" + TOPIC


class Publications:
    """Call `tick` after each turn of the loop, and again when `next_event` has come. One thread's. `now` is seconds of
    any clock that never goes back."""

    def __init__(self, socket: Socket, epoch: bytes, heartbeat_s: float) -> None:
        self.seq = 0
        """Number of the last message with events in it."""
        self.subscribers = 0
        self.counters = dict.fromkeys(("publishes", "slow_subscribers"), 0)
        self._socket = socket
        self._epoch = epoch
        self._heartbeat_s = heartbeat_s
        self._events: list[Event] = []
        self._nbytes = 0
        self._next_publication = self._next_heartbeat = float("-inf")
        # Every subscription is told of, and its end: new subscribers get the current number at once.
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        # It says when a subscriber's queue is full.
        socket.setsockopt(zmq.XPUB_NODROP, 1)

    def hear(self) -> None:
        """Read what subscribers said, a bounded amount."""
        for _ in range(_SUBSCRIPTIONS_PER_TURN):
            frames = receive_now(self._socket)
            if frames is None:
                break
            if frames[0] == _SUBSCRIBED:
                self.subscribers += 1
                self._next_heartbeat = float("-inf")
            elif frames[0] == _UNSUBSCRIBED:
                self.subscribers = max(0, self.subscribers - 1)

    def add(self, events: Iterable[Event]) -> None:
        """To be published soon."""
        for event in events:
            self._events.append(event)
            self._nbytes += _size(event)

    def next_event(self) -> float:
        """When `tick` has something to do, if nothing is added before."""
        return min(self._next_publication, self._next_heartbeat) if self._events else self._next_heartbeat

    def tick(self, now: float, *, at_once: bool) -> None:
        """Publish what is due; with `at_once`, all there is."""
        if self._events and (at_once or now >= self._next_publication or self._nbytes >= _PUBLISH_BYTES):
            self._publish(now)
        if now >= self._next_heartbeat:
            self._send([], now)

    def _publish(self, now: float) -> None:
        batch: list[Event] = []
        room = _PUBLISH_BYTES
        cost_s = 0.0
        for event in self._events:
            if isinstance(event, NodeUp):
                log.info("node %r at %r is up", event.node.name, event.node.address)
            elif isinstance(event, NodeDown):
                log.info("node incarnation %s is gone", event.incarnation.hex())
            batch.append(event)
            room -= _size(event)
            if room <= 0:
                cost_s += self._send(batch, now)
                batch, room = [], _PUBLISH_BYTES
        if batch:
            cost_s += self._send(batch, now)
        self._events = []
        self._nbytes = 0
        self._next_publication = now + min(cost_s * self.subscribers, _LONGEST_GATHER_S)

    def _send(self, events: list[Event], now: float) -> float:
        """Seconds that others should wait for it, for each subscriber."""
        self.seq += bool(events)
        self.counters["publishes"] += 1
        payload = encode(Events(self._epoch, events, PROTOCOL_VERSION))
        frames = (TOPIC, self.seq.to_bytes(8, "big"), payload)
        if not send_now(self._socket, *frames):
            # A subscriber whose queue is full misses the message, sees the gap, and asks for a snapshot.
            self.counters["slow_subscribers"] += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._next_heartbeat = now + self._heartbeat_s
        return _S_PER_MESSAGE + _S_PER_BYTE * len(payload)


def _size(event: Event) -> int:
    """Bytes of an event on the wire, never less than the truth."""
    if isinstance(event, Changed):
        return 64 + 160 * len(event.adverts) + 36 * len(event.withdrawn) + 1400 * len(event.instances or ())
    return 2200 if isinstance(event, NodeUp) else 64
