"""Bytes on the wire to typed messages, and back.

Owns the limits of everything that arrives on a ZMQ socket. Must never let a frame, whatever its bytes, raise anything
but `BadFrame`, nor make the process allocate more than a small multiple of the frame itself. Knows no particular
message: any msgspec struct, or union of tagged structs, will do.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack
import msgspec

MAX_FRAME = 1 << 20
"""Bytes of the longest frame that is looked at. Also the ZMQ MAXMSGSIZE of the control plane's sockets."""

MAX_ITEMS = 1 << 16
"""Most elements of one array, and most pairs of one map."""

_KEEP = (bytes,)
_REASON_CHARS = 200


class BadFrame(ValueError):
    """A frame that is no message of the expected kind. `reason` is for logs, shortened: it may quote the sender."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if len(reason) <= _REASON_CHARS else reason[:_REASON_CHARS] + "..."
        super().__init__(self.reason)


def encode(message: msgspec.Struct) -> bytes:
    """One MessagePack frame. The message is the caller's own: its fields are not checked again."""
    frame: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=_KEEP))
    return frame


def decode(frame: bytes | memoryview, type_: Any) -> Any:
    """The message in `frame`, an instance of the struct, or of a member of the union, `type_`.

    Raises BadFrame, and nothing else, for anything that is too long, not MessagePack, nested deeper than the parser's
    fixed stack, followed by other bytes, or not exactly what the annotations of `type_` allow.
    """
    if len(frame) > MAX_FRAME:
        raise BadFrame(f"{len(frame)} bytes, accepted: at most {MAX_FRAME}")
    try:
        plain = msgpack.unpackb(
            frame,
            use_list=False,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_str_len=MAX_FRAME,
            max_bin_len=MAX_FRAME,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
        return msgspec.convert(plain, type_, builtin_types=_KEEP)
    # Which exceptions the parser raises for which bytes is not documented; a stranger's frame must not pick one.
    except Exception as error:
        raise BadFrame(f"{type(error).__name__}: {error}") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")
