"""Snapshots on their way from a directory to its replicas.

Owns the queue of requests and the few snapshots being sent. Must never let a replica that does not read hold up
another, nor keep more than a few lists of what there is, nor pause for longer than it takes to make one: about 20 ms
for a million entries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from ec_p2p.control.codec import encode
from ec_p2p.control.messages import SnapshotChunk, SnapshotNode
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
    began: float
    """`time.perf_counter()`."""


class Snapshots:
    """Sends on `router`, which must report full queues and unknown routes (ROUTER_MANDATORY). One thread's."""

    def __init__(self, router: Socket, epoch: bytes) -> None:
        self._router = router
        self._epoch = epoch
        self._waiting: dict[bytes, int] = {}
        self._outgoing: dict[bytes, _Outgoing] = {}
        counted = ("snapshots", "snapshots_sent", "snapshots_given_up", "snapshot_bytes")
        self.counters = dict.fromkeys(counted, 0)
        self.seconds = 0.0
        """What those that were sent in full took, from the first chunk to the last."""

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._waiting or self._outgoing)

    @property
    def to_be_cut(self) -> bool:
        """Whether `send` will start one."""
        return bool(self._waiting) and len(self._outgoing) < _AT_ONCE

    def ask(self, route: bytes, token: int) -> None:
        """Queue a request; it takes the place of an earlier one by the same route. One too many is given up at once:
        replicas ask again."""
        self._outgoing.pop(route, None)
        if route in self._waiting or len(self._waiting) < _WAITING:
            self._waiting[route] = token
        else:
            self.counters["snapshots_given_up"] += 1

    def send(self, state: DirectoryState, seq: int, now: float) -> float:
        """Move every snapshot on. What starts now is valid at `seq`. Seconds until it is worth trying again."""
        nodes: list[SnapshotNode] = []
        while self._waiting and len(self._outgoing) < _AT_ONCE:
            began = time.perf_counter()
            nodes = nodes or state.snapshot()
            route = next(iter(self._waiting))
            frames = self._frames(self._waiting.pop(route), nodes, seq)
            self._outgoing[route] = _Outgoing(frames, next(frames), now, began)
            self.counters["snapshots"] += 1
        moved = False
        for route, outgoing in list(self._outgoing.items()):
            if self._send_some(route, outgoing):
                outgoing.moved = now
                moved = True
            if outgoing.frame is None:
                del self._outgoing[route]
            elif now - outgoing.moved > _STALLED_S:
                del self._outgoing[route]
                self.counters["snapshots_given_up"] += 1
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
            self.counters["snapshot_bytes"] += len(outgoing.frame)
            outgoing.frame = next(outgoing.frames, None)
            moved = True
            if outgoing.frame is None:
                self.counters["snapshots_sent"] += 1
                self.seconds += time.perf_counter() - outgoing.began
        return moved

    def _frames(self, token: int, nodes: list[SnapshotNode], seq: int) -> Iterator[bytes]:
        parts = enumerate(chunks(_one_by_one(nodes)))
        index, part = next(parts)
        for following, more in parts:
            yield encode(SnapshotChunk(token, index, self._epoch, seq, False, part))
            index, part = following, more
        yield encode(SnapshotChunk(token, index, self._epoch, seq, True, part))


def _one_by_one(nodes: list[SnapshotNode]) -> Iterator[SnapshotNode]:
    """So that a node's list is freed once it has been sent, not all of them at once in the end."""
    nodes = nodes[::-1]
    while nodes:
        yield nodes.pop()
