"""The example proxy, run as users run it, between stand-ins for the instances that answer what a test tells them to."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet import Fleet, Server
from processes import Run, free_port, until

from tests.field.junk import OPENINGS

Handler = http.server.BaseHTTPRequestHandler
Answer = Callable[[Handler, dict[str, Any]], None]


def reply(handler: Handler, body: object, status: int = 200) -> None:
    text = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


class Instance:
    """Keeps the requests it got; `answer` may be replaced."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        instance = self

        class Recorder(Handler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                instance.requests.append(body)
                instance.answer(self, body)

            def do_GET(self) -> None:
                reply(self, {"path": self.path})

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def encodes(handler: Handler, body: dict[str, Any]) -> None:
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    reply(handler, {"ec_transfer_params": {f"hash of {url}": {"rows": 1}}})


def answers(handler: Handler, body: dict[str, Any]) -> None:
    reply(handler, {"you sent": body})


@contextmanager
def running(*instances: Instance) -> Iterator[None]:
    threads = [threading.Thread(target=one.server.serve_forever, args=(0.05,)) for one in instances]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for one, thread in zip(instances, threads, strict=True):
            one.server.shutdown()
            thread.join()
            one.server.server_close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    encoders, pds = [Instance(encodes), Instance(encodes)], [Instance(answers), Instance(answers)]
    with running(*encoders, *pds), Run(tmp_path_factory.mktemp("proxy")) as run:
        fleet = Fleet(run, Path("unused"))
        proxy = fleet.proxy([as_server(e) for e in encoders], [as_server(pd) for pd in pds])
        never = fleet.proxy([as_server(encoders[0])], [as_server(pds[0])], ["--encode", "never"])
        nowhere = SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
        dead_end = fleet.proxy([nowhere], [nowhere])  # type: ignore[list-item]
        for server in (proxy, never):
            server.process.wait_ready(server.healthy, timeout_s=60)
        until(lambda: answers_at(dead_end), "the proxy without instances", timeout_s=60)
        yield SimpleNamespace(encoders=encoders, pds=pds, proxy=proxy, never=never, dead_end=dead_end)


@pytest.fixture(autouse=True)
def as_new(stage: SimpleNamespace) -> None:
    for instances, answer in ((stage.encoders, encodes), (stage.pds, answers)):
        for instance in instances:
            instance.answer = answer
            instance.requests.clear()


def as_server(instance: Instance) -> Server:
    return SimpleNamespace(url=instance.url)  # type: ignore[return-value]


def answers_at(server: Server) -> bool:
    try:
        return send(server, "GET", "/health").status == 503
    except OSError:
        return False


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)


def send(server: Server, method: str, path: str, body: object = None, **headers: str) -> SimpleNamespace:
    text = body if isinstance(body, bytes) else json.dumps(body)
    connection = connect(server)
    try:
        connection.request(method, path, text, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return SimpleNamespace(status=response.status, body=json.loads(response.read()))
    finally:
        connection.close()


def chat(server: Server, body: object, **headers: str) -> SimpleNamespace:
    return send(server, "POST", "/v1/chat/completions", body, **headers)


def request(*images: str, **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [*parts, {"type": "text", "text": "t"}]},
    ]
    return {"model": "m", "messages": messages, "max_tokens": 9, "temperature": 0.5, **more}


def test_junk_on_its_port_keeps_nobody_from_an_answer(stage: SimpleNamespace) -> None:
    """Connections that say nothing, or nonsense, are open all the while."""
    host, _, port = stage.proxy.url.removeprefix("http://").rpartition(":")
    with ExitStack() as strangers:
        for opening in OPENINGS * 5:
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            with suppress(ConnectionError):
                stranger.sendall(opening)
        for _ in range(5):
            assert chat(stage.proxy, request("a")).status == 200
    assert chat(stage.proxy, request("a")).status == 200


def test_each_image_goes_to_an_encoder_in_turn(stage: SimpleNamespace) -> None:
    body = request("a", "b", mm_processor_kwargs={"size": 1}, stream=True)
    answer = chat(stage.proxy, body)
    assert sorted(len(encoder.requests) for encoder in stage.encoders) == [1, 1]
    for encoder in stage.encoders:
        (asked,) = encoder.requests
        (image,) = asked["messages"][0]["content"]
        assert image in body["messages"][1]["content"]
        assert (asked["max_tokens"], asked["stream"]) == (1, False)
        assert (asked["model"], asked["mm_processor_kwargs"]) == ("m", {"size": 1})
    hints = {"hash of a": {"rows": 1}, "hash of b": {"rows": 1}}
    assert answer.body["you sent"] == {**body, "ec_transfer_params": hints}


def test_a_hint_of_the_client_is_kept(stage: SimpleNamespace) -> None:
    answer = chat(stage.proxy, request("a", ec_transfer_params={"mine": 1}))
    assert answer.body["you sent"]["ec_transfer_params"] == {"mine": 1, "hash of a": {"rows": 1}}


@pytest.mark.parametrize("content", ["just text", [{"type": "text", "text": "image_url"}], ["image_url"]])
def test_text_never_meets_an_encoder(stage: SimpleNamespace, content: object) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    assert chat(stage.proxy, body).body["you sent"] == body
    assert not any(encoder.requests for encoder in stage.encoders)


def test_the_encode_hop_can_be_left_out(stage: SimpleNamespace) -> None:
    body = request("a")
    assert chat(stage.proxy, body, x_ec_p2p_encode="skip").body["you sent"] == body
    assert chat(stage.never, body).body["you sent"] == body
    assert not any(encoder.requests for encoder in stage.encoders)


def test_the_header_picks_the_instance(stage: SimpleNamespace) -> None:
    for _ in range(3):
        chat(stage.proxy, request(), x_ec_p2p_target="1")
    assert [len(pd.requests) for pd in stage.pds] == [0, 3]


def test_without_the_header_instances_take_turns(stage: SimpleNamespace) -> None:
    for _ in range(4):
        chat(stage.proxy, request())
    assert [len(pd.requests) for pd in stage.pds] == [2, 2]


@pytest.mark.parametrize("target", ["2", "-1", "x", ""])
def test_a_target_that_is_none_is_refused(stage: SimpleNamespace, target: str) -> None:
    answer = chat(stage.proxy, request(), x_ec_p2p_target=target)
    assert answer.status == 400
    assert "x-ec-p2p-target is not a number from 0 to 1" in answer.body["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 3}', b'{"messages": ["x"]}'])
def test_a_body_that_is_no_chat_request_is_refused(stage: SimpleNamespace, body: bytes) -> None:
    answer = chat(stage.proxy, body)
    assert answer.status == 400
    assert "not a chat request" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    "failure",
    [
        lambda handler, _: reply(handler, {"error": "busy"}, status=503),
        lambda handler, _: reply(handler, {"ec_transfer_params": "what"}),
        lambda handler, _: reply(handler, ["what"]),
        lambda handler, _: handler.connection.close(),
    ],
    ids=["refuses", "returns nonsense", "returns no object", "hangs up"],
)
def test_an_encoder_that_fails_only_costs_the_hint(stage: SimpleNamespace, failure: Answer) -> None:
    for encoder in stage.encoders:
        encoder.answer = failure
    answer = chat(stage.proxy, request("a"))
    assert answer.status == 200
    assert answer.body["you sent"].get("ec_transfer_params", {}) == {}


def test_a_refusal_of_the_instance_passes_through(stage: SimpleNamespace) -> None:
    stage.pds[0].answer = lambda handler, _: reply(handler, {"error": "too long"}, status=418)
    answer = chat(stage.proxy, request(), x_ec_p2p_target="0")
    assert (answer.status, answer.body) == (418, {"error": "too long"})


def test_models_and_health(stage: SimpleNamespace) -> None:
    assert send(stage.proxy, "GET", "/v1/models").body == {"path": "/v1/models"}
    assert stage.proxy.healthy()


def test_no_instance_is_a_bad_gateway(stage: SimpleNamespace) -> None:
    assert chat(stage.dead_end, request("a")).status == 502
    assert send(stage.dead_end, "GET", "/v1/models").status == 502
    assert send(stage.dead_end, "GET", "/health").status == 503


def test_a_stream_passes_piece_by_piece_and_byte_by_byte(stage: SimpleNamespace) -> None:
    first, second, seen = b"data: {\xc3\xa9}\r\n\n", b": odd\ndata: [DONE]\n\n", threading.Event()

    def stream(handler: Handler, _: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(first)
        assert seen.wait(30)  # the second piece exists only after the client has had the first
        handler.wfile.write(second)

    stage.pds[0].answer = stream
    connection = connect(stage.proxy)
    connection.request("POST", "/v1/chat/completions", json.dumps(request()), {"x-ec-p2p-target": "0"})
    response = connection.getresponse()
    assert response.getheader("content-type") == "text/event-stream"
    assert response.read(len(first)) == first
    seen.set()
    assert response.read() == second
    connection.close()


def test_an_answer_that_breaks_off_does_not_look_whole(stage: SimpleNamespace) -> None:
    def break_off(handler: Handler, _: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b"half")

    stage.pds[0].answer = break_off
    connection = connect(stage.proxy)
    connection.request("POST", "/v1/chat/completions", json.dumps(request()), {"x-ec-p2p-target": "0"})
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize("where", ["encoders", "pds"])
def test_a_client_that_leaves_is_left(stage: SimpleNamespace, where: str) -> None:
    arrived, left = threading.Event(), threading.Event()

    def wait_for_the_end(handler: Handler, _: dict[str, Any]) -> None:
        arrived.set()
        handler.connection.settimeout(30)
        if handler.connection.recv(1) == b"":
            left.set()

    for instance in getattr(stage, where):
        instance.answer = wait_for_the_end
    connection = connect(stage.proxy)
    connection.request("POST", "/v1/chat/completions", json.dumps(request("a")))
    assert arrived.wait(30)
    connection.close()
    assert left.wait(30)
    if where == "encoders":
        assert not any(pd.requests for pd in stage.pds)
