"""What is known of a want that is not answered yet.

Owns no more than that: `Wants` decides what comes next.
"""

from __future__ import annotations

import msgspec

from ec_p2p.node.messages import Want
from ec_p2p.node.sessions import Session


class Waiting(msgspec.Struct, eq=False):
    """One want with unanswered items, which are said by their indices."""

    session: Session
    instance: str
    want: Want
    deadline: float
    expect_until: float
    expecting: bool
    open: set[int]
    off_device: set[int]
    """Those that do not land on devices, or have failed to."""
    staged: set[int] = msgspec.field(default_factory=set)
    looked: set[int] = msgspec.field(default_factory=set)
    failures: dict[int, int] = msgspec.field(default_factory=dict)


def waiting_for(session: Session, want: Want, now: float) -> Waiting:
    """Nothing is answered yet."""
    items = range(len(want.items))
    return Waiting(
        session,
        session.attach.instance,
        want,
        now + want.wait_ms / 1000,
        now + want.expect_ms / 1000,
        want.expect_ms > 0,
        set(items),
        set() if want.landing == "device" else set(items),
    )
