"""Counts and gauges under names without a structure, for tools and tests."""

from __future__ import annotations

from collections.abc import Mapping

from ec_p2p.engine.tally import Series


def flat(values: Mapping[Series, float]) -> dict[str, float]:
    """'arena_bytes{kind=used}' -> value."""
    return {
        name + ("{" + ",".join(f"{key}={text}" for key, text in labels) + "}" if labels else ""): value
        for (name, labels), value in values.items()
    }
