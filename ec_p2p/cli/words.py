"""Figures, names and tables as people read them in a terminal.

Pure. What comes from the network may be anything: nothing of it reaches a terminal that would not be shown there.
"""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NAMESPACE_DIGITS = 12
"""As many as the connector's log shows."""


def shown(text: str) -> str:
    """`text`, with a mark for every character that a terminal would obey instead of showing it."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def size(nbytes: float) -> str:
    """Such as '9.6 GiB': for reading, not exact."""
    unit = 0
    while nbytes >= 1023.95 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.1f} {_UNITS[unit]}" if unit else f"{nbytes:.0f} B"


def age(seconds: float) -> str:
    """Such as '3h 12m': the two largest units. Below zero, which clocks of two hosts may make of it, it is '0s'."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def short(namespace: str) -> str:
    return shown(namespace[:_NAMESPACE_DIGITS]) or "-"


def counted(number: int, thing: str) -> str:
    """Such as '1 node', '2 nodes', '0 entries'."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing[:-1]}ies" if thing.endswith("y") and not thing.endswith("ey") else f"{number} {thing}s"


def columns(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Each row as a line, the cells of a column at one width; `right`: which columns are aligned so."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
