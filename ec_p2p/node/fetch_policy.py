"""Whether an entry is worth fetching, for somebody who could also encode it.

Owns what this host's encodes have taken lately. Must never stand in the way of somebody who cannot encode.
"""

from __future__ import annotations

from collections.abc import Sequence

from ec_p2p.control.messages import NodeInfo
from ec_p2p.node.fetch import Holder
from ec_p2p.node.rates import Rates

POLICIES = ("always", "cheaper", "never")

_KEPT = 0.9
"""Of what was counted before each new encode: about the last ten count."""


class EncodeTimes:
    """What encoding takes, and makes, for each row, from what the instances of this host announce and then commit. Used
    by the node's loop only.

    The encodes of one step are announced together and committed one after the other. So each takes from its own
    announcement, or from the commit before it, whichever was later.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._rows = 0.0
        self._bytes = 0.0
        self._last_commit: dict[str, float] = {}

    def committed(self, instance: str, rows: int, nbytes: int, announced_at: float, now: float) -> None:
        """An encode that `instance` had announced is in the arena."""
        began = max(announced_at, self._last_commit.get(instance, announced_at))
        self._last_commit[instance] = now
        self._seconds = _KEPT * self._seconds + max(0.0, now - began)
        self._rows = _KEPT * self._rows + rows
        self._bytes = _KEPT * self._bytes + nbytes

    def forget(self, instance: str) -> None:
        self._last_commit.pop(instance, None)

    @property
    def seconds_per_row(self) -> float | None:
        """None until something was encoded here."""
        return self._seconds / self._rows if self._rows else None

    @property
    def bytes_per_row(self) -> float:
        """0.0 until something was encoded here."""
        return self._bytes / self._rows if self._rows else 0.0


class FetchPolicy:
    """Used by the node's loop only."""

    def __init__(self, policy: str, rates: Rates, times: EncodeTimes) -> None:
        """`policy` is one of POLICIES."""
        self._policy = policy
        self._rates = rates
        self._times = times

    def against(self, holders: Sequence[Holder]) -> str:
        """Why an entry should rather be encoded than fetched from the first of `holders`; empty when it should not.
        What was not measured lately is fetched, and measured so, but not from who has just failed."""
        if self._policy == "always":
            return ""
        if self._policy == "never":
            return "not_fetched"
        info, advert = holders[0]
        return self._dearer(info, advert.rows, advert.nbytes)

    def against_waiting(self, encoders: Sequence[NodeInfo], rows: int) -> str:
        """Why an entry of so many rows (0: unknown) that these nodes are computing should rather be encoded here as
        well; empty when it is worth waiting for, since it would be fetched from one of them."""
        if self._policy == "always":
            return ""
        if self._policy == "never":
            return "not_fetched"
        if not rows:
            return ""
        nbytes = round(rows * self._times.bytes_per_row)
        reasons = [self._dearer(info, rows, nbytes) for info in encoders]
        return "" if "" in reasons else reasons[0]

    def _dearer(self, info: NodeInfo, rows: int, nbytes: int) -> str:
        if self._rates.distrusted(info.incarnation):
            return "encode_is_cheaper"
        fetch_s = self._rates.expected_s(info.incarnation, nbytes)
        per_row = self._times.seconds_per_row
        if fetch_s is None or per_row is None or fetch_s <= rows * per_row:
            return ""
        return "encode_is_cheaper"
