"""Counts that several threads add to.

Owns numbers by name and labels, never what they mean.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable

Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]
"""One metric with its label values."""


class Tally:
    """Monotonic counts, until they are forgotten. Those named at the start are there from the start, as zeros."""

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._lock = threading.Lock()
        self._values: dict[Series, float] = dict.fromkeys(series, 0.0)
        self._forgotten: dict[Series, float] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.add_all(((name, tuple(labels.items())), amount))

    def add_all(self, *amounts: tuple[Series, float]) -> None:
        """The same for several at once."""
        values = self._values
        with self._lock:
            for series, amount in amounts:
                values[series] = values.get(series, 0.0) + amount

    def add_error(self, op: str, error: OSError) -> None:
        """Count an error of the disk under its symbolic name."""
        self.add("disk_errors", op=op, errno=errno.errorcode.get(error.errno or 0, "unknown"))

    def get(self, name: str, **labels: str) -> float:
        return self._values.get((name, tuple(labels.items())), 0.0)

    def forget(self, label: str, text: str) -> None:
        """Drop the counts of this label value; if they are added to again, they begin anew. `forgotten` has them
        without the label, so that a sum over all of its values does not go down."""
        with self._lock:
            for series in [series for series in self._values if (label, text) in series[1]]:
                name, labels = series
                rest = name, tuple(each for each in labels if each[0] != label)
                self._forgotten[rest] = self._forgotten.get(rest, 0.0) + self._values.pop(series)

    def forgotten(self) -> dict[Series, float]:
        with self._lock:
            return dict(self._forgotten)

    def values(self) -> dict[Series, float]:
        with self._lock:
            return dict(self._values)
