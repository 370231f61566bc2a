"""The calls of ZMQ that the control plane makes, over `sim_network`.

A DEALER that is not connected takes nothing (IMMEDIATE), a full queue takes nothing either, and an XPUB drops what a
full subscriber should have got, or with XPUB_NODROP sends it to nobody.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq

from ec_p2p.control.messages import TOPIC

from .sim_network import Channel, Dial, Process


class VirtualContext:
    """Stands in for a `zmq.Context` of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def socket(self, kind: int) -> VirtualSocket:
        socket = VirtualSocket(self._process, kind)
        self._process.sockets.append(socket)
        return socket

    def term(self) -> None:
        pass


class VirtualSocket:
    """The calls of a `zmq.Socket` that the control plane makes, of the kinds DEALER, ROUTER, SUB and XPUB."""

    def __init__(self, process: Process, kind: int) -> None:
        self.process = process
        self.network = process.network
        self._kind = kind
        self._closed = False
        self._bound = ""
        self._dials: dict[str, Dial] = {}
        self._unread: list[Channel] = []
        self._peers: dict[bytes, Dial] = {}
        self._routes: dict[int, bytes] = {}
        self._topics: list[bytes] = []
        self._left: deque[list[bytes]] = deque()
        """The subscriptions that ended with their connections, as an XPUB tells of them."""
        self._drops = True

    # -------------------------------------------------------- as the control plane sees it

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.SUBSCRIBE:
            self._topics.append(value)
        elif option == zmq.XPUB_NODROP:
            self._drops = not value

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self._bound

    def bind(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._bound = f"{host}:{20_000 + self.network.number() if port == '*' else port}"
        if self._bound in self.network.listening:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.network.listening[self._bound] = self

    def connect(self, endpoint: str) -> None:
        self._dials[endpoint] = Dial(self, endpoint)

    def disconnect(self, endpoint: str) -> None:
        if endpoint not in self._dials:
            raise zmq.ZMQError(zmq.ENOENT)
        self._dials.pop(endpoint).give_up()

    def poll(self, timeout: float, flags: int) -> int:
        assert flags == zmq.POLLOUT
        return int(self._way_out() is not None)

    def send_multipart(self, frames: Any, flags: int = 0, copy: bool = True) -> None:
        frames = [bytes(frame) for frame in frames]
        if self._kind == zmq.XPUB:
            if not self._drops and any(dial.to_client.full for dial in self._peers.values()):
                raise zmq.Again
            self.network.published(frames)
            for dial in self._peers.values():
                if not dial.to_client.full:
                    dial.to_client.send(frames)
        elif self._kind == zmq.ROUTER:
            if frames[0] not in self._peers:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            channel = self._peers[frames[0]].to_client
            if channel.full:
                raise zmq.Again
            channel.send(frames[1:])
        else:
            channel = self._way_out()
            if channel is None:
                raise zmq.Again
            channel.send(frames)

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[bytes]:
        if self._left:
            return self._left.popleft()
        if not self._unread:
            raise zmq.Again
        # Whose turn it is among several connections is anybody's guess.
        channel = self.network.random.choice(self._unread)
        frames = channel.inbox.popleft()
        self.look(channel)
        return [channel.route, *frames] if self._kind == zmq.ROUTER else frames

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._bound:
            del self.network.listening[self._bound]
        for dial in list(self._peers.values()):
            dial.end()
        for endpoint in list(self._dials):
            self.disconnect(endpoint)

    # -------------------------------------------------------- as the network sees it

    @property
    def readable(self) -> bool:
        return bool(self._unread or self._left)

    def look(self, channel: Channel) -> None:
        """What is unread in it has changed."""
        if channel in self._unread:
            self._unread.remove(channel)
        if channel.inbox:
            self._unread.append(channel)
            self.process.wake()

    def connected(self, dial: Dial) -> None:
        for topic in self._topics:
            dial.to_server.send([b"\x01" + topic], harmed=False)

    def joined(self, dial: Dial) -> None:
        if self._kind == zmq.ROUTER:
            self._peers[dial.route] = dial

    def dropped(self, dial: Dial) -> None:
        if self._peers.pop(dial.route, None) and self._kind == zmq.XPUB:
            self._left.append([b"\x00" + TOPIC])
            self.process.wake()

    def arrived(self, channel: Channel) -> None:
        if self._kind == zmq.XPUB and channel.open:
            self._peers[channel.route] = channel.dial
        self.look(channel)

    def _way_out(self) -> Channel | None:
        for dial in self._dials.values():
            if dial.server and not dial.to_server.full:
                return dial.to_server
        return None
