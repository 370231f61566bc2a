"""The corners of a real scheduler of vLLM: what it evicts, preempts and cuts into chunks comes out the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ec_p2p.config import Config, make_config
from ec_p2p.node.client import NodeClient
from ec_p2p.node.spawn import node_command
from tests.e2e.rig import PATIENCE_S

BATCHES = [[[1]], [[1, 2]], [[3], [4], [1], [3]], [[2, 1]], [[1], [2], [3]]]
SIX = {"max_tokens": 6}


def run(engine: dict[str, Any], sampling: dict[str, Any], *, saves: int = 0) -> dict[str, Any]:
    settings = json.dumps({"engine": engine, "sampling": sampling, "batches": BATCHES, "saves": saves})
    script = Path(__file__).with_name("in_process.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, settings], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def running(config: Config) -> Iterator[None]:
    """The node of `config`, which is there before the engine is."""
    node = subprocess.Popen(node_command(config))
    try:
        with NodeClient(config, "tool", "tests") as client:
            assert client.attach(timeout_s=PATIENCE_S)
        yield
    finally:
        node.terminate()
        assert node.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("name", "engine", "sampling", "shown"),
    [
        # The encoder cache holds one image: every other one evicts it, and it comes back by a load.
        (
            "evicted",
            {"max_num_batched_tokens": 64, "max_model_len": 2048, "enable_prefix_caching": False},
            SIX,
            ["vllm:ec_p2p_lookups_total,local", "vllm:ec_p2p_fetches_total,landed,local"],
        ),
        (
            "preempted",
            {"num_gpu_blocks_override": 8, "max_model_len": 768, "enable_prefix_caching": False},
            {"max_tokens": 100, "ignore_eos": True},
            ["vllm:num_preemptions_total", "vllm:ec_p2p_lookups_total,encoder_cache"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_answers_are_those_of_a_plain_engine(
    model: Path, name: str, engine: dict[str, Any], sampling: dict[str, Any], shown: list[str]
) -> None:
    engine = {"model": str(model), **engine}
    node = {
        "node_name": f"{name}-{os.getpid()}",
        "embedded_directory": False,
        "spawn_node": False,
        # What comes late on a busy machine is waited for, and not encoded once more.
        "fetch_timeout_s": PATIENCE_S,
        "max_local_cpu_size": "64MiB",
        "slab_size": "16MiB",
        "window_size": "4MiB",
    }
    transfer = {"ec_connector": "ECP2PConnector", "ec_role": "ec_both", "ec_connector_extra_config": node}
    plain = run(engine, sampling)
    with running(make_config(node)):
        shared = run({**engine, "ec_transfer_config": transfer}, sampling, saves=4)
    assert shared["tokens"] == plain["tokens"]
    metrics = shared["metrics"]
    assert min(metrics.get(series, 0) for series in shown) > 0, metrics
    # Published again if the node was slow to hear of it, and asked meanwhile.
    assert metrics["vllm:ec_p2p_saves_total,saved"] >= 4
    encodes = sum(value for series, value in metrics.items() if series.startswith("vllm:ec_p2p_local_encodes_total"))
    assert encodes == 4  # each image once
    assert not [series for series in metrics if "hook_errors" in series or "failed_requests" in series]
