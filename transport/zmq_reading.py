"""READs in flight from one peer, over ZMQ frames.

Owns the DEALER to the peer, its monitor, and the chunks that the peer still owes. It must never write into landing
memory for a reading that has ended, and never raise because of what the peer sent.

A reading is cut into chunks, asked for one by one, at most WINDOW of them at a time: a reader that is slow, or gone,
leaves no more than that behind in the holder. Readings take turns, so that a small one does not wait for a large one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgpack
import zmq
from zmq.utils.monitor import parse_monitor_message

from ec_p2p.transport.interface import Span, State
from ec_p2p.wire.curve import Security, secure_client
from ec_p2p.wire.dead_peers import end_dead_connections
from ec_p2p.wire.dialling import Line

PROTOCOL_VERSION = 1
CHUNK_BYTES = 512 << 10
WINDOW = 8
"""Chunks that a peer may owe at any time."""
_TURN = 8
"""Frames taken from a peer before somebody else gets a turn."""
_HANDSHAKE_MS = 2_000
"""Who takes longer to say who he is, on either side, is hung up on."""

_LOST = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Context = zmq.Context[zmq.Socket[bytes]]

_tickets = itertools.count(1)


def set_options(socket: zmq.Socket[bytes], hwm: int, max_frame: int) -> None:
    """Before bind or connect: libzmq ignores most options afterwards."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = hwm
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    end_dead_connections(socket)


def receive(socket: zmq.Socket[bytes], most: int) -> list[zmq.Frame] | None:
    """The next message, cut off after `most` + 1 frames; None where there is none."""
    try:
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) > most:
                frames.pop()
            frames.append(frame)
    except zmq.Again:
        return None
    return frames


class ZmqReading:
    """See `Reading`."""

    __slots__ = ("_peer", "chunks", "error", "owed", "peer", "state")

    def __init__(self, peer: Peer, chunks: deque[Span]) -> None:
        self.peer = peer.name
        self.error = ""
        self.state = State.POSTED
        self.chunks = chunks
        """Not asked for yet."""
        self.owed = 0
        """Asked for, not arrived yet."""
        self._peer = peer

    @property
    def unposted(self) -> int:
        return 0  # the bytes come when they come

    def poll(self) -> State:
        if self.state is State.POSTED:
            self._peer.progress()
        return self.state

    def release(self) -> bool:
        if self.state is State.POSTED:
            self.fail("released")
        return True

    def fail(self, why: str) -> None:
        if self.state is State.POSTED:
            self.state = State.FAILED
            self.error = f"READ from {self.peer}: {why}"
            self.chunks.clear()


def cut(spans: Sequence[Span]) -> deque[Span]:
    return deque(
        Span(remote + done, local + done, min(CHUNK_BYTES, nbytes - done))
        for remote, local, nbytes in spans
        for done in range(0, nbytes, CHUNK_BYTES)
    )


class Peer:
    """One peer and its connection, which libzmq makes anew by itself after it was lost."""

    def __init__(
        self,
        context: Context,
        name: str,
        endpoint: str,
        security: Security | None,
        key: bytes,
        landing: memoryview,
        on_bad_frame: Callable[[], None],
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.key = key
        self.registered = 0
        self.lost = ""
        """Why there is no connection; empty while there is one, or the first is being made."""
        self._landing = landing
        self._on_bad_frame = on_bad_frame
        self._owed: dict[int, tuple[ZmqReading, Span]] = {}
        self._turns: deque[ZmqReading] = deque()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        set_options(self.socket, 4 * WINDOW, CHUNK_BYTES)
        secure_client(self.socket, security, key)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._line = Line(self.socket, endpoint)
        except zmq.ZMQError:
            self.close("it was never dialled")
            raise

    def post(self, reading: ZmqReading) -> None:
        self._turns.append(reading)
        self._ask()

    def progress(self) -> None:
        for _ in range(_TURN):
            frames = receive(self.socket, 2)
            if frames is None:
                break
            self._take(frames)
        self._watch()
        self._ask()

    def look(self, now: float) -> None:
        """Dial anew if there has been no connection for long."""
        self._line.look(now, up=not self.lost)

    def close(self, why: str) -> None:
        self._fail_all(why)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _ask(self) -> None:
        while self._turns and len(self._owed) < WINDOW:
            reading = self._turns.popleft()
            if not reading.chunks:
                continue  # it has failed meanwhile
            chunk, ticket = reading.chunks[0], next(_tickets)
            request = msgpack.packb([PROTOCOL_VERSION, self.name, ticket, chunk.remote, chunk.nbytes])
            try:
                self.socket.send(request, zmq.NOBLOCK)
            except zmq.Again:
                self._turns.appendleft(reading)
                return
            reading.chunks.popleft()
            reading.owed += 1
            self._owed[ticket] = reading, chunk
            if reading.chunks:
                self._turns.append(reading)

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            header = msgpack.unpackb(frames[0].buffer, max_array_len=2, max_map_len=0, max_ext_len=0)
        except Exception:  # whatever the decoder makes of hostile bytes
            header = None
        match header:
            case [int(ticket)] if len(frames) == 2:
                reason = ""
            case [int(ticket), str(reason)] if len(frames) == 1:
                pass
            case _:
                self._on_bad_frame()
                return
        reading, chunk = self._owed.pop(ticket, (None, None))
        if reading is None or chunk is None:
            return  # asked for before the connection was lost
        reading.owed -= 1
        if reading.state is not State.POSTED:
            return
        if reason:
            reading.fail(f"refused: {reason[:200]}")
        elif len(frames[1]) != chunk.nbytes:
            self._on_bad_frame()
            reading.fail(f"{len(frames[1])} bytes came for {chunk.nbytes}")
        else:
            self._landing[chunk.local : chunk.local + chunk.nbytes] = frames[1].buffer
            if not reading.owed and not reading.chunks:
                reading.state = State.DONE

    def _watch(self) -> None:
        while True:
            try:
                message = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.lost = ""
            else:
                self.lost = "the connection was lost"
                self._fail_all(self.lost)

    def _fail_all(self, why: str) -> None:
        for reading, _ in self._owed.values():
            reading.fail(why)
        for reading in self._turns:
            reading.fail(why)
        self._owed.clear()
        self._turns.clear()
