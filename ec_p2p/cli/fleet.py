"""What a view of the directories says of each node, added up.

Pure: it reads the view, and changes nothing. With several directories, what counts of a node is what the one says that
knows most of it: another may be hearing it anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ec_p2p.control.messages import Advert, EntryState, InstanceInfo, NodeInfo
from ec_p2p.control.view import View

STATES = {EntryState.RESIDENT: "memory", EntryState.DISK: "disk", EntryState.PENDING: "pending"}
"""Where an entry is, in words."""


class NodeRow(NamedTuple):
    """One node. Counts and bytes are by state, in the words of STATES."""

    info: NodeInfo
    state: str
    """'up': a directory that is being followed says so. 'doubted': it, or the node, has begun anew, and not all that is
    known of the node was said again yet. 'stale': no directory is being followed, and this is what was known before."""
    instances: list[InstanceInfo]
    entries: dict[str, int]
    nbytes: dict[str, int]

    @property
    def held(self) -> int:
        return sum(self.entries.values())

    @property
    def held_bytes(self) -> int:
        return sum(self.nbytes.values())

    def age_s(self, now: float) -> float | None:
        """Seconds since the node's start by its own clock; `now` is Unix time. None: it does not tell."""
        return max(0.0, now - self.info.started_at) if self.info.started_at else None


def rows_of(view: View) -> list[NodeRow]:
    """Every node that is known, by name."""
    followed = view.fresh
    rows = []
    for info in view.nodes():
        told = [(replica.held_by(info.incarnation), replica) for replica in view.counting]
        adverts, replica = max(told, key=lambda one: (len(one[0]), len(one[1].instances(info.incarnation))))
        doubted = "doubted" if replica.doubts(info.incarnation) else "up"
        state = doubted if followed else "stale"
        rows.append(NodeRow(info, state, replica.instances(info.incarnation), *_add_up(adverts)))
    return sorted(rows, key=lambda row: (row.info.name, row.info.address))


def _add_up(adverts: Sequence[Advert]) -> tuple[dict[str, int], dict[str, int]]:
    # There may be a million.
    counts = Counter(map(attrgetter("state"), adverts))
    entries = {word: counts[int(state)] for state, word in STATES.items()}
    nbytes = dict.fromkeys(STATES.values(), 0)
    for state in counts:
        nbytes[STATES[EntryState(state)]] = sum(advert.nbytes for advert in adverts if advert.state == state)
    return entries, nbytes


def as_json(row: NodeRow, now: float) -> dict[str, Any]:
    """For `--json`. `now` is Unix time."""
    return {
        "name": row.info.name,
        "address": row.info.address,
        "incarnation": row.info.incarnation.hex(),
        "state": row.state,
        "started_at": row.info.started_at or None,
        "age_s": row.age_s(now),
        "entries": row.entries,
        "bytes": row.nbytes,
        "instances": [
            {"name": instance.name, "role": instance.role, "namespace": instance.namespace}
            for instance in row.instances
        ],
    }


def namespaces_of(rows: Iterable[NodeRow]) -> list[str]:
    """Those that the instances tell, each once."""
    return sorted({instance.namespace for row in rows for instance in row.instances if instance.namespace})
