"""How people write keys and the endpoints of directories.

Owns the syntax, and what of it may be shown. Looks at nothing outside: an address that is well formed need not exist.
"""

from __future__ import annotations

import re

KEY = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A key as text: 32 bytes in Z85."""
ENDPOINT_ACCEPTED = (
    "text like 'tcp://host:14579', or 'valkey://[user:password@]host:6379/prefix' for a Valkey or Redis server "
    "('valkeys://' with TLS)"
)
TLS_SCHEMES = ("valkeys", "rediss")

_ZMQ = re.compile(r"tcp://[^/,\s]+:(\d{1,5})")
_FILE = r"(?:password_file|ssl_ca_certs|ssl_certfile|ssl_keyfile)=/[^&,\s]*"
_VALKEY = re.compile(
    r"(?P<scheme>valkeys?|rediss?)://(?:[^/?#@,\s]*@)?[^/?#@,\s]+:(\d{1,5})"
    rf"(?:/[\w.-]{{0,64}})?(?:\?(?P<files>{_FILE}(?:&{_FILE})*))?"
)
_USER = re.compile(r"://\S*@")


def is_endpoint(text: str) -> bool:
    """Whether `text` is the endpoint of one directory. A file of TLS where there is none makes it none."""
    if match := _ZMQ.fullmatch(text):
        return 0 < int(match[1]) < 65536
    match = _VALKEY.fullmatch(text)
    if not match or not 0 < int(match[2]) < 65536:
        return False
    return match["scheme"] in TLS_SCHEMES or "ssl_" not in (match["files"] or "")


def without_password(text: str) -> str:
    """Endpoints as they may be shown: in logs, in errors, and to whoever asks a node."""
    return _USER.sub("://...@", text)
