"""What a node, or a tool, uses of a directory, whatever kind of server that is.

Owns nothing: two small interfaces, one for telling and one for following. Each kind of directory implements both:
ZMQ (`announcer`, `replica`) and a Valkey or Redis server (`valkey_announcer`, `valkey_replica`). `directories` chooses.
Code outside this room must never ask which kind it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from ec_p2p.control.messages import Advert, InstanceInfo, NodeInfo
from ec_p2p.control.sockets import Socket

Pollable: TypeAlias = "Socket | int"
"""Something for a `zmq.Poller`: a ZMQ socket, or the file descriptor of an eventfd."""


class Announces(Protocol):
    """One node's side towards one directory. Driven by the loop of one thread: poll `sockets` for input and then call
    `on_readable`; call `tick` after every turn, and again no later than it says. Times are `time.monotonic()`.

    Nothing here blocks. `store`, `withdraw` and `describe` only note a change; the next `tick` passes it on. A
    directory that is absent, hangs or forgets costs nothing but that: it is told everything again.
    """

    @property
    def endpoint(self) -> str:
        """Of the directory, fit to be shown."""

    @property
    def refused(self) -> str:
        """Why the directory will not talk to this node; empty while it does, or is not reached."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    @property
    def sockets(self) -> tuple[Pollable, ...]:
        """The same ones for the announcer's whole life."""

    @property
    def connected(self) -> bool:
        """The directory knows this node and was heard from recently."""

    @property
    def pending(self) -> int:
        """Changes not yet passed on; everything, while the directory does not know this node."""

    def store(self, advert: Advert) -> None:
        """This node holds the entry, from now on, as described."""

    def withdraw(self, identity: bytes) -> None:
        """This node does not hold the entry any more. Unknown identities are ignored."""

    def describe(self, instances: list[InstanceInfo]) -> None:
        """These instances are attached to this node, from now on."""

    def goodbye(self) -> None:
        """Leave: everything of this node goes from the directory, and nothing more is said."""

    def on_readable(self) -> None: ...

    def tick(self, now: float) -> float:
        """Seconds until the next call is wanted; 0.0 when there is more to pass on."""

    def close(self) -> None:
        """Takes a bounded time. Without a goodbye before, the directory notices the silence."""


class Replicates(Protocol):
    """A local copy of what one directory knows. Driven by the loop of one thread, as `Announces` is.

    The copy is soft: it stays when the directory is lost, and what it says is validated when it is used. Callbacks
    given to `directories.replicate` come from inside `on_readable` and `tick`, after the change.
    """

    @property
    def endpoint(self) -> str:
        """Of the directory, fit to be shown."""

    @property
    def sockets(self) -> tuple[Pollable, ...]:
        """The same ones for the replica's whole life."""

    @property
    def fresh(self) -> bool:
        """The copy was equal to what the directory knew, not longer than `node_timeout_s` ago."""

    @property
    def position(self) -> tuple[bytes, int] | None:
        """Epoch and number of the last change that the copy contains; None while a snapshot is wanted."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def __len__(self) -> int:
        """Adverts known."""

    def lookup(self, identity: bytes) -> list[tuple[NodeInfo, Advert]]:
        """Who holds the entry, this host's own node included."""

    def nodes(self) -> list[NodeInfo]: ...

    def instances(self, incarnation: bytes) -> list[InstanceInfo]:
        """The vLLM engines at a node."""

    def held_by(self, incarnation: bytes) -> list[Advert]:
        """What a node advertises."""

    @property
    def settled(self) -> bool:
        """It is fresh, nothing in it is doubted, and the directory has lived long enough to have heard of every node:
        what is not in it is nowhere."""

    def doubts(self, incarnation: bytes) -> bool:
        """Whether the directory, or the node, has begun anew, and not all that is known of the node was said again."""

    def identities(self) -> list[bytes]:
        """Every entry that somebody holds."""

    def on_readable(self, socket: Pollable) -> None:
        """Handle what came in there, a bounded amount."""

    def tick(self, now: float) -> float:
        """Seconds until the next call is wanted."""

    def close(self) -> None:
        """Takes a bounded time."""
