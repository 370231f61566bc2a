"""How `ec-p2p top` looks in a terminal.

Owns the layout. Nothing from the network is taken for markup. Needs rich, and is imported only where that is there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ec_p2p.cli import words
from ec_p2p.cli.fleet import STATES, NodeRow
from ec_p2p.cli.ls import summary
from ec_p2p.cli.top_figures import Figures

_GAP = 2
_LEAST_NAME = 20
"""Names of hosts often begin alike."""
_OTHER_LINES = 6
"""The head and the foot, and the table's own header."""


class _Column(NamedTuple):
    header: str
    keep: int
    """Columns with lower numbers go first where the terminal is narrow."""
    right: bool
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(len, [self.header, *self.cells]))


class Notes(logging.Handler):
    """Remembers the last line that was logged: written where others write, it would destroy the picture."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = f"{time.strftime('%H:%M:%S')} {record.getMessage()}"


@contextlib.contextmanager
def noted() -> Iterator[Notes]:
    """What is logged meanwhile goes into the notes."""
    root, notes = logging.getLogger(), Notes()
    handlers, root.handlers = root.handlers, [notes]
    try:
        yield notes
    finally:
        root.handlers = handlers


def screen(figures: Figures, width: int, height: int, note: str = "") -> Group:
    """Everything, for a terminal of so many columns and lines."""
    look = figures.look
    room = max(0, height - _OTHER_LINES)
    rows = sorted(look.rows, key=lambda row: (-row.held_bytes, row.info.name))
    shown = rows[:room]
    foot = "q ends"
    if len(shown) < len(rows):
        foot = f"and {words.counted(len(rows) - len(shown), 'more node')}; {foot}"
    return Group(
        _directories(figures),
        _totals(figures),
        _local(figures),
        _table(_columns(figures, shown), width),
        _line(""),
        _line(words.shown(note) or foot, "yellow" if note else "dim"),
    )


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _directories(figures: Figures) -> Text:
    look = figures.look
    clock = time.strftime("%H:%M:%S", time.localtime(look.unix))
    line = _line(f"ec-p2p top  {clock}  ")
    silent = words.shown(", ".join(look.silent))
    if not look.followed:
        line.append(f"no directory answers at {silent}", "bold red")
        if look.rows:
            line.append("; this is what was known before", "red")
        return line
    followed = len(look.followed)
    line.append(f"{followed} director{'y' if followed == 1 else 'ies'} followed", "green")
    if silent:
        line.append(f", no answer from {silent}", "yellow")
    return line


def _totals(figures: Figures) -> Text:
    rates = (("adverts/s", figures.adverts_per_s), ("changes/s", figures.changes_per_s))
    return _line("  ".join([summary(figures.look.rows), *(f"{name} {_rate(rate)}" for name, rate in rates)]), "bold")


def _local(figures: Figures) -> Text:
    local, rates = figures.look.local, figures.fetches_per_s
    if local is None:
        return _line("no node on this host tells of its fetches", "dim")
    text = f"fetches of {words.shown(local.node['name'])}, on this host: "
    text += f"landed/s {_rate(rates.get('landed'))}  {words.size(rates.get('bytes', 0.0))}/s"
    text += f"  failed/s {_rate(rates.get('failed'))}  in flight {local.gauges.get('fetches_in_flight', 0):.0f}"
    return _line(text)


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if abs(rate) >= 100 else f"{rate:.1f}"


def _signed(rate: float | None) -> str:
    return f"+{_rate(rate)}" if rate is not None and rate > 0 else _rate(rate)


def _age(row: NodeRow, unix: float) -> str:
    age = row.age_s(unix)
    return "-" if age is None else words.age(age)


def _columns(figures: Figures, rows: list[NodeRow]) -> list[_Column]:
    rates, unix = figures.entries_per_s, figures.look.unix
    kept = {"memory": 6, "disk": 5, "pending": 4}
    return [
        _Column("NODE", 9, False, [words.shown(row.info.name) for row in rows]),
        _Column("ADDRESS", 0, False, [words.shown(row.info.address) for row in rows]),
        _Column("STATE", 2, False, [row.state for row in rows]),
        _Column("AGE", 1, True, [_age(row, unix) for row in rows]),
        _Column("INSTANCES", 3, True, [str(len(row.instances)) for row in rows]),
        *(
            _Column(word.upper(), kept[word], True, [f"{row.entries[word]:,}" for row in rows])
            for word in STATES.values()
        ),
        _Column("BYTES", 8, True, [words.size(row.held_bytes) for row in rows]),
        _Column("ENTRIES/S", 7, True, [_signed(rates.get(row.info.incarnation)) for row in rows]),
    ]


def _table(columns: list[_Column], width: int) -> Table:
    """With the columns that there is room for; the name is cut where it must."""
    name, *others = columns

    def needed() -> int:
        return sum(column.width + _GAP for column in others)

    while others and needed() + min(name.width, _LEAST_NAME) > width:
        others.remove(min(others, key=lambda column: column.keep))
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, collapse_padding=True, header_style="bold reverse")
    table.add_column(name.header, no_wrap=True, overflow="ellipsis", max_width=max(1, width - needed()))
    for column in others:
        table.add_column(
            column.header, justify="right" if column.right else "left", no_wrap=True, min_width=column.width
        )
    for cells in zip(name.cells, *(column.cells for column in others), strict=True):
        table.add_row(*map(Text, cells))
    return table
