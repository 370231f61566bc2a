"""Entries that instances of this host are computing right now.

Owns the promises' expiry: an encode that was announced may never happen (its request was preempted, its engine died),
so nobody waits for it longer than ENCODE_LIFETIME_S. Several instances may compute one entry: each has its own promise,
and what becomes of one says nothing of the others.
"""

from __future__ import annotations

ENCODE_LIFETIME_S = 10.0


class Encodings:
    """An entry is in it as long as one instance at least is computing it."""

    def __init__(self) -> None:
        self._until: dict[bytes, dict[str, float]] = {}
        """By identity and instance."""

    def begin(self, identity: bytes, instance: str, now: float) -> None:
        self._until.setdefault(identity, {})[instance] = now + ENCODE_LIFETIME_S

    def begun_at(self, identity: bytes, instance: str) -> float | None:
        """When this instance has announced it; None if it has not."""
        until = self._until.get(identity, {}).get(instance)
        return None if until is None else until - ENCODE_LIFETIME_S

    def end(self, identity: bytes, instance: str) -> bool:
        """This instance is not computing it any more. Whether it was."""
        owners = self._until.get(identity, {})
        was = owners.pop(instance, None) is not None
        if was and not owners:
            del self._until[identity]
        return was

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._until

    def of(self, instance: str) -> list[bytes]:
        return [identity for identity, owners in self._until.items() if instance in owners]

    def by_another(self, identity: bytes, instance: str) -> bool:
        """Whether an instance other than this one is computing it: nobody waits for itself."""
        owners = self._until.get(identity)
        return owners is not None and not owners.keys() <= {instance}

    def late(self, now: float) -> list[tuple[bytes, str]]:
        """What was announced too long ago, and by whom."""
        return [
            (identity, instance)
            for identity, owners in self._until.items()
            for instance, until in owners.items()
            if now >= until
        ]
