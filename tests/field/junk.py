"""What strangers send: bytes that make no sense, or half of it, to whoever listens."""

from __future__ import annotations

import random

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0"
NULL, CURVE = GREETING + b"NULL".ljust(52, b"\0"), GREETING + b"CURVE".ljust(52, b"\0")
HTTP_REQUEST = b"GET /metrics HTTP/1.1\r\n" + b"X-Header: x\r\n" * 500
OPENINGS = [
    b"",
    b"GET / HTTP/1.1\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
    HTTP_REQUEST,
    b"\xff" * 5_000,
    random.Random(3).randbytes(5_000),
    GREETING,
    NULL,
    CURVE,
    NULL + b"\x04\x05\x04JUNK",
    NULL + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB" + b"\x02" + (1 << 40).to_bytes(8, "big") + b"\x01" * 5_000,
    CURVE + b"\xff" * 5_000,
]
"""First bytes of a connection: of other protocols, and of ZMTP, cut off or gone mad at every stage."""
JUNK = [b"", b"\xc1", b"{}", b"\0" * 5_000, b"\x91" * 5_000, random.Random(5).randbytes(500)]
"""Frames, for a connection that stands."""
