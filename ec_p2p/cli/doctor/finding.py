"""The word of the doctor: one finding about one thing."""

from __future__ import annotations

from enum import Enum

import msgspec


class Level(Enum):
    """How bad it is. Only a PROBLEM makes the command fail."""

    OK = "ok"
    NOTE = "note"
    """Works, but less well, or only for some uses."""
    PROBLEM = "problem"
    """With these settings, something will not work."""


class Finding(msgspec.Struct, frozen=True):
    """`says` is what was seen, in words; `mend` what to do about it, empty where there is nothing to do."""

    thing: str
    level: Level
    says: str
    mend: str = ""


def ok(thing: str, says: str) -> Finding:
    return Finding(thing, Level.OK, says)


def note(thing: str, says: str, mend: str = "") -> Finding:
    return Finding(thing, Level.NOTE, says, mend)


def problem(thing: str, says: str, mend: str) -> Finding:
    return Finding(thing, Level.PROBLEM, says, mend)
