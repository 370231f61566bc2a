"""Entries that an instance of this host is computing right now.

Owns the promise's expiry: an encode that was announced may never happen (its request was preempted, its engine died),
so nobody waits for it longer than ENCODE_LIFETIME_S.
"""

from __future__ import annotations

ENCODE_LIFETIME_S = 10.0


class Encodings:
    def __init__(self) -> None:
        self._until: dict[bytes, tuple[str, float]] = {}

    def begin(self, identity: bytes, instance: str, now: float) -> None:
        self._until[identity] = (instance, now + ENCODE_LIFETIME_S)

    def begun_at(self, identity: bytes, instance: str) -> float | None:
        """When this instance has announced it; None if it has not."""
        found = self._until.get(identity)
        return found[1] - ENCODE_LIFETIME_S if found is not None and found[0] == instance else None

    def end(self, identity: bytes) -> None:
        self._until.pop(identity, None)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._until

    def of(self, instance: str) -> list[bytes]:
        return [identity for identity, (owner, _) in self._until.items() if owner == instance]

    def by(self, identity: bytes, instance: str) -> bool:
        found = self._until.get(identity)
        return found is not None and found[0] == instance

    def by_another(self, identity: bytes, instance: str) -> bool:
        """Whether an instance other than this one is computing it: nobody waits for itself."""
        found = self._until.get(identity)
        return found is not None and found[0] != instance

    def expire(self, now: float) -> list[bytes]:
        """Forget, and return, what was announced too long ago."""
        late = [identity for identity, (_, until) in self._until.items() if now >= until]
        for identity in late:
            del self._until[identity]
        return late
