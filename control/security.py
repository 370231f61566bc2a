"""The gate: who may connect to the server sockets of one ZMQ context, by the keys that clients prove to have.

Owns the one endpoint at which libzmq asks (ZAP), and the thread that answers there. Must never keep a handshake waiting
for anything else that its process does, nor grow with the number of strangers.

    handshake is complete but for the client's key --ask--> 200, with the key as the connection's User-Id
                                                        --> 400: the connection ends
    gate not there, or closed --> the connection ends
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from types import TracebackType

import zmq

from ec_p2p.control.sockets import Context, Socket, receive_now, send_now
from ec_p2p.wire.curve import Security, key_of, key_text, secure_client, secure_server

__all__ = ["Gate", "Security", "receive_keyless", "receive_with_key", "secure_client", "secure_server"]

log = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_KEYS_LOGGED = 64
"""Most strangers' keys that are named in the log; further ones are only counted."""


class Gate:
    """Made before the first server socket of its context is bound, and by whoever made the context; closed before the
    context ends. Raises zmq.ZMQError (EADDRINUSE) if the context has one.

    Answers in a thread of its own, so that handshakes go on while the loop that serves the sockets is busy.
    """

    def __init__(self, context: Context, security: Security) -> None:
        self.refused = 0
        """Connections turned away for their keys."""
        self._allow = security.allow
        self._logged: set[bytes] = set()
        with ExitStack() as undo:
            self._socket = context.socket(zmq.ROUTER)
            undo.callback(self._socket.close)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(_ENDPOINT)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._thread = threading.Thread(target=self._answer_all, name="ec-p2p-gate", daemon=True)
            self._thread.start()
            undo.pop_all()

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nobody comes in any more; those who are in stay. Idempotent."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._wake = -1
        self._socket.close()

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                return
            try:
                request = receive_now(self._socket)
                if request is not None:
                    self._answer(request)
            except zmq.ContextTerminated:
                return
            except Exception:  # without this thread nobody comes in ever again
                log.exception("a connection was not let in: an error of this process, not of the connection")

    def _answer(self, request: list[bytes]) -> None:
        match request:
            case [route, b"", version, request_id, _, address, _, b"CURVE", key] if version == _VERSION:
                pass
            case _:  # no socket that `secure_server` has had asks so
                log.error("a connection asks to come in without a key")
                return
        if key in self._allow:
            verdict = (b"200", b"OK", key_text(key).encode(), b"")
        else:
            self._note(key, address)
            verdict = (b"400", b"this key is not allowed here", b"", b"")
        send_now(self._socket, route, b"", version, request_id, *verdict)

    def _note(self, key: bytes, address: bytes) -> None:
        self.refused += 1
        if key not in self._logged and len(self._logged) < _KEYS_LOGGED:
            self._logged.add(key)
            log.warning(
                "turned away a connection from %s: its key %r is not in `allow` (logged once)",
                address.decode(errors="replace"),
                key_text(key),
            )


def receive_with_key(socket: Socket) -> tuple[list[bytes], bytes] | None:
    """The next message's frames, and the public key that its sender has proved to have: empty for none."""
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    try:
        key = key_of(str(frames[-1].get("User-Id")))
    except (zmq.ZMQError, ValueError):  # no gate of ours has let that connection in
        key = b""
    return [frame.bytes for frame in frames], key


def receive_keyless(socket: Socket) -> tuple[list[bytes], bytes] | None:
    """The next message's frames, from a server socket without keys."""
    frames = receive_now(socket)
    return None if frames is None else (frames, b"")
