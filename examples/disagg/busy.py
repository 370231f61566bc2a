"""What an engine's decode pays for a node that is busy beside it.

A vLLM engine, in this process and on one core, decodes text on one host, in turns with that host's node idle, and with
it fetching entries out of the memory of another host at some pace. Prints tokens a second of both, and what the node
takes of a core. It says something only where there is a core for the engine and one for all others.

    python busy.py [--rounds 10] [--fetches-per-s 100] [--mebibytes 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import procfs
import tiny_model
from fleet import Fleet, Host
from processes import Failed, Process, Run, interruptible, log_folder, until

from ec_p2p.config import Config, make_config
from ec_p2p.node.client import NodeClient
from ec_p2p.node.messages import Commit, Landed, Missing, OpenWindow, Sync, Synced, WantItem, Window

_PATIENCE_S = 60.0
_DIM = 1024
_ENTRIES = 400
"""More than the busy node's arena holds: each is fetched anew."""
_REQUESTS, _TOKENS = 4, 1000
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

_M = TypeVar("_M")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fetches-per-s", type=float, default=100.0)
    parser.add_argument("--mebibytes", type=int, default=1)
    parser.add_argument("--load", nargs=2, metavar=("NODE", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(_config(arguments.load[0], int(arguments.load[1])), arguments.fetches_per_s)
        return 0
    interruptible()
    with log_folder("ec-p2p-busy-") as logs, Run(logs) as run, ExitStack() as resources:
        tiny_model.build(run.tmp / "model")
        fleet = Fleet(run, run.tmp / "model")
        far, near = fleet.host("far"), fleet.host("near")
        for host, arena in ((far, 1024), (near, 256)):
            node = start_node(fleet, host, arena * arguments.mebibytes)
            resources.callback(node.stop)
        fill(_config(far.node_name, fleet.ec_port), arguments.mebibytes << 20)
        decode = engine(fleet, near)
        decode()
        rates: dict[str, list[float]] = {"idle": [], "busy": []}
        cores: dict[str, list[float]] = {"idle": [], "busy": []}
        for number in range(2 * arguments.rounds):
            kind = ("idle", "busy")[number % 2]
            worker = start_load(fleet, near, arguments) if kind == "busy" else None
            used, began = cpu_s(near), time.monotonic()
            rates[kind].append(decode())
            cores[kind].append((cpu_s(near) - used) / (time.monotonic() - began))
            if worker is not None:
                worker.stop()
        landed = fetched(near)
    for kind in rates:
        print(
            f"node {kind}: {statistics.median(rates[kind]):.1f} tokens/s (median of {arguments.rounds}; "
            f"{min(rates[kind]):.1f} to {max(rates[kind]):.1f}), "
            f"the node takes {statistics.median(cores[kind]):.1%} of a core"
        )
    pairs = [busy / idle for idle, busy in zip(rates["idle"], rates["busy"], strict=True)]
    print(f"busy / idle, of neighbours: {statistics.median(pairs):.3f} (median); {landed} entries fetched in all")
    return 0


def _config(node_name: str, ec_port: int) -> Config:
    return make_config({"node_name": node_name, "ec_ip": "127.0.0.1", "ec_port": ec_port, "spawn_node": False})


def start_node(fleet: Fleet, host: Host, arena_mib: int) -> Process:
    settings = {
        "ec_ip": "127.0.0.1",
        "ec_port": fleet.ec_port,
        "directory_pub_port": fleet.directory_pub_port,
        "metrics_port": host.metrics_url.rpartition(":")[2],
        "max_local_cpu_size": f"{arena_mib}MiB",
        "slab_size": "64MiB",
        "share_fetched": "false",
        # Nobody here fails: a machine that is too busy for a moment is waited for.
        "read_timeout_s": "20",
        "node_timeout_s": "20",
    }
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "ec_p2p.cli", "node", "--name", host.node_name, *options]
    return fleet.run.start(f"node-{host.label}", command)


def cpu_s(host: Host) -> float:
    """Seconds that the host's node has computed so far."""
    (pid,) = (pid for pid in procfs.living() if f"node --name {host.node_name}" in procfs.command(pid))
    return procfs.cpu_s(pid)


def fetched(host: Host) -> int:
    return host.metrics().total("ec_p2p_node_fetches_total", outcome="landed")


def start_load(fleet: Fleet, near: Host, arguments: argparse.Namespace) -> Process:
    """Returns when the first entry has been fetched."""
    before = fetched(near)
    options = ["--fetches-per-s", str(arguments.fetches_per_s), "--load", near.node_name, str(fleet.ec_port)]
    process = fleet.run.start("load", [sys.executable, __file__, *options])
    until(lambda: fetched(near) > before, "the first fetch", _PATIENCE_S)
    return process


def load(config: Config, fetches_per_s: float) -> None:
    """Want one entry after the other at this pace, for ever."""
    with NodeClient(config, "tool", "busy") as client:
        if not client.attach(_PATIENCE_S):
            raise Failed(f"no node {config.name}")
        due = time.monotonic()
        while True:
            for number in range(_ENTRIES):
                client.want([WantItem(_identity(number), 0)], readers=0, wait_s=_PATIENCE_S, expect_s=_PATIENCE_S)
                answer = _hear(client, Landed, Missing)
                if isinstance(answer, Landed):
                    client.release(answer.lease)
                due = max(due + 1 / fetches_per_s, time.monotonic() - 1.0)
                time.sleep(max(0.0, due - time.monotonic()))


def fill(config: Config, nbytes: int) -> None:
    """Store the entries."""
    with NodeClient(config, "tool", "fill") as client:
        if not client.attach(_PATIENCE_S):
            raise Failed(f"no node {config.name}")
        arena = client.arena(client.incarnation)
        assert arena is not None
        for number in range(_ENTRIES):
            client.send(OpenWindow(client.next_id(), nbytes))
            window = _hear(client, Window)
            arena.buffer[window.offset : window.offset + nbytes] = bytes([number % 256]) * nbytes
            rows = nbytes // (2 * _DIM)
            client.send(Commit(window.window, _identity(number), window.offset, nbytes, rows, _DIM, "bfloat16"))
        client.send(Sync(1))
        _hear(client, Synced)


def _identity(number: int) -> bytes:
    return b"busy%28d" % number


def _hear(client: NodeClient, *kinds: type[_M]) -> _M:
    def heard() -> _M | None:
        return next((message for message in client.poll(0.1) if isinstance(message, kinds)), None)

    wanted = " or ".join(kind.__name__ for kind in kinds)
    return until(heard, f"a message of {wanted}", _PATIENCE_S, pause_s=0.0)


def engine(fleet: Fleet, host: Host) -> Callable[[], float]:
    """Tokens a second of some requests at once, each time it is called."""
    os.environ.update(_ENVIRONMENT)
    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig

    llm = LLM(
        str(fleet.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=_REQUESTS,
        kv_cache_memory_bytes=64 << 20,
        ec_transfer_config=ECTransferConfig(**fleet.connector("ec_consumer", host, spawn_node=False)),
    )
    sampling = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)

    def decode() -> float:
        began = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": [1, 2, 3]}] * _REQUESTS, sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers) / (time.perf_counter() - began)

    return decode


if __name__ == "__main__":
    sys.exit(main())
