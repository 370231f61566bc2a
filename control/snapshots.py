"""Snapshots on their way from a directory to its replicas.

Owns the queue of requests and the few snapshots being sent. Must never let a replica that does not read hold up
another, nor keep more than a few copies of the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from ec_p2p.control.codec import encode
from ec_p2p.control.messages import SnapshotChunk
from ec_p2p.control.sockets import Socket
from ec_p2p.control.state import DirectoryState, chunks

_AT_ONCE = 4
_WAITING = 10_000
_CHUNKS_PER_TURN = 4
_STALLED_S = 2.0
_FULL_QUEUE_RETRY_S = 0.005


@dataclass(slots=True)
class _Outgoing:
    """`frame` is the next to send; None when all are sent, or there is nobody to send it to."""

    frames: Iterator[bytes]
    frame: bytes | None
    moved: float


class Snapshots:
    """Sends on `router`, which must report full queues and unknown routes (ROUTER_MANDATORY). One thread's."""

    def __init__(self, router: Socket, epoch: bytes) -> None:
        self._router = router
        self._epoch = epoch
        self._waiting: dict[bytes, int] = {}
        self._outgoing: dict[bytes, _Outgoing] = {}
        self.started = 0

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._waiting or self._outgoing)

    def ask(self, route: bytes, token: int) -> None:
        """Queue a request; it takes the place of an earlier one by the same route."""
        self._outgoing.pop(route, None)
        if route in self._waiting or len(self._waiting) < _WAITING:
            self._waiting[route] = token

    def send(self, state: DirectoryState, seq: int, now: float) -> float:
        """Move every snapshot on. What starts now is valid at `seq`. Seconds until it is worth trying again."""
        while self._waiting and len(self._outgoing) < _AT_ONCE:
            route = next(iter(self._waiting))
            frames = self._frames(self._waiting.pop(route), state, seq)
            self._outgoing[route] = _Outgoing(frames, next(frames), now)
            self.started += 1
        moved = False
        for route, outgoing in list(self._outgoing.items()):
            if self._send_some(route, outgoing):
                outgoing.moved = now
                moved = True
            if outgoing.frame is None or now - outgoing.moved > _STALLED_S:
                del self._outgoing[route]
        return 0.0 if moved else _FULL_QUEUE_RETRY_S

    def _send_some(self, route: bytes, outgoing: _Outgoing) -> bool:
        moved = False
        for _ in range(_CHUNKS_PER_TURN):
            if outgoing.frame is None:
                break
            try:
                self._router.send_multipart((route, outgoing.frame), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    outgoing.frame = None
                elif error.errno != zmq.EAGAIN:
                    raise
                break
            outgoing.frame = next(outgoing.frames, None)
            moved = True
        return moved

    def _frames(self, token: int, state: DirectoryState, seq: int) -> Iterator[bytes]:
        parts = list(chunks(state.snapshot()))
        for index, part in enumerate(parts):
            yield encode(SnapshotChunk(token, index, self._epoch, seq, index == len(parts) - 1, part))
