"""The directory server: hears nodes on a ROUTER socket, tells replicas on a PUB socket.

Owns its two sockets and its epoch, all used by the one thread that is in `run`. Must never
block on a peer, queue without bound for one, or end because of what one sent. Everything it knows is soft: nodes say
it again to the next life.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Container
from contextlib import ExitStack
from types import TracebackType

import zmq

from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    Refused,
    SnapshotRequest,
    ToDirectory,
    Welcome,
)
from ec_p2p.control.publications import Publications
from ec_p2p.control.pulse import Pulse
from ec_p2p.control.security import Gate, Security, receive_keyless, receive_with_key, secure_server
from ec_p2p.control.snapshots import Snapshots
from ec_p2p.control.sockets import (
    Context,
    Socket,
    bound_port,
    new_context,
    open_socket,
    send_now,
    split_endpoint,
)
from ec_p2p.control.state import DirectoryState

log = logging.getLogger(__name__)

_BYTES_PER_TURN = 256 << 10
# In messages: what a peer that does not read, or that floods, can make this process keep. A chunk of a snapshot has
# about 150 KiB, a publication at most 256 KiB or so, a stranger's frame at most 1 MiB.
_ROUTER_SEND_HWM = 16
_ROUTER_RECEIVE_HWM = 16
_PUB_HWM = 256
_LONGEST_SUBSCRIPTION = 256
_LINGER_MS = 500
_BEHIND_TIMEOUTS = 3


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
        security: Security | None = None,
    ) -> None:
        self.epoch = os.urandom(16)
        self._node_timeout_s = node_timeout_s
        self._expiry_s = node_timeout_s / 8
        self._caught_up = float("-inf")
        self._state = DirectoryState(node_timeout_s)
        self._next_expiry = 0.0
        self._counters = dict.fromkeys(("bad_frames", "refused", "unsent"), 0)
        self.pulse = Pulse(node_timeout_s)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._security = security
        self._receive_one = receive_with_key if security else receive_keyless
        with ExitStack() as resources:
            self._listen(resources, context, bind, pub_port)
            self._resources = resources.pop_all()
        self._snapshots = Snapshots(self._router, self.epoch)
        self._publications = Publications(self._pub, self.epoch, heartbeat_s)

    def _listen(self, resources: ExitStack, context: Context | None, bind: str, pub_port: int) -> None:
        """Make what has to be closed, each with its place in `resources`, which closes it in the opposite order."""
        host, port = split_endpoint(bind)
        self._gate: Gate | None = None
        if context is None:
            context = new_context()
            resources.callback(context.term)
            # Whoever else made the context has made its gate, too.
            self._gate = resources.enter_context(Gate(context, self._security)) if self._security else None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        resources.callback(os.close, self._wake)
        self._router = open_socket(
            context, zmq.ROUTER, bind, send_hwm=_ROUTER_SEND_HWM, receive_hwm=_ROUTER_RECEIVE_HWM
        )
        resources.callback(self._router.close)
        # Without it a full queue loses frames silently, in the middle of a snapshot too.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # What comes in there are subscriptions. ZMQ keeps one as a chain of a link per byte and frees it by recursion:
        # a stranger's long one would overflow the stack.
        self._pub = open_socket(
            context, zmq.XPUB, bind, send_hwm=_PUB_HWM, linger_ms=_LINGER_MS, max_frame=_LONGEST_SUBSCRIPTION
        )
        resources.callback(self._pub.close)
        for socket in self.sockets:
            secure_server(socket, self._security)
        self._router.bind(f"{host}:{'*' if port == '0' else port}")
        self._pub.bind(f"{host}:{pub_port or '*'}")
        self.endpoint = f"{host}:{bound_port(self._router)}"
        self.pub_port = bound_port(self._pub)

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
        self._wake = -1
        self._resources.close()

    @property
    def running(self) -> bool:
        """Whether the thread of `start` is alive."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        """Counters since construction, and gauges: `nodes`, `entries`, `subscribers`, `seq`.

        `unsent` replies found the peer's queue full, or the peer gone. `slow_subscribers` counts how often publications
        began to be lost to subscribers that do not read as fast as there are changes. `snapshots_given_up` were not
        read either, or were one too many.
        """
        state = self._state
        return {
            **self._counters,
            **self._publications.counters,
            "keys_refused": self._gate.refused if self._gate else 0,
            **self._snapshots.counters,
            "adverts": state.adverts,
            "withdrawals": state.withdrawals,
            "nodes": len(state),
            "entries": state.entries,
            "subscribers": self._publications.subscribers,
            "seq": self._publications.seq,
        }

    def entries_by_state(self) -> dict[int, int]:
        """How many entries are in each EntryState. From any thread; takes about 0.1 us an entry."""
        return self._state.entries_by_state()

    @property
    def snapshot_seconds(self) -> float:
        """What the snapshots that were sent in full took, added up."""
        return self._snapshots.seconds

    def knows(self, incarnation: bytes) -> bool:
        """Whether there is such a node. From any thread."""
        return self._state.knows(incarnation)

    def run(self) -> None:
        """Serve until `stop`."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        wait_s = 0.0
        while not self._stopping:
            ready = dict(poller.poll(math.ceil(max(0.0, wait_s) * 1000)))
            self.pulse.beat()
            wait_s = self.turn(ready, time.monotonic())
        # What was heard, a goodbye for one, is passed on.
        self._publications.tick(time.monotonic(), at_once=True)

    def turn(self, ready: Container[object], now: float) -> float:
        """What `run` does again and again: hear the sockets that are `ready`, publish, send snapshots. Returns the
        seconds until the next turn is wanted if nothing comes in before."""
        if self._router not in ready or self._receive(now):
            self._caught_up = now
        if self._pub in ready:
            self._publications.hear()
        if now >= self._next_expiry:
            self._next_expiry = now + self._expiry_s
            # Who is behind with reading does not know who is silent. For long that must not keep the dead alive.
            behind = min(now - self._caught_up, _BEHIND_TIMEOUTS * self._node_timeout_s)
            self._publications.add(self._state.expire(now - behind))
        # What a snapshot holds must have been published.
        self._publications.tick(now, at_once=self._snapshots.to_be_cut)
        wait_s = min(self._next_expiry, self._publications.next_event()) - now
        return (
            min(wait_s, self._snapshots.send(self._state, self._publications.seq, now)) if self._snapshots else wait_s
        )

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        """What `turn` wants to know of: where nodes and replicas speak, and where subscriptions come in."""
        return (self._router, self._pub)

    # -------------------------------------------------------- ROUTER

    def _receive(self, now: float) -> bool:
        """A bounded amount, so that what was said is soon published, in a storm too. False: there may be more."""
        nbytes = 0
        while nbytes < _BYTES_PER_TURN:
            received = self._receive_one(self._router)
            if received is None:
                return True
            frames, key = received
            nbytes += 64 + sum(map(len, frames))
            route = frames[0]
            try:
                if len(frames) != 2:
                    raise BadFrame(f"{len(frames) - 1} frames in one message, accepted: 1")
                message = decode(frames[1], ToDirectory)
            except BadFrame as error:
                self._counters["bad_frames"] += 1
                log.debug("dropped a frame from %s: %r", route.hex(), error.reason)
                continue
            self._handle(route, key, message, now)
        return False

    def _handle(self, route: bytes, key: bytes, message: ToDirectory, now: float) -> None:
        if isinstance(message, Hello | SnapshotRequest) and message.version != PROTOCOL_VERSION:
            self._counters["refused"] += 1
            reason = f"protocol version {message.version} is not spoken here, accepted: {PROTOCOL_VERSION}"
            self._reply(route, encode(Refused(reason)))
            return
        if isinstance(message, SnapshotRequest):
            self._welcome(route)
            self._snapshots.ask(route, message.token)
            return
        if isinstance(message, Hello | Goodbye) and self._security and not self._state.may_say(message, key):
            self._counters["refused"] += 1
            if isinstance(message, Hello):
                self._reply(route, encode(Refused("this node, or its name and address, are those of another key")))
            return
        events = self._state.apply(message, route, now)
        if events is None:
            self._reply(route, encode(HelloAgain(self.epoch)))
            return
        self._publications.add(events)
        if isinstance(message, Hello):
            self._welcome(route)
        elif isinstance(message, Heartbeat):
            self._welcome(route, message.seq)

    def _welcome(self, route: bytes, seq: int = 0) -> None:
        self._reply(route, encode(Welcome(PROTOCOL_VERSION, self.epoch, self.pub_port, seq)))

    def _reply(self, route: bytes, frame: bytes) -> None:
        if not send_now(self._router, route, frame):
            self._counters["unsent"] += 1
