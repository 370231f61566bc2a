"""What one node says to one directory, and when: that it is there, what it holds, and all of it again where that is
needed.

Owns the changes not yet sent, and where the conversation stands. Pure: no sockets, no clock of its own. Must never
keep more than one change per identity, nor take for known what was sent before the last hello.

| state | meaning | what ends it |
|---|---|---|
| unknown | a hello is due | it is sent: greeted |
| greeted | a hello was sent | a welcome: welcomed. None for `heartbeat_s`: another hello |
| welcomed | changes and heartbeats follow | another epoch, or `hello!`: unknown |
| refused | it speaks another version | a hello is due again after 10 s; a welcome of this version: welcomed |
| left | nothing is said any more | nothing |

At most `_AHEAD` announces are on their way: a heartbeat after every few asks for a welcome, which says what was read.
More would fill the connection's buffers where a directory is behind with reading many nodes at once. The kernel takes
it for dead then, and everything that was said is lost and said again, which puts the directory further behind.

A refusal ends any state but left, `leave` any. Silence ends none: to say everything again to a directory that is slow
because much is said to it would make it slower still, for all. A heartbeat finds out whether it still knows this node.
"""

from __future__ import annotations

import logging
from enum import Enum, auto
from itertools import islice

from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Advert,
    Announce,
    FromDirectory,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    InstanceInfo,
    NodeInfo,
    Refused,
    Welcome,
)

log = logging.getLogger(__name__)

_BATCH = 1024
_AHEAD = 8
"""Announces that the directory has not said to have read. Together with heartbeats they find room in its queue."""
_ASK_AFTER = 4
_REFUSED_RETRY_S = 10.0


class Standing(Enum):
    UNKNOWN = auto()
    GREETED = auto()
    WELCOMED = auto()
    REFUSED = auto()
    LEFT = auto()


class Announcing:
    """When `next_event` has come, offer `next_message` to the socket and tell with `sent` that it was taken. `name` is
    the directory's, for logs. `now` is seconds of any clock that never goes back; one thread's.
    """

    def __init__(self, name: str, node: NodeInfo, heartbeat_s: float, timeout_s: float) -> None:
        self.refused = ""
        """Why the directory will not talk to this node; empty while it does."""
        self.standing = Standing.UNKNOWN
        self.counters = dict.fromkeys(("hellos", "announces", "heartbeats"), 0)
        self._name = name
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._entries: dict[bytes, Advert] = {}
        self._pending: dict[bytes, Advert | None] = {}
        self._instances: list[InstanceInfo] = []
        self._instances_pending = False
        self._epoch = b""
        self._seq = 0
        self._asked = 0
        """The seq that the last heartbeat told."""
        self._read: float = 0
        """Announces up to this one have been read; infinity where the directory does not tell."""
        self._heard = 0.0
        self._silent = False
        self._next_hello = float("-inf")
        self._next_heartbeat = 0.0

    def connected(self, now: float) -> bool:
        """The directory knows this node and was heard from recently."""
        return self._welcomed and now - self._heard <= self._timeout_s

    @property
    def pending(self) -> int:
        """Changes not yet sent; everything, while not welcomed."""
        return len(self._pending) if self._welcomed else len(self._entries)

    # -------------------------------------------------------- what the node does

    def store(self, advert: Advert) -> None:
        """This node holds the entry, from now on, as described."""
        self._entries[advert.identity] = advert
        if self._welcomed:
            self._pending[advert.identity] = advert

    def withdraw(self, identity: bytes) -> None:
        """This node does not hold the entry any more. Unknown identities are ignored."""
        if self._entries.pop(identity, None) is not None and self._welcomed:
            self._pending[identity] = None

    def describe(self, instances: list[InstanceInfo]) -> None:
        """These instances are attached to this node, from now on."""
        self._instances = instances
        self._instances_pending = self._welcomed

    def leave(self) -> Goodbye | None:
        """Nothing more is said but this, now or never. None: the directory has never heard of this node.

        Also without a welcome: a hello whose answer is still on its way made the node known all the same.
        """
        may_be_known = bool(self.counters["hellos"]) and self.standing not in (Standing.REFUSED, Standing.LEFT)
        self.standing = Standing.LEFT
        self._pending.clear()
        return Goodbye(self._node.incarnation) if may_be_known else None

    # -------------------------------------------------------- what the directory says

    def take(self, message: FromDirectory, now: float) -> None:
        if self.standing is Standing.LEFT:
            return
        if isinstance(message, Refused) or (isinstance(message, Welcome) and message.version != PROTOCOL_VERSION):
            self._be_refused(message, now)
            return
        self._heard = now
        if isinstance(message, Welcome):
            if not self._welcomed:
                self._be_welcomed(message, now)
            elif message.epoch != self._epoch:
                self._start_over(now)
            else:
                self._note_read(message.seq)
        # One in answer to what was sent before the last hello says nothing new: until the welcome they are ignored.
        elif isinstance(message, HelloAgain) and self._welcomed:
            log.info("directory %s asks for everything again", self._name)
            self._start_over(now)

    # -------------------------------------------------------- what is said

    def tick(self, now: float) -> None:
        """Notice silence."""
        silent = self._welcomed and not self.connected(now)
        if silent and not self._silent:
            log.warning("directory %s is silent", self._name)
        self._silent = silent

    def next_event(self) -> float:
        """When there is something to say, if nothing happens before: in the past for 'at once'."""
        if self.standing is Standing.LEFT:
            return float("inf")
        if not self._welcomed:
            return self._next_hello
        has_news = self._pending or self._instances_pending
        return float("-inf") if has_news and (self._may_announce or self._should_ask) else self._next_heartbeat

    def next_message(self, now: float) -> Hello | Announce | Heartbeat | None:
        """What is to be sent now. None: nothing yet."""
        if now < self.next_event():
            return None
        if not self._welcomed:
            return Hello(PROTOCOL_VERSION, self._node)
        # Before any announce: only a heartbeat is answered, and a node that always has something to say wants to know
        # that it is heard.
        if now >= self._next_heartbeat or self._should_ask:
            return Heartbeat(self._node.incarnation, self._seq)
        batch = dict(islice(self._pending.items(), _BATCH))
        adverts = [advert for advert in batch.values() if advert is not None]
        withdrawn = [identity for identity, advert in batch.items() if advert is None]
        instances = self._instances if self._instances_pending else None
        return Announce(self._node.incarnation, self._seq + 1, adverts, withdrawn, instances)

    def sent(self, message: Hello | Announce | Heartbeat, now: float) -> None:
        """The socket took `message`, which is what `next_message` said last."""
        if isinstance(message, Hello):
            self.counters["hellos"] += 1
            if self.standing is Standing.UNKNOWN:
                self.standing = Standing.GREETED
            self._next_hello = now + (_REFUSED_RETRY_S if self.standing is Standing.REFUSED else self._heartbeat_s)
        elif isinstance(message, Heartbeat):
            self.counters["heartbeats"] += 1
            self._next_heartbeat = now + self._heartbeat_s
            self._asked = message.seq
        else:
            self.counters["announces"] += 1
            self._seq = message.seq
            self._instances_pending = False
            for identity in message.withdrawn:
                del self._pending[identity]
            for advert in message.adverts:
                del self._pending[advert.identity]

    @property
    def _may_announce(self) -> bool:
        return self._seq - self._read < _AHEAD

    @property
    def _should_ask(self) -> bool:
        """A heartbeat is due for the sake of its answer."""
        return self._seq - self._asked >= _ASK_AFTER

    def _note_read(self, seq: int | None) -> None:
        if seq is None:
            self._read = float("inf")
        elif seq <= self._asked:  # not, where it answers to what was before the last hello
            self._read = max(self._read, seq)

    # -------------------------------------------------------- transitions

    @property
    def _welcomed(self) -> bool:
        return self.standing is Standing.WELCOMED

    def _be_welcomed(self, message: Welcome, now: float) -> None:
        log.info("directory %s knows this node; announcing %d entries", self._name, len(self._entries))
        self.standing = Standing.WELCOMED
        self.refused = ""
        self._epoch = message.epoch
        self._seq = self._asked = 0
        self._read = 0
        self._note_read(message.seq)
        self._pending = dict(self._entries)
        self._instances_pending = bool(self._instances)
        self._next_heartbeat = now + self._heartbeat_s

    def _be_refused(self, message: Refused | Welcome, now: float) -> None:
        reason = message.reason if isinstance(message, Refused) else f"it speaks version {message.version}"
        if reason != self.refused:
            log.error("directory %s refuses this node: %r", self._name, reason)
        self.refused = reason or "no reason given"
        self.standing = Standing.REFUSED
        self._pending.clear()
        self._next_hello = now + _REFUSED_RETRY_S

    def _start_over(self, now: float) -> None:
        self.standing = Standing.UNKNOWN
        self._pending.clear()
        self._next_hello = now
