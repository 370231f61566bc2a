"""What NIXL and UCX write, which they do past Python's logging: to the descriptors 1 and 2."""

from __future__ import annotations

import os
import re

_UCX = re.compile(r"^\[.*?UCX\s+(?:WARN|ERROR|FATAL)\s+(.*)$")
"""[1796069383.98] [host:25054:0]     ucp_context.c:1508 UCX  WARN  transport 'x' is not available, ..."""
_NIXL = re.compile(r"^[WEF]\d{4} \S+\s+\d+ \S+\] (.*)$")
"""E1130 20:09:43.996848   25051 ucx_utils.cpp:635] UCX endpoint create failed"""
_OF_ITSELF = "unused environment variables", "UCX_WARN_UNUSED_ENV_VARS"
_AT_MOST = 8


def write_to(path: str) -> None:
    """From now on, all that this process writes goes to the end of this file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def warnings_in(text: str) -> list[str]:
    """Each complaint once, after the name of the library, without the time and the place in its source; what has
    another form as it is. No more than a finding can hold: the last ones."""
    lines = [_shortened(line.strip()) for line in text.splitlines()]
    wanted = [line for line in lines if line and not any(mark in line for mark in _OF_ITSELF)]
    return list(dict.fromkeys(wanted))[-_AT_MOST:]


def _shortened(line: str) -> str:
    for library, pattern in (("UCX", _UCX), ("NIXL", _NIXL)):
        if found := pattern.match(line):
            return f"{library}: {found[1]}"
    return line
