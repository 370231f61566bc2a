"""A small client for chat requests with images: makes the pictures, serves them, asks, and times the first token."""

from __future__ import annotations

import base64
import http.server
import io
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError

from fleet import MODEL_NAME
from metrics import DIRECT
from PIL import Image
from processes import Failed


def picture(seed: int, width: int = 400, height: int = 300) -> bytes:
    """A PNG of noise; another seed is another image."""
    png = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3)).save(png, "PNG")
    return png.getvalue()


def data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@contextmanager
def served(pngs: Mapping[str, bytes]) -> Iterator[str]:
    """Serve pictures by name over HTTP on the loopback; yields the address before the name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            png = pngs.get(self.path[1:])
            self.send_response(404 if png is None else 200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(png or b"")))
            self.end_headers()
            self.wfile.write(png or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chat_body(text: str, images: Sequence[str] = (), max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A greedy chat request with images (URLs or data URIs) before its text, for `max_tokens` tokens with logprobs."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 5,
        **more,
    }


@dataclass(frozen=True)
class Answer:
    tokens: list[dict[str, Any]]
    """One entry a token, with its logprob and those of the likeliest others, as vLLM reports them."""
    first_token_s: float

    @property
    def text(self) -> str:
        return "".join(token["token"] for token in self.tokens)


def ask(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """Send a chat request and stream the answer. Raises Failed when it is refused or breaks off."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    started, first = time.perf_counter(), 0.0
    tokens: list[dict[str, Any]] = []
    try:
        with DIRECT.open(request, timeout=120) as answer:
            for line in answer:
                event = line.decode().removeprefix("data: ").strip()
                if not event:
                    continue
                if event == "[DONE]":
                    return Answer(tokens, first)
                chunk = json.loads(event)
                if "choices" not in chunk:
                    raise Failed(f"{url} answered {event}")
                for choice in chunk["choices"]:
                    tokens += (choice.get("logprobs") or {}).get("content") or []
                first = first or (time.perf_counter() - started if tokens else 0.0)
    except HTTPError as refusal:
        raise Failed(f"{url} refused with status {refusal.code}: {refusal.read().decode()[:500]}") from None
    except OSError as error:
        raise Failed(f"{url} does not answer: {error}") from None
    raise Failed(f"{url} broke off after {len(tokens)} tokens")
