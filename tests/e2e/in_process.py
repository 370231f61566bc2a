"""Runs one vLLM engine inside this process and prints what it answered: `python in_process.py SETTINGS`.

SETTINGS is JSON: "engine" (arguments of vllm.LLM), "sampling", "batches": lists of prompts, each a list of image
numbers, one batch after another; and "saves": how many outputs the node is to have told of as saved before the end,
which is waited for with prompts of words alone. The last line of the output is JSON: "tokens" per prompt, and the
"metrics" that count preemptions or are the connector's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")

import numpy
from PIL import Image
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig

PATIENCE_S = 60.0
SAVED = "vllm:ec_p2p_saves_total,saved"


def picture(number: int) -> Image.Image:
    return Image.fromarray(numpy.random.RandomState(number).randint(0, 255, (300, 400, 3), dtype=numpy.uint8))


def prompt(numbers: list[int]) -> dict[str, Any]:
    return {
        "prompt": "<image>" * len(numbers) + "hello",
        "multi_modal_data": {"image": [picture(number) for number in numbers]},
    }


def main(settings: dict[str, Any]) -> None:
    engine = settings["engine"]
    if "ec_transfer_config" in engine:
        engine["ec_transfer_config"] = ECTransferConfig(**engine["ec_transfer_config"])
    llm = LLM(
        enforce_eager=True,
        dtype="bfloat16",
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 4},
        disable_log_stats=False,
        kv_cache_memory_bytes=64 << 20,
        **engine,
    )
    sampling = SamplingParams(temperature=0, **settings["sampling"])
    tokens = [
        list(answer.outputs[0].token_ids)
        for batch in settings["batches"]
        for answer in llm.generate([prompt(numbers) for numbers in batch], sampling, use_tqdm=False)
    ]
    deadline = time.monotonic() + PATIENCE_S
    while counted().get(SAVED, 0) < settings["saves"] and time.monotonic() < deadline:
        llm.generate("hello", sampling, use_tqdm=False)
    print(json.dumps({"tokens": tokens, "metrics": counted()}))


def counted() -> dict[str, float]:
    """What this process has counted of preemptions and of the connector's by now."""
    return {
        ",".join(
            [
                sample.name,
                *(value for key, value in sorted(sample.labels.items()) if key not in ("engine", "model_name")),
            ]
        ): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and ("ec_p2p" in sample.name or "preemptions" in sample.name)
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
