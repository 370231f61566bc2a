"""What goes into an inspection, which is one datagram.

Owns nothing. An inspection must not grow with the fleet, and where it does, it must say what is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ec_p2p.engine.tally import Series
from ec_p2p.node.messages import Inspection


def summed_over(label: str, *parts: Mapping[Series, float]) -> dict[Series, float]:
    """The counts, in which it does not matter what the label says."""
    sums: dict[Series, float] = {}
    for counts in parts:
        for (name, labels), count in counts.items():
            rest = name, tuple(each for each in labels if each[0] != label)
            sums[rest] = sums.get(rest, 0.0) + count
    return sums


def shortened(inspection: Inspection) -> Inspection | None:
    """The same with less in it, for one that does not fit into its datagram; its `node` names what is missing. None:
    there is nothing to leave out."""
    if inspection.peers:
        return msgspec.structs.replace(inspection, node=_without(inspection, "peers"), peers=[])
    if inspection.counters or inspection.gauges:
        left_out = _without(inspection, "counters, gauges")
        return msgspec.structs.replace(inspection, node=left_out, counters={}, gauges={})
    return None


def _without(inspection: Inspection, what: str) -> dict[str, str]:
    so_far = inspection.node.get("left_out")
    return {**inspection.node, "left_out": f"{so_far}, {what}" if so_far else what}
