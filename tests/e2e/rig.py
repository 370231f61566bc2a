"""What end-to-end tests do with a fleet besides chatting: ask an encoder, look into a node, let things die.

The fleet itself is examples/disagg/fleet.py, with servers that start faster (forked_server.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import procfs
from fleet import Fleet, Host
from metrics import DIRECT
from processes import Run, until

from ec_p2p.cli.following import Following
from ec_p2p.config import make_config
from ec_p2p.control.interface import Replicates
from ec_p2p.identity import entry_identity
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import Inspect, Inspection, Landed, Missing, WantItem

_HERE = Path(__file__).parent
PATIENCE_S = 60.0
"""For what takes a moment, on a machine that is busy with other things."""
FORKED_SERVER = (sys.executable, str(_HERE / "forked_server.py"))


def build_model(folder: Path, *options: str) -> Path:
    """examples/disagg/tiny_model.py, in a process of its own: it imports torch and transformers."""
    script = _HERE.parents[1] / "examples" / "disagg" / "tiny_model.py"
    subprocess.run([sys.executable, script, folder, *options], check=True, stdout=subprocess.DEVNULL)
    return folder


@dataclass(frozen=True)
class Response:
    status: int
    body: dict[str, Any]


def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """One request to `url`, which names the path, without streaming. A refusal is an answer too."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    )
    try:
        with DIRECT.open(request, timeout=120) as answer:
            return Response(answer.status, json.loads(answer.read() or b"{}"))
    except HTTPError as refusal:
        text = refusal.read().decode()
        try:
            return Response(refusal.code, json.loads(text))
        except ValueError:
            return Response(refusal.code, {"text": text})


def encode(server_url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Have a producer encode the images of a request, as a proxy would; returns its `ec_transfer_params`, the hint."""
    answer = post(f"{server_url}/v1/chat/completions", {**body, "max_tokens": 1, "stream": False})
    assert answer.status == 200, answer
    hint = answer.body["ec_transfer_params"]
    assert isinstance(hint, dict)
    return hint


# ---------------------------------------------------------------- nodes


def node_pids(run: Run, host: Host) -> list[int]:
    """The living node of a host; none or one."""
    named = f"ec_p2p.cli node --name {host.node_name} "
    return [pid for pid in run.living() if named in procfs.command(pid) + " "]


def kill_node(run: Run, host: Host) -> None:
    """SIGKILL, and wait until it is gone."""
    for pid in node_pids(run, host):
        os.kill(pid, signal.SIGKILL)
        until(
            lambda gone=pid: gone not in procfs.living(), f"the end of the node of {host.label}", timeout_s=PATIENCE_S
        )


@contextmanager
def looking_into(fleet: Fleet, host: Host) -> Iterator[NodeClient]:
    """Attach to the node of a host as a tool."""
    settings = {"node_name": host.node_name, "ec_ip": "127.0.0.1", "ec_port": fleet.ec_port, "spawn_node": False}
    with NodeClient(make_config(settings), "tool", "tests") as client:
        assert client.attach(timeout_s=PATIENCE_S), f"no node on {host.label}"
        yield client


def inspect(client: NodeClient) -> Inspection:
    token = client.next_id()
    assert client.send(Inspect(token))
    return _answer(client, Inspection, lambda message: message.token == token)


def entry_bytes(client: NodeClient, identity: bytes) -> bytes | None:
    """The bytes of an entry that this host holds already, copied from its arena; None where it has none."""
    want = client.want([WantItem(identity, 0)], readers=1, wait_s=5.0, expect_s=0.0, local_only=True)
    answer = _answer(client, Landed | Missing, lambda message: message.want == want)
    if isinstance(answer, Missing):
        return None
    arena = client.arena(client.incarnation)
    assert arena is not None
    copied = bytes(arena.buffer[answer.offset : answer.offset + answer.nbytes])
    client.release(answer.lease)
    return copied


@contextmanager
def copied_directory(fleet: Fleet) -> Iterator[Replicates]:
    """What the fleet's directory knows by now."""
    with Following(make_config({"ec_ip": "127.0.0.1", "ec_port": fleet.ec_port})) as following:
        assert following.catch_up(PATIENCE_S) == []
        (replica,) = following.view.replicas
        yield replica


def until_known(fleet: Fleet, host: Host, hint: Mapping[str, Any]) -> None:
    """Wait until the node of `host` knows who has the entries that a producer's hint names. An answer of the producer
    may come before that: it saves, and its node advertises, behind its back."""
    (namespace,) = until(lambda: namespaces(fleet) or None, "an instance to tell its namespace", PATIENCE_S)
    with looking_into(fleet, host) as client:
        for identifier in hint:
            identity = entry_identity(namespace, identifier)
            until(lambda known=identity: _advertised(client, known), f"{host.label} to know {identifier}", PATIENCE_S)


def namespaces(fleet: Fleet) -> set[str]:
    """Those that the fleet's directory has been told of."""
    with copied_directory(fleet) as replica:
        instances = [instance for node in replica.nodes() for instance in replica.instances(node.incarnation)]
    return {instance.namespace for instance in instances if instance.namespace}


def _advertised(client: NodeClient, identity: bytes) -> bool:
    """Asks for other rows than it has: so it would be fetched, and is not."""
    want = client.want([WantItem(identity, 1)], readers=0, wait_s=5.0, expect_s=0.0)
    answer = _answer(client, Landed | Missing, lambda message: message.want == want)
    return isinstance(answer, Missing) and answer.reason == "rows"


def _answer(client: NodeClient, kind: Any, is_it: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for message in client.poll(0.2):
            if isinstance(message, kind) and is_it(message):
                return message
    raise AssertionError(f"the node {client.node_name} gave no answer")
