"""Bytes on the wire to typed messages, and back.

Owns the limits of everything that arrives on a socket. Must never let a frame, whatever its bytes, raise anything
but `BadFrame`, nor make the process allocate more than a small multiple of the frame itself. Knows no particular
message: any msgspec struct, or union of tagged structs, will do.

Frames are parsed straight into the structs. Nothing is built of what a type does not name: it is skipped. No length in
a frame is believed: what is allocated grows with what was read. So the limit on the frame limits everything, and the
structs' own annotations say the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

MAX_FRAME = 1 << 20
"""Bytes of the longest frame that is looked at. Also the ZMQ MAXMSGSIZE of the control plane's sockets."""

_REASON_CHARS = 200

_encoder = msgspec.msgpack.Encoder()


class BadFrame(ValueError):
    """A frame that is no message of the expected kind. `reason` is for logs, shortened: it may quote the sender."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if len(reason) <= _REASON_CHARS else reason[:_REASON_CHARS] + "..."
        super().__init__(self.reason)


def encode(message: msgspec.Struct) -> bytes:
    """One MessagePack frame. The message is the caller's own: its fields are not checked again."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview, type_: Any) -> Any:
    """The message in `frame`, an instance of the struct, or of a member of the union, `type_`.

    Raises BadFrame, and nothing else, for anything that is too long, not MessagePack, nested deeper than Python's
    recursion limit, followed by other bytes, or not exactly what the annotations of `type_` allow.
    """
    if len(frame) > MAX_FRAME:
        raise BadFrame(f"{len(frame)} bytes, accepted: at most {MAX_FRAME}")
    try:
        return _decoder(type_).decode(frame)
    # Which exceptions the parser raises for which bytes is not documented; a stranger's frame must not pick one.
    except Exception as error:
        raise BadFrame(f"{type(error).__name__}: {error}") from None


@functools.cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    """One for each type: to make one takes longer than to decode a short message. Any thread may use it."""
    return msgspec.msgpack.Decoder(type_)
