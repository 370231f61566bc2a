"""How often identities were used lately, whether or not their entries are still held.

Owns counters that many identities share, some bytes per entry: a count is seldom too high, and too low only in that
all are halved from time to time, since popularity passes.
"""

from __future__ import annotations

import struct

_PLACES = struct.Struct("<4Q")
_COUNTERS_PER_ENTRY = 16
_USES_PER_ENTRY = 4
"""After as many uses all counts are halved."""
_MOST = 255
_HALVES = bytes(count // 2 for count in range(_MOST + 1))


class Uses:
    """Counts by identity. An identity is a hash already: its four words say where its four counters are."""

    def __init__(self) -> None:
        self._counters = bytearray(1 << 10)
        self._since_halving = 0

    def make_room_for(self, entries: int) -> None:
        """Have counters enough for this many entries. No count changes: where one more bit of a word tells counters
        apart from now on, both start as what they were together."""
        while len(self._counters) < entries * _COUNTERS_PER_ENTRY:
            self._counters = self._counters * 2

    def count(self, identity: bytes) -> int:
        """One more use of these 32 bytes; returns how many there are."""
        counters, mask = self._counters, len(self._counters) - 1
        one, two, three, four = _PLACES.unpack(identity)
        one, two, three, four = one & mask, two & mask, three & mask, four & mask
        uses: int = min(counters[one], counters[two], counters[three], counters[four], _MOST - 1) + 1
        for place in (one, two, three, four):
            if counters[place] < uses:
                counters[place] = uses
        self._since_halving += 1
        if self._since_halving * _COUNTERS_PER_ENTRY >= len(counters) * _USES_PER_ENTRY:
            self._counters = counters.translate(_HALVES)
            self._since_halving = 0
        return uses
