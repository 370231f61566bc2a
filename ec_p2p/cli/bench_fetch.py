"""What a fetch costs beyond the READ it cannot do without.

Three processes, as in a fleet: a holder (an ordinary node), a reader (a node whose loop this process turns, so that
raw READs run between the same two processes), and a client of the reader. Every round measures, one after the other,
a raw READ, a fetch as the node and as the client see it, and a memcpy of the same bytes. A fetch may be of several
items that make up the same bytes together; the raw READ is of one all the same. With a device, the client's round goes
on until a tensor of each item is there; with landing on the device, its process READs the items by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import statistics
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ec_p2p.cli.ending import command_that_ends_with_this, end_with_starter
from ec_p2p.config import Config, make_config
from ec_p2p.engine.extents import whole_pages
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import Commit, Landed, Missing, OpenWindow, Release, Sync, Synced, WantItem, Window
from ec_p2p.node.spawn import node_command

if TYPE_CHECKING:
    from ec_p2p.node.lander import Lander

_DIM = 1024
_ROW_BYTES = 2 * _DIM
_PATIENCE_S = 30.0
_ARENA_OF_ENTRIES = 6
_LEAST_ARENA = 256 << 20
"""An arena has room for so many times what is fetched. Of one load all processes together touch no more than that."""


class Load(NamedTuple):
    """What one want asks for: `items` entries of `nbytes` in all."""

    nbytes: int
    items: int

    @property
    def item_bytes(self) -> int:
        return self.nbytes // self.items

    @property
    def identities(self) -> list[bytes]:
        return [b"%16d%8d%8d" % (self.nbytes, self.items, index) for index in range(self.items)]


class Way(NamedTuple):
    """Over what entries come to a client, and where it has them: on a device where that is given."""

    transport: str = "nixl"
    device: str | None = None
    landing: str = "host"


def run(sizes: list[int], items: list[int], way: Way, repeat: int, *, as_json: bool) -> int:
    """Measure and print. Returns the exit status."""
    measured = measure(sizes, items, way, repeat)
    rows = [_row(load, samples) for load, samples in measured.items()]
    kinds = [kind for kind in _KINDS if way.device or kind != "device"]
    if as_json:
        keys = ("bytes", "items", *(f"{kind}_us" for kind in kinds), "fetch_over_raw")
        result = {"transport": way.transport, "rows": [{key: row[key] for key in keys} for row in rows]}
        print(json.dumps({**result, "device": way.device, "landing": way.landing} if way.device else result))
        return 0
    where = ", landing on the device" if way.landing == "device" else ""
    print(f"fetch over {way.transport}{where}, microseconds p50 (p90), {repeat} rounds")
    columns = " ".join(f"{_KINDS[kind].format(device=way.device):>18}" for kind in kinds)
    print(f"{'bytes':>10} {'items':>5} {columns} {'fetch/raw':>9}")
    for row in rows:
        cells = [f"{row[f'{kind}_us']:9.1f} ({row[f'{kind}_p90_us']:.1f})" for kind in kinds]
        print(
            f"{row['bytes']:>10} {row['items']:>5} "
            + " ".join(f"{cell:>18}" for cell in cells)
            + f" {row['fetch_over_raw']:9.3f}"
        )
    for size, load in _loads(sizes, items):
        if load.nbytes != size:
            what = "an item has" if load.items == 1 else f"{load.items} items have"
            print(f"note: {what} whole rows of {_ROW_BYTES} bytes: {load.nbytes} in all instead of {size}")
    return 0


_KINDS = {
    "raw": "raw READ",
    "fetch": "node fetch",
    "client": "client want",
    "device": "want to {device}",
    "memcpy": "memcpy",
}


def _row(load: Load, samples: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"bytes": load.nbytes, "items": load.items}
    for kind in _KINDS:
        if not samples[kind]:
            continue
        seconds = sorted(samples[kind])
        row[f"{kind}_us"] = round(statistics.median(seconds) * 1e6, 1)
        row[f"{kind}_p90_us"] = round(seconds[len(seconds) * 9 // 10] * 1e6, 1)
    row["fetch_over_raw"] = round(row["fetch_us"] / row["raw_us"], 3)
    return row


def memory_for(sizes: list[int], items: list[int]) -> int:
    """Bytes that `measure` takes, at most, besides what is little."""
    return _memory_for([load for _, load in _loads(sizes, items)])


def _memory_for(loads: list[Load]) -> int:
    return max(_LEAST_ARENA, _ARENA_OF_ENTRIES * sum(load.nbytes for load in loads))


def _loads(sizes: list[int], items: list[int]) -> list[tuple[int, Load]]:
    """Each size with a load of about so many bytes: each item has whole rows, and at least one."""
    return [
        (size, Load(max(1, size // (number * _ROW_BYTES)) * number * _ROW_BYTES, number))
        for size in sizes
        for number in items
    ]


def measure(sizes: list[int], items: list[int], way: Way, repeat: int) -> dict[Load, dict[str, list[float]]]:
    """Seconds of every measurement: {load: {kind: [...]}}. Of the kind 'device' there are none without one."""
    loads = [load for _, load in _loads(sizes, items)]
    port = _free_ports()
    common = {
        "transport": way.transport,
        "ec_port": port,
        "spawn_node": False,
        "metrics_port": -1,
        "share_fetched": False,
        "max_local_cpu_size": f"{_memory_for(loads)}B",
        "slab_size": max(64 << 20, 2 * max(sizes)),
        "landing": way.landing,
        "landing_size": 2 * max(sizes) + (1 << 20),
        "read_timeout_s": 10.0,
        "log_level": "WARNING",
    }
    tag = f"bench-{os.getpid()}"
    holder = make_config({**common, "node_name": f"{tag}-holder"})
    reader = make_config({**common, "node_name": f"{tag}-reader"})
    process = subprocess.Popen(command_that_ends_with_this(node_command(holder)))
    try:
        wholes = {load: Load(load.nbytes, 1) for load in loads}
        _fill(holder, sorted({*loads, *wholes.values()}))
        return _measure_with_reader(reader, wholes, repeat, way.device)
    finally:
        process.kill()
        process.wait()


def _measure_with_reader(
    config: Config, wholes: dict[Load, Load], repeat: int, device: str | None
) -> dict[Load, dict[str, list[float]]]:
    """`wholes` maps each load to the one entry of its size, of which the raw READ is."""
    from ec_p2p.node.service import Node

    node = Node(config)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    client = spawn.Process(target=_client_main, args=(config, there, device), daemon=True)
    client.start()
    there.close()
    try:
        identities = [identity for loads in wholes.items() for load in loads for identity in load.identities]
        _turn_until(node, lambda: all(node.wiring.sources.holders(identity) for identity in identities))
        _turn_until(node, lambda: _gauge(node, "peers_ready") == 1)
        if config.landing == "device":
            _turn_until(node, lambda: _gauge(node, "landers") == 1)
        results: dict[Load, dict[str, list[float]]] = {load: {kind: [] for kind in _KINDS} for load in wholes}
        for load, whole in wholes.items():
            landing = node.wiring.backend.reserve(load.nbytes)
            copies = (ctypes.create_string_buffer(load.nbytes), ctypes.create_string_buffer(load.nbytes))
            for round_ in range(-3, repeat):  # three rounds to touch pages and warm caches
                raw = _raw_read(node, whole.identities[0], landing.offset)
                seen = _client_round(node, here, load)
                copied = _memcpy(*copies, load.nbytes)
                if round_ >= 0:
                    for kind, seconds in {"raw": raw, "memcpy": copied, **seen}.items():
                        results[load][kind].append(seconds)
            node.wiring.backend.release(landing)
        here.send(None)
        client.join(_PATIENCE_S)
        return results
    finally:
        here.close()
        client.kill()
        client.join()
        node.close()


def _raw_read(node: Any, identity: bytes, landing: int) -> float:
    """One READ of the payload and nothing else, polled without a pause."""
    from ec_p2p.transport.interface import Span, State

    info, advert = node.wiring.sources.holders(identity)[0]
    started = time.perf_counter()
    reading = node.wiring.transport.read(info.incarnation.hex(), (Span(advert.offset, landing, advert.nbytes),))
    while (state := reading.poll()) is State.POSTED:
        node.wiring.transport.progress()
    seconds = time.perf_counter() - started
    reading.release()
    if state is not State.DONE:
        raise RuntimeError("the raw READ failed")
    return seconds


def _client_round(node: Any, pipe: multiprocessing.connection.Connection, load: Load) -> dict[str, float]:
    """Seconds of one fetch, until its last item has landed: the node's, the client's, and those until it was on the
    device. The entries are not on the reader's side: they are removed after each round."""
    pipe.send(load)
    _turn_until(node, lambda: pipe.poll(0))
    answer: dict[str, float] | str = pipe.recv()
    for identity in load.identities:
        node.wiring.backend.remove(identity)
    if isinstance(answer, str):
        raise RuntimeError(f"the fetch of {load.nbytes} bytes did not land: {answer}")
    return answer


def _memcpy(source: Any, target: Any, size: int) -> float:
    started = time.perf_counter()
    ctypes.memmove(target, source, size)
    return time.perf_counter() - started


def _gauge(node: Any, name: str) -> Any:
    return node.wiring.status.gauges()[name, ()]


def _turn_until(node: Any, condition: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes of the benchmark did not get ready")
        node.turn()


def _client_main(config: Config, pipe: multiprocessing.connection.Connection, device: str | None) -> None:
    """The client's process: one want per request, timed from the call to the answer, and to the device."""
    end_with_starter()
    from ec_p2p.node.device import device_for
    from ec_p2p.node.lander import Lander

    with NodeClient(config, "tool", "bench") as client, contextlib.ExitStack() as resources:
        if not client.attach(_PATIENCE_S):
            raise SystemExit("cannot attach to the reader")
        lander = None
        if device and config.landing == "device":
            lander = Lander(config, "bench", 0, device_for(device), _give_up)
            resources.callback(lander.close)
        while (load := pipe.recv()) is not None:
            items = [WantItem(identity, 0) for identity in load.identities]
            started = time.perf_counter()
            readers = 0 if lander is None else 1
            client.want(items, readers=readers, wait_s=_PATIENCE_S, expect_s=0.0, landing=config.landing)
            answers = _answers(client, len(items))
            seen = {"client": time.perf_counter() - started}
            landed = [answer for answer in answers if isinstance(answer, Landed)]
            if device and len(landed) == len(items):
                _load(client, lander, landed, device)
                seen["device"] = time.perf_counter() - started
            for answer in landed:
                client.send(Release(answer.lease, -1))
            # The reader's loop sleeps until a message comes: the Sync makes it look at the pipe.
            if len(landed) == len(items):
                pipe.send({"fetch": max(answer.seconds for answer in landed), **seen})
            else:
                pipe.send(next(answer.reason for answer in answers if isinstance(answer, Missing)))
            client.send(Sync(0))
            _expect(client, Synced)  # not in the next round's time


def _give_up(where: str, error: Exception) -> None:
    raise SystemExit(f"{where}: {error}") from error


def _load(client: NodeClient, lander: Lander | None, landed: list[Landed], device: str) -> None:
    """A tensor of each on the device, as a worker makes them; and wait for the last."""
    from ec_p2p.node.tensors import Loader, Place

    loader = Loader(client)
    loader.lander = lander
    loaded = [loader.load(Place.of(client.incarnation, at), device) for at in landed]
    for _, copied in loaded:
        copied.wait()


def _answers(client: NodeClient, count: int) -> list[Landed | Missing]:
    answers: list[Landed | Missing] = []
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        answers += [message for message in client.poll(1.0) if isinstance(message, Landed | Missing)]
        if len(answers) == count:
            return answers
    raise SystemExit("the reader does not answer")


def _fill(config: Config, loads: list[Load]) -> None:
    """Store the entries of every load on the holder, as a worker stores those of one step: in one window."""
    with NodeClient(config, "tool", "bench-fill") as client:
        if not client.attach(_PATIENCE_S):
            raise RuntimeError("the holder did not start")
        arena = client.arena(client.incarnation)
        assert arena is not None
        for load in loads:
            size, rows = load.item_bytes, load.item_bytes // _ROW_BYTES
            room = whole_pages(size)
            client.send(OpenWindow(client.next_id(), load.items * room))
            window = _expect(client, Window)
            for index, identity in enumerate(load.identities):
                start = window.offset + index * room
                arena.buffer[start : start + size] = os.urandom(1 << 10) * (size >> 10)
                client.send(Commit(window.window, identity, start, size, rows, _DIM, "bfloat16"))
        client.send(Sync(1))
        _expect(client, Synced)


def _expect(client: NodeClient, kind: Any) -> Any:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for message in client.poll(1.0):
            if isinstance(message, kind):
                return message
    raise RuntimeError(f"no {kind.__name__} from the node")


def _free_ports() -> int:
    """A port that is free together with the next one (the directory's PUB socket). From below the range of those that
    the system gives to whoever asks for any, as the nodes do that start first."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
