"""What a fetch costs beyond the READ it cannot do without.

Three processes, as in a fleet: a holder (an ordinary node), a reader (a node whose loop this process turns, so that
raw READs run between the same two processes), and a client of the reader. Every round measures, one after the other,
a raw READ, a fetch as the node and as the client see it, and a memcpy of the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import statistics
import subprocess
import time
from typing import Any

from ec_p2p.config import Config, make_config
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import Commit, Landed, Missing, OpenWindow, Release, Sync, Synced, WantItem, Window
from ec_p2p.node.spawn import node_command

_DIM = 1024
_PATIENCE_S = 30.0


def run(sizes: list[int], transport: str, repeat: int, *, as_json: bool) -> int:
    """Measure and print. Returns the exit status."""
    rows = [_row(size, samples) for size, samples in measure(sizes, transport, repeat).items()]
    if as_json:
        keys = ("bytes", "items", "raw_us", "fetch_us", "client_us", "memcpy_us", "fetch_over_raw")
        print(json.dumps({"transport": transport, "rows": [{key: row[key] for key in keys} for row in rows]}))
        return 0
    print(f"fetch over {transport}, microseconds p50 (p90), {repeat} rounds")
    print(f"{'bytes':>10} {'raw READ':>18} {'node fetch':>18} {'client want':>18} {'memcpy':>18} {'fetch/raw':>9}")
    for row in rows:
        cells = [f"{row[f'{kind}_us']:9.1f} ({row[f'{kind}_p90_us']:.1f})" for kind in _KINDS]
        print(f"{row['bytes']:>10} " + " ".join(f"{cell:>18}" for cell in cells) + f" {row['fetch_over_raw']:9.3f}")
    return 0


_KINDS = ("raw", "fetch", "client", "memcpy")


def _row(size: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"bytes": size, "items": 1}
    for kind in _KINDS:
        seconds = sorted(samples[kind])
        row[f"{kind}_us"] = round(statistics.median(seconds) * 1e6, 1)
        row[f"{kind}_p90_us"] = round(seconds[len(seconds) * 9 // 10] * 1e6, 1)
    row["fetch_over_raw"] = round(row["fetch_us"] / row["raw_us"], 3)
    return row


def measure(sizes: list[int], transport: str, repeat: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of every measurement: {payload bytes: {kind: [...]}}. Sizes are rounded down to whole rows."""
    sizes = [max(1, size // (2 * _DIM)) * 2 * _DIM for size in sizes]
    port = _free_ports()
    common = {
        "transport": transport,
        "ec_port": port,
        "spawn_node": False,
        "metrics_port": -1,
        "share_fetched": False,
        "max_local_cpu_size": f"{max(256 << 20, 4 * max(sizes))}B",
        "slab_size": max(64 << 20, 2 * max(sizes)),
        "read_timeout_s": 10.0,
        "log_level": "WARNING",
    }
    tag = f"bench-{os.getpid()}"
    holder = make_config({**common, "node_name": f"{tag}-holder"})
    reader = make_config({**common, "node_name": f"{tag}-reader"})
    process = subprocess.Popen(node_command(holder))
    try:
        identities = _fill(holder, sizes)
        return _measure_with_reader(reader, sizes, identities, repeat)
    finally:
        process.terminate()
        process.wait()


def _measure_with_reader(
    config: Config, sizes: list[int], identities: dict[int, bytes], repeat: int
) -> dict[int, dict[str, list[float]]]:
    from ec_p2p.node.service import Node

    node = Node(config)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    client = spawn.Process(target=_client_main, args=(config, there))
    client.start()
    there.close()
    try:
        _turn_until(node, lambda: all(node.sources.holders(identity) for identity in identities.values()))
        _turn_until(node, lambda: node.peers_ready == 1)
        results: dict[int, dict[str, list[float]]] = {size: {kind: [] for kind in _KINDS} for size in sizes}
        for size in sizes:
            landing = node.backend.reserve(size)
            copies = (ctypes.create_string_buffer(size), ctypes.create_string_buffer(size))
            for round_ in range(-3, repeat):  # three rounds to touch pages and warm caches
                raw = _raw_read(node, identities[size], landing.offset)
                seen = _client_round(node, here, identities[size], size)
                copied = _memcpy(*copies, size)
                if round_ >= 0:
                    for kind, seconds in zip(_KINDS, (raw, *seen, copied), strict=True):
                        results[size][kind].append(seconds)
            node.backend.release(landing)
        here.send(None)
        return results
    finally:
        here.close()
        client.join(_PATIENCE_S)
        if client.is_alive():
            client.kill()
            client.join()
        node.close()


def _raw_read(node: Any, identity: bytes, landing: int) -> float:
    """One READ of the payload and nothing else, polled without a pause."""
    from ec_p2p.transport.interface import Span, State

    info, advert = node.sources.holders(identity)[0]
    started = time.perf_counter()
    reading = node.transport.read(info.incarnation.hex(), (Span(advert.offset, landing, advert.nbytes),))
    while (state := reading.poll()) is State.POSTED:
        node.transport.progress()
    seconds = time.perf_counter() - started
    reading.release()
    if state is not State.DONE:
        raise RuntimeError("the raw READ failed")
    return seconds


def _client_round(
    node: Any, pipe: multiprocessing.connection.Connection, identity: bytes, size: int
) -> tuple[float, float]:
    """(node's, client's) seconds of one fetch. The entry is not on the reader's side: it is removed after each
    round."""
    pipe.send((identity, size))
    _turn_until(node, lambda: pipe.poll(0))
    answer = pipe.recv()
    node.backend.remove(identity)
    if isinstance(answer, str):
        raise RuntimeError(f"the fetch of {size} bytes did not land: {answer}")
    return answer[0], answer[1]


def _memcpy(source: Any, target: Any, size: int) -> float:
    started = time.perf_counter()
    ctypes.memmove(target, source, size)
    return time.perf_counter() - started


def _turn_until(node: Any, condition: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes of the benchmark did not get ready")
        node.turn()


def _client_main(config: Config, pipe: multiprocessing.connection.Connection) -> None:
    """The client's process: one want per request, timed from the call to the answer."""
    with NodeClient(config, "tool", "bench") as client:
        if not client.attach(_PATIENCE_S):
            raise SystemExit("cannot attach to the reader")
        while (task := pipe.recv()) is not None:
            identity, _ = task
            started = time.perf_counter()
            client.want([WantItem(identity, 0)], readers=0, wait_s=_PATIENCE_S, expect_s=0.0)
            answer = _answer(client)
            seconds = time.perf_counter() - started
            if isinstance(answer, Landed):
                client.send(Release(answer.lease, -1))
            # The reader's loop sleeps until a message comes: the Sync makes it look at the pipe.
            pipe.send((answer.seconds, seconds) if isinstance(answer, Landed) else answer.reason)
            client.send(Sync(0))


def _answer(client: NodeClient) -> Landed | Missing:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for message in client.poll(1.0):
            if isinstance(message, Landed | Missing):
                return message
    raise SystemExit("the reader does not answer")


def _fill(config: Config, sizes: list[int]) -> dict[int, bytes]:
    """Store one entry of each size on the holder."""
    identities = {size: size.to_bytes(32, "big") for size in sizes}
    with NodeClient(config, "tool", "bench-fill") as client:
        if not client.attach(_PATIENCE_S):
            raise RuntimeError("the holder did not start")
        for size in sizes:
            client.send(OpenWindow(client.next_id(), size))
            window = _expect(client, Window)
            arena = client.arena(client.incarnation)
            assert arena is not None
            arena.buffer[window.offset : window.offset + size] = os.urandom(1 << 10) * (size >> 10)
            rows = size // (2 * _DIM)
            client.send(Commit(window.window, identities[size], window.offset, size, rows, _DIM, "bfloat16"))
        client.send(Sync(1))
        _expect(client, Synced)
    return identities


def _expect(client: NodeClient, kind: Any) -> Any:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for message in client.poll(1.0):
            if isinstance(message, kind):
                return message
    raise RuntimeError(f"no {kind.__name__} from the node")


def _free_ports() -> int:
    """A port that is free together with the next one (the directory's PUB socket)."""
    while True:
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            second = held.enter_context(socket.socket())
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
