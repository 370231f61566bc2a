"""How a process shows its figures and its health over HTTP: /metrics for Prometheus, /healthz for who restarts it.

Owns the listening socket and the threads that answer. Must never wait for the loop that it tells of, nor keep it from
its work: a loop that hangs is what /healthz is for. prometheus_client formats the figures; where it is not installed
only /healthz answers.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

Labels: TypeAlias = tuple[tuple[str, str], ...]
Series: TypeAlias = tuple[str, Labels]
"""One metric with its label values."""
Measured: TypeAlias = Callable[[], Mapping[Series, float]]
"""The values at the time of the call. Called by the threads that answer, too."""
Health: TypeAlias = Callable[[], tuple[bool, str]]
"""Whether all is well, and words for it. Called by the threads that answer."""

_AT_ONCE = 32
_REQUEST_S = 10.0
"""A connection that says nothing for so long is closed."""
_TEXT = "text/plain; charset=utf-8"
_PATHS = "here are /metrics and /healthz"


class Source(NamedTuple):
    """Figures that belong together: 'entries' becomes '<prefix>_entries', a count '<prefix>_<name>_total'."""

    prefix: str
    title: str
    """Before each figure's help."""
    counts: Measured
    gauges: Measured
    help: Mapping[str, str]
    """What a name means; its own words where there is nothing more to say."""


Sources: TypeAlias = Callable[[], Sequence[Source]]
"""Those that there are at the time of the call. Called by the threads that answer."""


class Exposition:
    """Serves from construction on, until `close`. `port` 0 takes any free one, -1 serves nothing.

    A port that cannot be had is a warning, not an error: who only looks on must not keep a process from its work.
    `port` is then 0.
    """

    def __init__(self, host: str, port: int, sources: Sources, health: Health) -> None:
        self.port = 0
        self._server: _Server | None = None
        if port < 0:
            return
        client = _prometheus()
        if client is None:
            log.warning("prometheus_client is not installed: there is no /metrics (pip install ec-p2p[cli])")
        try:
            self._server = _Server(host, port, _Page(client, sources) if client else None, health)
        except OSError as error:
            log.warning(
                "no /metrics and no /healthz: cannot listen on %s:%d (%s); accepted as port for metrics: a free one, 0 "
                "for any, -1 for none",
                host,
                port,
                error,
            )
            return
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="ec-p2p-exposition", daemon=True)
        self._thread.start()

    def __enter__(self) -> Exposition:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes up to half a second. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def _prometheus() -> Any:
    """The package, or None."""
    try:
        import prometheus_client.core
        import prometheus_client.exposition
    except ImportError:
        return None
    return prometheus_client


class _Page:
    """What /metrics says."""

    def __init__(self, client: Any, sources: Sources) -> None:
        self._client = client
        self._sources = sources
        self._registry = client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def written_for(self, accept: str) -> tuple[bytes, str]:
        """The page, and its content type: the one of the formats that the reader accepts."""
        encoder, content_type = self._client.exposition.choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client."""
        core = self._client.core
        for source in self._sources():
            for kind, values in (
                (core.CounterMetricFamily, source.counts()),
                (core.GaugeMetricFamily, source.gauges()),
            ):
                yield from _families(source, kind, values)


def _families(source: Source, kind: Callable[..., Any], values: Mapping[Series, float]) -> Iterator[Any]:
    by_name: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for (name, labels), value in values.items():
        by_name[name].append((labels, value))
    for name, series in by_name.items():
        keys = [key for key, _ in series[0][0]]
        meaning = source.help.get(name, name.replace("_", " "))
        family = kind(f"{source.prefix}_{name}", f"{source.title}: {meaning}", labels=keys)
        for labels, value in series:
            family.add_metric([text for _, text in labels], value)
        yield family


class _Server(ThreadingHTTPServer):
    """A thread for each connection, and no more than a few of them."""

    request_queue_size = 128

    def __init__(self, host: str, port: int, page: _Page | None, health: Health) -> None:
        self.page = page
        self.health = health
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the resolver for this host's name and may wait long for it.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread that would give its place back
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection from %s ended badly", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/metrics":
                self._metrics()
            case "/healthz":
                healthy, text = self.server.health()
                self._answer(200 if healthy else 503, f"{text}\n".encode(), _TEXT)
            case _:
                self._answer(404, f"{_PATHS}\n".encode(), _TEXT)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "ec-p2p"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.address_string(), *args)

    def _metrics(self) -> None:
        page = self.server.page
        if page is None:
            self._answer(501, b"prometheus_client is not installed here: pip install ec-p2p[cli]\n", _TEXT)
            return
        try:
            body, content_type = page.written_for(self.headers.get("Accept", ""))
        except Exception as error:
            # Figures are read while their owner changes them; the next try is Prometheus'.
            log.warning("/metrics failed: %s: %s", type(error).__name__, error)
            self._answer(500, f"{type(error).__name__}\n".encode(), _TEXT)
            return
        self._answer(200, body, content_type)

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
