"""A Valkey or Redis server as a directory: its endpoint, a connection to it, and what may go wrong there.

Owns what an endpoint means and how each error of the client library is told. The library is imported when the first
such directory is named, not before. A connection is one thread's; every call may wait, at most for the timeout.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from ec_p2p.control import valkey_scripts
from ec_p2p.control.codec import BadFrame, decode, encode
from ec_p2p.control.messages import (
    PROTOCOL_VERSION,
    Advert,
    Announce,
    Changed,
    Event,
    InstanceInfo,
    Instances,
    NodeInfo,
    NodeUp,
)
from ec_p2p.wire.notation import ENDPOINT_ACCEPTED, TLS_SCHEMES, is_endpoint, without_password

_PREFIX = "ec-p2p"
_OLDEST = (6, 2)
_PAGE = 1024
_ENTRIES = 256
_ARRAY_32 = 0xDD


class BadEndpoint(ValueError):
    """An endpoint that is none, or that cannot be used here."""


class Unreachable(Exception):
    """No answer, or none that means anything. What was asked may have been done all the same."""


class Moved(Unreachable):
    """It is one of a cluster, and another one has the fleet's keys."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"the keys are said to be at {host}:{port}")
        self.host = host
        """Empty: the same."""
        self.port = port


class Refuses(Exception):
    """The server answers, and will not do what is asked."""


class Position(NamedTuple):
    """A place in the log of changes."""

    epoch: bytes
    seq: int
    nbytes: int


class Entry(NamedTuple):
    """One change in the log. `event` is None where it cannot be read."""

    at: Position
    event: Event | None
    nbytes: int


class Page(NamedTuple):
    """Some adverts of a node; with `cursor` 0 the last ones. `bad` counts those that cannot be read."""

    cursor: int
    adverts: list[Advert]
    bad: int


@dataclass(frozen=True)
class Server:
    """Where a directory is, and how one logs in there."""

    host: str
    port: int
    prefix: str
    password_file: str
    options: dict[str, Any] = field(repr=False)

    def connect(self, timeout_s: float, node_timeout_s: float) -> Connection:
        """A new connection to what is ready to be used. Raises Unreachable or Refuses."""
        redis = _library()
        options = self.options
        if self.password_file:
            options = {**options, "password": _password_in(self.password_file)}
        prefix = f"{{{self.prefix}}}"
        with _told(prefix):
            client = redis.Redis(
                host=self.host,
                port=self.port,
                protocol=2,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
                # Not a pool, which would connect anew in silence: to another life of the server.
                single_connection_client=True,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_keepalive=True,
                **options,
            )
        return Connection(client, prefix, node_timeout_s)


def parse(endpoint: str) -> Server:
    """What an endpoint means. Raises BadEndpoint, also where the library for it is missing."""
    shown = f"directory={without_password(endpoint)!r}"
    if not is_endpoint(endpoint):
        raise BadEndpoint(f"{shown}; accepted: {ENDPOINT_ACCEPTED}")
    try:
        _library()
    except ImportError as error:
        raise BadEndpoint(
            f"{shown} needs the Python package 'redis' ({error}); accepted: with it, which comes "
            "with the extra 'valkey' of ec-p2p, or a directory at 'tcp://host:14579'"
        ) from None
    parts = urlsplit(endpoint)
    files = dict(parse_qsl(parts.query))
    password_file = files.pop("password_file", "")
    options: dict[str, Any] = {"ssl": parts.scheme in TLS_SCHEMES, **files}
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    return Server(parts.hostname or "", parts.port or 0, parts.path[1:] or _PREFIX, password_file, options)


class Connection:
    """To be closed. Raises Unreachable, after which it is of no use any more, or Refuses; nothing else."""

    def __init__(self, client: Any, prefix: str, node_timeout_s: float) -> None:
        self._client = client
        self._prefix = prefix
        self._timeout_ms = max(1, round(node_timeout_s * 1000))
        self._keys = (f"{self._prefix}:about",)
        self._scripts = {
            name: client.register_script(getattr(valkey_scripts, name))
            for name in ("LOOK", "HELLO", "ANNOUNCE", "HEARTBEAT", "GOODBYE", "PAGE")
        }
        try:
            with _told(self._prefix):
                info = client.info("server")
            self._run = str(info.get("run_id", ""))
            self._first = 1
            version = str(info.get("redis_version", ""))
            if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _OLDEST:
                raise Refuses(f"it is of version {version!r}; accepted: Valkey, or Redis from 6.2 on")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.close()

    # -------------------------------------------------------- for those who announce

    def hello(self, node: NodeInfo, session: bytes) -> bytes | None:
        """The epoch. None: there is none, look first."""
        place = encode(_Place(node.name, node.address))
        return self._run_script(  # type: ignore[no-any-return]
            "HELLO", node.incarnation, session, place, encode(node), encode(NodeUp(node)), self._timeout_ms
        )

    def announce(self, message: Announce, session: bytes) -> bool:
        """False: the node must say hello again. May be repeated."""
        changed = Changed(message.incarnation, message.adverts, message.withdrawn, message.instances)
        instances = b"" if message.instances is None else msgspec.msgpack.encode(message.instances)
        adverts = [encode(advert) for advert in message.adverts]
        done = self._run_script(
            "ANNOUNCE",
            message.incarnation,
            session,
            message.seq,
            encode(changed),
            instances,
            b"".join(message.withdrawn),
            b"".join([advert.identity for advert in message.adverts]),
            struct.pack(f">{len(adverts)}H", *map(len, adverts)),
            b"".join(adverts),
        )
        return done is not None

    def heartbeat(self, incarnation: bytes, session: bytes, seq: int | None) -> bytes | None:
        """The epoch; the lease is renewed. None: the node must say hello again. Any `seq` will do where it is None."""
        expected = "" if seq is None else seq
        return self._run_script(  # type: ignore[no-any-return]
            "HEARTBEAT", incarnation, session, expected, self._timeout_ms
        )

    def goodbye(self, incarnation: bytes) -> None:
        self._run_script("GOODBYE", incarnation)

    # -------------------------------------------------------- for those who follow

    def look(self) -> Position:
        """The end of the log. Ends the leases that are over, and begins an epoch where there is none."""
        answer = self._run_script("LOOK", PROTOCOL_VERSION, self._run, os.urandom(16), self._timeout_ms, self._first)
        self._first = 0
        if len(answer) != 4:
            raise Refuses(f"the nodes there speak version {answer[0]!r}, accepted: {PROTOCOL_VERSION}")
        return Position(answer[1], int(answer[2]), int(answer[3]))

    def changes(self, after: Position, wait_s: float) -> list[Entry]:
        """What was logged since, waiting for it if there is nothing yet. In order; a gap shows in the numbers."""
        key = f"{self._prefix}:events"
        with _told(self._prefix):
            found = self._client.xread(
                {key: f"{after.nbytes}-{after.seq}"}, count=_ENTRIES, block=max(1, round(wait_s * 1000))
            )
        return [_entry(*raw) for _, entries in found for raw in entries]

    def nodes(self) -> list[bytes]:
        """Incarnations of the nodes that have a lease."""
        with _told(self._prefix):
            return list(self._client.zrange(f"{self._prefix}:leases", 0, -1))

    def describe(self, incarnation: bytes) -> tuple[NodeInfo, list[InstanceInfo]] | None:
        """None: it has left meanwhile, or cannot be read."""
        with _told(self._prefix):
            info, instances = self._client.hmget(self._node_key(incarnation), ["info", "instances"])
        if info is None:
            return None
        try:
            return decode(info, NodeInfo), decode(instances, Instances) if instances else []
        except BadFrame:
            return None

    def page(self, incarnation: bytes, cursor: int) -> Page:
        """Adverts of a node, page by page from cursor 0 on. All that it has the whole time, and some others."""
        following, count, blob = self._run_script("PAGE", incarnation, cursor, _PAGE)
        try:
            return Page(int(following), _array(count, blob), 0)
        except BadFrame:
            return self._readable(incarnation, cursor)

    def _readable(self, incarnation: bytes, cursor: int) -> Page:
        """The same page, one by one, without those that somebody has spoiled."""
        with _told(self._prefix):
            following, found = self._client.hscan(self._node_key(incarnation), cursor, count=_PAGE)
        adverts: list[Advert] = []
        raw = [value for name, value in found.items() if len(name) == 32]
        for value in raw:
            with contextlib.suppress(BadFrame):
                adverts.append(decode(value, Advert))
        return Page(int(following), adverts, len(raw) - len(adverts))

    # -------------------------------------------------------- how

    def _node_key(self, incarnation: bytes) -> bytes:
        return self._prefix.encode() + b":n:" + incarnation

    def _run_script(self, name: str, *args: bytes | int | str) -> Any:
        with _told(self._prefix):
            return self._scripts[name](keys=self._keys, args=args)


@contextlib.contextmanager
def _told(prefix: str) -> Iterator[None]:
    """The library's errors as this module's, in words for an operator."""
    errors = _library().exceptions
    try:
        yield
    except errors.AuthenticationError as error:
        raise Refuses(f"it does not accept the user or password: {_said(error)}") from None
    except errors.NoPermissionError as error:
        raise Refuses(f"this user may not do what is needed: {_said(error)}") from None
    except errors.OutOfMemoryError as error:
        raise Refuses(f"it is full, see its maxmemory: {_said(error)}") from None
    except errors.ReadOnlyError as error:
        raise Refuses(f"it is a read-only replica, give the primary's address: {_said(error)}") from None
    except errors.MovedError as error:
        raise Moved(str(error.host), int(error.port)) from None
    except errors.BusyLoadingError as error:
        raise Unreachable(f"it is loading its data: {_said(error)}") from None
    except (errors.ConnectionError, errors.TimeoutError, errors.InvalidResponse, OSError) as error:
        raise Unreachable(_said(error)) from None
    except errors.RedisError as error:
        reason = _said(error)
        if "UNBLOCKED" in reason:
            raise Unreachable(reason) from None
        if "WRONGTYPE" in reason:
            reason = f"somebody else's data is under the prefix {prefix}, choose another one: {reason}"
        raise Refuses(reason) from None


def _said(error: Exception) -> str:
    """Without the script and its line, which differ where what is wrong does not."""
    return str(error).partition(" script: ")[0].rstrip(".")


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where at most one node can be."""

    name: str
    address: str


def _entry(raw_id: bytes, fields: dict[bytes, bytes]) -> Entry:
    nbytes, _, seq = raw_id.partition(b"-")
    frame = fields.get(b"event", b"")
    try:
        event: Event | None = decode(frame, Event)
    except BadFrame:
        event = None
    return Entry(Position(fields.get(b"epoch", b""), int(seq), int(nbytes)), event, len(frame))


def _array(count: int, blob: bytes) -> list[Advert]:
    """Adverts out of their frames in a row. Raises BadFrame."""
    adverts: list[Advert] = decode(struct.pack(">BI", _ARRAY_32, count) + blob, list[Advert])
    return adverts


def _password_in(path: str) -> str:
    """Read for each connection: it may be another one by now."""
    try:
        with open(path) as file:
            return file.read().strip()
    except (OSError, UnicodeError) as error:
        raise Refuses(f"the password in {path!r} cannot be read ({error})") from None


def _library() -> ModuleType:
    import redis
    import redis.backoff
    import redis.retry

    return redis
