"""What is known of each media item of each live request.

Owns the states of an item and the table of their transitions; every change goes through it. It must never talk to the
node or to vLLM. The same identifier twice in a prompt is one item.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any


class State(Enum):
    UNASKED = auto()
    """Nothing is known yet, or no longer."""
    RESIDENT = auto()
    """In vLLM's own encoder cache, as far as we see; only items with media may rest on that."""
    WANTED = auto()
    """The node has been asked and has not answered."""
    LEASED = auto()
    """Landed and pinned: a load of it cannot fail."""
    MISSING = auto()
    """The node's answer is no: encode here, or fail the request."""
    ALLOCATED = auto()
    """vLLM has made room for it in this step or before, and loads or encodes it."""


class Event(Enum):
    FOUND = auto()
    """It is in vLLM's encoder cache."""
    EVICTED = auto()
    """It no longer is."""
    ASKED = auto()
    LANDED = auto()
    MISSED = auto()
    VOIDED = auto()
    """What the node said no longer counts: it died, the lease went to another request, or asking again is worth it."""
    ALLOCATED = auto()
    FREED = auto()
    """vLLM keeps it no longer for this request, which may yet need it: it gives that up with an item's first occurrence
    if a later one was not scheduled by then."""
    REWOUND = auto()
    """The request was preempted and starts over."""


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.UNASKED, Event.FOUND): State.RESIDENT,
    (State.UNASKED, Event.ASKED): State.WANTED,
    (State.UNASKED, Event.MISSED): State.MISSING,
    (State.UNASKED, Event.ALLOCATED): State.ALLOCATED,
    (State.RESIDENT, Event.EVICTED): State.UNASKED,
    (State.RESIDENT, Event.LANDED): State.LEASED,
    (State.RESIDENT, Event.ALLOCATED): State.ALLOCATED,
    (State.RESIDENT, Event.REWOUND): State.UNASKED,
    (State.WANTED, Event.LANDED): State.LEASED,
    (State.WANTED, Event.MISSED): State.MISSING,
    (State.WANTED, Event.VOIDED): State.UNASKED,
    (State.WANTED, Event.ALLOCATED): State.ALLOCATED,
    (State.WANTED, Event.REWOUND): State.WANTED,
    (State.LEASED, Event.VOIDED): State.UNASKED,
    (State.LEASED, Event.ALLOCATED): State.ALLOCATED,
    (State.LEASED, Event.REWOUND): State.LEASED,
    (State.MISSING, Event.FOUND): State.RESIDENT,
    (State.MISSING, Event.VOIDED): State.UNASKED,
    (State.MISSING, Event.ALLOCATED): State.ALLOCATED,
    (State.MISSING, Event.REWOUND): State.UNASKED,
    # What vLLM has gets a spare lease where possible: vLLM may reset its cache, and tells nobody.
    (State.ALLOCATED, Event.ASKED): State.WANTED,
    (State.ALLOCATED, Event.MISSED): State.ALLOCATED,
    (State.ALLOCATED, Event.ALLOCATED): State.ALLOCATED,
    (State.ALLOCATED, Event.REWOUND): State.UNASKED,
    (State.UNASKED, Event.REWOUND): State.UNASKED,
    # From now on it may be evicted at any time: what is needed of it once more is asked for like anything else.
    (State.UNASKED, Event.FREED): State.UNASKED,
    (State.RESIDENT, Event.FREED): State.RESIDENT,
    (State.WANTED, Event.FREED): State.WANTED,
    (State.LEASED, Event.FREED): State.LEASED,
    (State.MISSING, Event.FREED): State.UNASKED,
    (State.ALLOCATED, Event.FREED): State.UNASKED,
}

SETTLED = frozenset({State.RESIDENT, State.LEASED, State.MISSING, State.ALLOCATED})


class Item:
    """One distinct media item of one request."""

    __slots__ = (
        "checked",
        "counted",
        "deadline",
        "has_media",
        "hinted",
        "identifier",
        "identity",
        "kept",
        "missed_at",
        "needed",
        "placed",
        "reason",
        "reconsidered",
        "retry_at",
        "rows",
        "shareable",
        "spans",
        "state",
    )

    def __init__(
        self, identifier: str, identity: bytes, rows: int, *, has_media: bool, shareable: bool, hinted: bool
    ) -> None:
        self.identifier = identifier
        self.identity = identity
        self.rows = rows
        self.spans: list[tuple[int, int]] = []
        """Where it occurs: the prompt's position of its first token, and the one after its last."""
        self.has_media = has_media
        """It can be encoded here."""
        self.shareable = shareable
        self.hinted = hinted
        self.state = State.UNASKED
        self.reason = ""
        """Why it is MISSING."""
        self.missed_at = 0.0
        """Since when it is."""
        self.reconsidered = False
        """An answer that had become old has been asked for anew."""
        self.placed = False
        """vLLM has made room for it for this request."""
        self.kept = False
        """It has, and keeps it in its encoder cache as long as this request needs it there."""
        self.deadline = 0.0
        """When we stop believing that the node will answer; 0.0 before the first try."""
        self.retry_at = 0.0
        self.needed = False
        """Some token has needed it: it is not covered by a prefix cache."""
        self.counted = False
        """Its lookup has been."""
        self.checked = False
        """The node has been asked for it although vLLM has it."""

    def apply(self, event: Event) -> None:
        """Raises ValueError for an event that this state does not know."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise ValueError(f"{event.name} is impossible for an item that is {self.state.name}") from None
        still_asked = event is Event.REWOUND and self.state is State.WANTED and not self.kept
        if event in (Event.LANDED, Event.ALLOCATED, Event.FREED, Event.REWOUND) and not still_asked:
            self.deadline = 0.0
        if event is Event.ALLOCATED:
            self.placed = self.kept = True
        elif event is Event.FREED:
            self.kept = False
        elif event is Event.REWOUND:
            self.placed = self.kept = False
        elif event is Event.EVICTED:
            self.checked = False

    @property
    def settled(self) -> bool:
        """Whether the request need not wait for it. One that vLLM keeps for us already is not waited for again."""
        return self.kept or self.state in SETTLED

    @property
    def end(self) -> int:
        """The prompt's position after its last occurrence."""
        return max(end for _, end in self.spans)

    def is_begun(self, computed: int, lookahead: int = 0) -> bool:
        """Whether one of its occurrences is computed in part, or about to be, by a drafter that sees `lookahead` tokens
        further: vLLM keeps it for that one."""
        return any(begin < computed + lookahead and computed < end for begin, end in self.spans)


class RequestRecord:
    """One live request with media, and its items by identifier."""

    __slots__ = (
        "_known",
        "admitted",
        "computed",
        "contradiction",
        "failed",
        "items",
        "preemptions",
        "request_id",
        "wants",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.items: dict[str, Item] = {}
        self.computed = 0
        """Tokens that need no embedding any more, as of the last look."""
        self.preemptions = 0
        self.admitted = False
        self.failed = False
        self.contradiction: Item | None = None
        """An item that the prompt gives two sizes: no embedding can be right for both."""
        self.wants: list[int] = []
        self._known = 0

    def grow(self, features: list[Any], make: Callable[[Any], Item]) -> None:
        """Take in features that are new: a streaming session's request grows."""
        for feature in features[self._known :]:
            made = make(feature)
            item = self.items.setdefault(made.identifier, made)
            if item.rows != made.rows:
                self.contradiction = item
            # The encoder would take any one of an item's occurrences.
            item.has_media = item.has_media and made.has_media
            item.shareable = item.shareable and made.shareable
            position = feature.mm_position
            item.spans.append((position.offset, position.offset + position.length))
            self._known += 1

    def beyond(self, computed: int) -> list[Item]:
        """The items that tokens from `computed` on still need."""
        return [item for item in self.items.values() if item.end > computed]

    def rewind(self) -> None:
        for item in self.items.values():
            item.apply(Event.REWOUND)
