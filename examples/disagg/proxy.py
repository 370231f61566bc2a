"""A small OpenAI-compatible proxy for encoders (E) and prefill/decode instances (PD).

    python proxy.py --port 8000 --encoder http://10.0.0.1:8000 --pd http://10.0.0.2:8000 --pd http://10.0.0.3:8000

Each media item of a chat request goes to an encoder first, the encoders in turn; then the request itself goes to a PD
instance, with what the encoders returned in `ec_transfer_params` as a hint. The hint only saves time: without it, or
when no encoder answers, the PD instance finds the embedding through the directory or encodes the media itself.

Answers pass through byte by byte. A client that goes away cancels what is being done for it. Two headers steer a
request: `x-ec-p2p-target: N` picks the PD instance (counted from 0), `x-ec-p2p-encode: skip` leaves the encoders out.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import logging
import operator
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

TARGET_HEADER = "x-ec-p2p-target"
ENCODE_HEADER = "x-ec-p2p-encode"

_log = logging.getLogger("ec_p2p.proxy")
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url")
# Besides the media, these fields of a request decide what its embeddings are, or who may ask for them.
_SHAPING = ("model", "mm_processor_kwargs", "media_io_kwargs", "priority")
_PASSED_ON = ("authorization", "content-type", "x-request-id")
_LARGEST_REQUEST = 1 << 30


def media_items(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The content parts of a chat request that need an encoder, in order."""
    for message in request.get("messages") or []:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and any(kind in part for kind in _MEDIA):
                yield part


def encoder_request(request: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """What to ask an encoder, so that its embedding of `item` is the one that `request` will need."""
    shaping = {field: request[field] for field in _SHAPING if field in request}
    return {**shaping, "messages": [{"role": "user", "content": [item]}], "max_tokens": 1, "stream": False}


def hint_in(answer: object) -> dict[str, Any]:
    """The `ec_transfer_params` of an encoder's answer; empty where there are none."""
    hint = answer.get("ec_transfer_params") if isinstance(answer, dict) else None
    return hint if isinstance(hint, dict) else {}


class Proxy:
    """Owns the connections to the instances. One event loop."""

    def __init__(self, encoders: list[str], pds: list[str], *, encode: bool, encoder_timeout_s: float) -> None:
        self._encoders = encoders
        self._pds = pds
        self._encode = encode and bool(encoders)
        self._encoder_timeout = ClientTimeout(total=encoder_timeout_s)
        self._next_encoder = itertools.cycle(encoders)
        self._next_pd = itertools.cycle(pds)
        self._http: ClientSession

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.cleanup_ctx.append(self._connections)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=None, sock_connect=10)
        # identity: what an instance sends can be passed on, and read, as it is
        headers = {"accept-encoding": "identity"}
        async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0), headers=headers) as self._http:
            yield

    async def _chat(self, incoming: web.Request) -> web.StreamResponse:
        body = await incoming.read()
        try:
            request = json.loads(body)
            items = list(media_items(request))
        except (ValueError, AttributeError, TypeError) as error:
            return _refusal(400, f"the body is not a chat request: {error}")
        pd = self._target(incoming)
        if pd is None:
            return _refusal(400, f"{TARGET_HEADER} is not a number from 0 to {len(self._pds) - 1}")
        headers = {name: value for name in _PASSED_ON if (value := incoming.headers.get(name))}
        given = request.get("ec_transfer_params") or {}
        skip = incoming.headers.get(ENCODE_HEADER) == "skip"
        if items and self._encode and not skip and isinstance(given, dict):
            hints = await asyncio.gather(*(self._encoded(request, item, headers) for item in items))
            request["ec_transfer_params"] = functools.reduce(operator.or_, hints, given)
            body = json.dumps(request).encode()
        try:
            async with self._http.post(f"{pd}{incoming.path_qs}", data=body, headers=headers) as answer:
                return await _pass_through(incoming, answer)
        except ClientError as error:
            return _refusal(502, f"no answer from {pd}: {error}")

    def _target(self, incoming: web.Request) -> str | None:
        chosen = incoming.headers.get(TARGET_HEADER)
        if chosen is None:
            return next(self._next_pd)
        return self._pds[int(chosen)] if chosen.isdecimal() and int(chosen) < len(self._pds) else None

    async def _encoded(self, request: dict[str, Any], item: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Have one item encoded; its hint, or an empty one when the encoder fails."""
        encoder = next(self._next_encoder)
        try:
            async with self._http.post(
                f"{encoder}/v1/chat/completions",
                json=encoder_request(request, item),
                headers={name: value for name, value in headers.items() if name != "content-type"},
                timeout=self._encoder_timeout,
            ) as answer:
                answer.raise_for_status()
                return hint_in(await answer.json())
        except (ClientError, TimeoutError, ValueError) as error:
            _log.warning("encoder %s failed, the request goes on without it: %r", encoder, error)
            return {}

    async def _models(self, incoming: web.Request) -> web.StreamResponse:
        try:
            async with self._http.get(f"{self._pds[0]}/v1/models") as answer:
                return await _pass_through(incoming, answer)
        except ClientError as error:
            return _refusal(502, f"no answer from {self._pds[0]}: {error}")

    async def _health(self, incoming: web.Request) -> web.StreamResponse:
        """200 when a PD instance can answer: encoders only make it faster."""
        for pd in self._pds:
            try:
                async with self._http.get(f"{pd}/health", timeout=ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return web.Response()
            except (ClientError, TimeoutError) as error:
                _log.warning("%s is not healthy: %r", pd, error)
        return _refusal(503, "no PD instance is healthy")


async def _pass_through(incoming: web.Request, answer: ClientResponse) -> web.StreamResponse:
    outgoing = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name in ("content-type", "content-length", "x-request-id"):
        if name in answer.headers:
            outgoing.headers[name] = answer.headers[name]
    await outgoing.prepare(incoming)
    try:
        async for piece in answer.content.iter_any():
            await outgoing.write(piece)
        await outgoing.write_eof()
    except ClientError as error:
        # The status is out already: only a connection that breaks off tells the client that the answer is not whole.
        _log.warning("the answer broke off: %r", error)
        if incoming.transport is not None:
            incoming.transport.abort()
    return outgoing


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "proxy_error", "code": status}}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--encoder", action="append", default=[], metavar="URL", help="repeatable")
    parser.add_argument("--pd", action="append", required=True, metavar="URL", help="repeatable")
    parser.add_argument("--encode", choices=("always", "never"), default="always", help="'never': leave encoders out")
    parser.add_argument("--encoder-timeout", type=float, default=60.0, metavar="SECONDS")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    proxy = Proxy(args.encoder, args.pd, encode=args.encode == "always", encoder_timeout_s=args.encoder_timeout)
    # handler_cancellation: without it aiohttp would let a request run on after its client has gone.
    web.run_app(proxy.app(), host=args.host, port=args.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
