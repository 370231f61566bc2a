"""What is known of a want that is not answered yet.

Owns no more than that: `Wants` decides what comes next.
"""

from __future__ import annotations

from collections import Counter

from ec_p2p.node.messages import Want
from ec_p2p.node.sessions import Session


class Waiting:
    """One want with unanswered items."""

    __slots__ = (
        "deadline",
        "expect_until",
        "expecting",
        "failures",
        "instance",
        "looked",
        "off_device",
        "open",
        "session",
        "staged",
        "want",
    )

    def __init__(self, session: Session, want: Want, now: float) -> None:
        self.session = session
        self.want = want
        self.instance = session.attach.instance
        self.deadline = now + want.wait_ms / 1000
        self.expect_until = now + want.expect_ms / 1000
        self.expecting = want.expect_ms > 0
        self.open = set(range(len(want.items)))
        self.staged: set[int] = set()
        self.looked: set[int] = set()
        self.off_device = set() if want.landing == "device" else self.open.copy()
        """Items that do not land on devices, or have failed to."""
        self.failures: Counter[int] = Counter()
