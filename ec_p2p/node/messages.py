"""What a node and its clients say to each other on one host.

Owns the attach handshake and the messages that follow it on the same Unix socket (SOCK_SEQPACKET, one message a
datagram). A client is a vLLM scheduler, a vLLM worker, or a tool. Same wire rules as the control plane: tagged
MessagePack arrays, fields only ever added at the end.

Not over ZMQ: that takes each message through two more threads, and a round trip 109 us instead of 39.

Offsets are bytes into the arena whose memfd the attach reply carries.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ec_p2p.control.messages import Identity, Natural

CLIENT_PROTOCOL_VERSION = 1


# ---------------------------------------------------------------- handshake


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """First message of a client. The socket then stays open for the client's life."""

    version: int
    kind: str
    """'scheduler', 'worker', 'lander' (of a worker: it READs into the memory of its device) or 'tool'."""
    instance: str
    """Equal for the scheduler and the workers of one vLLM engine (engine id and data-parallel index)."""
    rank: int
    """Distinguishes the workers of one instance; -1 for others."""
    role: str = ""
    """Of the instance: 'producer', 'consumer' or 'both'; empty for tools."""
    namespace: str = ""
    """Of the instance's entries; empty where the client does not know it: workers do not."""


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """The node's answer; the arena's memfd travels with it as ancillary data."""

    version: int
    incarnation: bytes
    node_name: str
    arena_bytes: int
    slab_bytes: int
    largest_entry: int
    """Bytes of the largest entry, and the largest window, that the arena takes."""
    metrics_port: int
    """Port of the node's /metrics on 127.0.0.1; 0 where there is none."""


class AttachRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    reason: str


# ---------------------------------------------------------------- client -> node


class WantItem(msgspec.Struct, frozen=True, array_like=True):
    identity: Identity
    rows: Natural
    """Rows that the request's placeholder needs: an entry with another number of rows is not a hit. 0: any."""
    can_encode: bool = False
    """The instance has the media, and could do without: see the setting `fetch_policy`."""


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """A request needs these entries, all of them together.

    Each item is answered by Landed or Missing; items that cannot be answered at once are first answered by Pending.
    A Landed item is leased to this client until Release, Forget or the end of its socket.
    """

    want: int
    """Chosen by the client, never reused within its life."""
    items: list[WantItem]
    readers: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    """How many workers of this instance will copy each item (the tensor-parallel ranks on this host)."""
    wait_ms: Natural
    """Deadline for the whole want; what has not landed by then is Missing('deadline')."""
    expect_ms: Natural
    """How long an item that nobody advertises yet is waited for; 0 answers Missing('no_source') at once."""
    local_only: bool
    """True: only what this host holds, or is encoding, counts; nothing is fetched."""
    landing: str = "host"
    """Where a fetch is to land: in the node's arena, or, with 'device', in the memory of each reader's device, if that
    can be done."""


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """The request is gone: release its undispatched leases, stop waiting. A fetch in flight goes on, as cache."""

    want: int


class Dispatched(msgspec.Struct, frozen=True, array_like=True, tag="dispatched"):
    """The load of this lease is on its way to the workers: from now only the readers' Release ends it."""

    lease: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A worker has copied (reader = its rank), or the scheduler drops an undispatched lease (reader = -1)."""

    lease: int
    reader: int


class Encoding(msgspec.Struct, frozen=True, array_like=True, tag="encoding"):
    """These entries are about to be computed on this instance: others wait for them instead of encoding too."""

    identities: list[Identity]


class OpenWindow(msgspec.Struct, frozen=True, array_like=True, tag="open_window"):
    request: int
    nbytes: int


class CloseWindow(msgspec.Struct, frozen=True, array_like=True, tag="close_window"):
    """Give back what the client has not committed."""

    window: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """Bytes [offset, offset+nbytes) of the window are in place and are this entry. There is no answer."""

    window: int
    identity: Identity
    offset: Natural
    nbytes: Natural
    rows: Natural
    dim: Natural
    dtype: str
    """'bfloat16', 'float16', 'float32' ...: the torch name without its prefix."""


class SaveSkipped(msgspec.Struct, frozen=True, array_like=True, tag="save_skipped"):
    """A worker could not save an encoder output. The node counts it and passes it on to the instance's scheduler."""

    reason: str
    """One of SKIP_REASONS."""
    identity: bytes = b""
    """Of the output; others stop waiting for it."""


SKIP_REASONS = (
    "no_window",
    "too_large",  # for the arena
    "layout",  # not two dimensions, or a dtype that is not shared
    "error",
)


class ReadEnded(msgspec.Struct, frozen=True, array_like=True, tag="read_ended"):
    """Of a lander: the entry is in its device's memory, and was whole; or not, and nothing is kept of it."""

    read: int
    reason: str
    """Empty: landed. Else one of READ_REASONS."""


READ_REASONS = (
    "no_memory",  # the device's landing memory has no room
    "changed",  # what was read is not the entry
    "refused",  # the lander is not connected to the holder, or knows too little of its arena
    "disconnected",
    "late",  # longer than read_timeout_s
    "stuck",  # an earlier READ from this holder was late, and may still write
    "error",  # of the lander
)


class Quarantined(msgspec.Struct, frozen=True, array_like=True, tag="quarantined"):
    """Of a lander: what READs that were late may yet write to, whenever that changes."""

    nbytes: Natural
    """Now, of its device's memory."""
    entries: Natural
    """That were put there since it last said so."""


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """Answered by Synced once everything this client sent before has been handled."""

    token: int


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="inspect"):
    """Answered by Inspection."""

    token: int


# ---------------------------------------------------------------- node -> client


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    want: int
    index: int
    lease: int
    offset: int
    nbytes: int
    rows: int
    dim: int
    dtype: str
    source: str
    """'local' when this host had it in memory, 'disk' when it was on its disk, else 'remote'."""
    seconds: float
    """Time the fetch or the staging took inside the node, from its start to landed; 0.0 for 'local'."""
    read: int = 0
    """Not 0: it is not in the arena, but in the memory of each reader's device, as ReadEntry of this number said."""


class Missing(msgspec.Struct, frozen=True, array_like=True, tag="missing"):
    want: int
    index: int
    reason: str
    """One of MISSING_REASONS."""


MISSING_REASONS = (
    "no_source",  # nobody holds it, nobody is encoding it
    "deadline",  # a source was known or expected, the bytes did not arrive in time
    "failed",  # every holder's read failed or did not validate
    "rows",  # what the fleet holds has another number of rows
    "too_large",  # the items of this want can never be in the arena together
    "no_memory",  # everything in the arena is pinned
    "no_readers",  # the instance's workers are not attached to this node
    "not_fetched",  # fetch_policy is never, and the instance can encode it
    "encode_is_cheaper",  # as far as was measured, and the instance can encode it
)

OUT_OF_TIME = ("deadline", "no_memory")
"""Those of them that may be otherwise a moment later."""


class Pending(msgspec.Struct, frozen=True, array_like=True, tag="pending"):
    want: int
    index: int
    why: str
    """'fetching', 'staging', 'encoding' or 'expected'."""


class Window(msgspec.Struct, frozen=True, array_like=True, tag="window"):
    request: int
    window: int
    offset: int
    nbytes: int


class NoWindow(msgspec.Struct, frozen=True, array_like=True, tag="no_window"):
    request: int
    reason: str


class Saved(msgspec.Struct, frozen=True, array_like=True, tag="saved"):
    """To the scheduler of the instance whose worker committed this entry: it is stored and advertised."""

    identity: bytes
    nbytes: int


class PeerCard(msgspec.Struct, frozen=True, array_like=True, tag="peer_card"):
    """To a lander: how the arena of this peer can be read, from now on."""

    peer: bytes
    blob: bytes


class PeerGone(msgspec.Struct, frozen=True, array_like=True, tag="peer_gone"):
    peer: bytes


class ReadEntry(msgspec.Struct, frozen=True, array_like=True, tag="read_entry"):
    """To a lander: READ this entry of a peer's arena, and its record after it, and answer by ReadEnded. What has landed
    stays until DropEntry."""

    read: int
    peer: bytes
    offset: Natural
    record: Natural
    generation: int
    identity: Identity
    nbytes: Natural
    rows: Natural
    dim: Natural
    dtype: str


class DropEntry(msgspec.Struct, frozen=True, array_like=True, tag="drop_entry"):
    """To a lander: nobody needs what this READ brings, or has brought."""

    read: int


class Synced(msgspec.Struct, frozen=True, array_like=True, tag="synced"):
    token: int


class Inspection(msgspec.Struct, frozen=True, array_like=True, tag="inspection"):
    """State of the node for tools and tests. Keys are documented in docs/protocol.md."""

    token: int
    node: dict[str, str]
    """incarnation (hex), name, address, transport, metrics_port, directory, pid."""
    counters: dict[str, float]
    gauges: dict[str, float]
    peers: list[str]
    """Names of the nodes this node's replica knows, itself excluded."""


ToNode = (
    Want
    | Forget
    | Dispatched
    | Release
    | Encoding
    | OpenWindow
    | CloseWindow
    | Commit
    | SaveSkipped
    | ReadEnded
    | Quarantined
    | Sync
    | Inspect
)
ToLander = PeerCard | PeerGone | ReadEntry | DropEntry
FromNode = Landed | Missing | Pending | Window | NoWindow | Saved | SaveSkipped | Synced | Inspection | ToLander


class Several(msgspec.Struct, frozen=True, array_like=True, tag="several"):
    """Messages of the node in one datagram, in their order."""

    messages: list[FromNode]
