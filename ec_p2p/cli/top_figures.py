"""What `ec-p2p top` shows: two looks at the fleet, and what happened between them.

Pure, but for the look itself, which reads the view.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ec_p2p.cli.fleet import NodeRow, as_json, rows_of
from ec_p2p.cli.local_node import fetch_figures
from ec_p2p.control.view import View
from ec_p2p.node.messages import Inspection


class Look(NamedTuple):
    """The fleet at one time."""

    at: float
    """`time.monotonic()`."""
    unix: float
    rows: list[NodeRow]
    followed: list[str]
    """Directories, by endpoint."""
    silent: list[str]
    adverts: list[int]
    """Published since the start, by directory."""
    withdrawals: list[int]
    local: Inspection | None
    """Of this host's node."""


class Figures(NamedTuple):
    """A look, and the rates since the one before; None where there is nothing to compare with."""

    look: Look
    adverts_per_s: float | None
    changes_per_s: float | None
    """Adverts and withdrawals."""
    entries_per_s: dict[bytes, float]
    """By incarnation: entries that came, less those that went."""
    fetches_per_s: dict[str, float]
    """Of this host's node: READs that landed, READs that failed, and bytes; nothing without a node."""


def look_at(view: View, local: Inspection | None) -> Look:
    followed = [replica.endpoint for replica in view.replicas if replica.fresh]
    at = time.monotonic()
    return Look(
        at,
        time.time(),
        rows_of(view),
        followed,
        [replica.endpoint for replica in view.replicas if replica.endpoint not in followed],
        [replica.counters.get("adverts", 0) for replica in view.replicas],
        [replica.counters.get("withdrawals", 0) for replica in view.replicas],
        local,
    )


def figures_of(before: Look | None, now: Look) -> Figures:
    """Every directory publishes the same changes: the one that published most has missed least."""
    if before is None or now.at <= before.at:
        return Figures(now, None, None, {}, {})
    span = now.at - before.at
    adverts = [new - old for old, new in zip(before.adverts, now.adverts, strict=True)]
    withdrawals = [new - old for old, new in zip(before.withdrawals, now.withdrawals, strict=True)]
    held = {row.info.incarnation: row.held for row in before.rows}
    return Figures(
        now,
        max(adverts) / span,
        max(map(sum, zip(adverts, withdrawals, strict=True))) / span,
        {
            row.info.incarnation: (row.held - held[row.info.incarnation]) / span
            for row in now.rows
            if row.info.incarnation in held
        },
        _fetches(before.local, now.local, span),
    )


def _fetches(before: Inspection | None, now: Inspection | None, span: float) -> dict[str, float]:
    if before is None or now is None or before.node["incarnation"] != now.node["incarnation"]:
        return {}
    old, new = fetch_figures(before.counters), fetch_figures(now.counters)
    return {name: (new[name] - old[name]) / span for name in new}


def figures_as_json(figures: Figures) -> dict[str, Any]:
    """For `--json`: one object."""
    look = figures.look
    rates = figures.entries_per_s
    nodes = [{**as_json(row, look.unix), "entries_per_s": rates.get(row.info.incarnation)} for row in look.rows]
    local = None
    if look.local is not None:
        totals = fetch_figures(look.local.counters)
        local = {"name": look.local.node["name"], "fetches": totals, "per_s": figures.fetches_per_s or None}
    return {
        "time": look.unix,
        "directories": {"followed": look.followed, "silent": look.silent},
        "entries": sum(row.held for row in look.rows),
        "bytes": sum(row.held_bytes for row in look.rows),
        "adverts_per_s": figures.adverts_per_s,
        "changes_per_s": figures.changes_per_s,
        "local_node": local,
        "nodes": nodes,
    }
