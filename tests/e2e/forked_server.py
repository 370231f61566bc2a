"""vLLM's API server as `python forked_server.py OPTIONS`: its engine core and workers are forked instead of spawned.

Importing vllm is most of a small server's start. Forked, it is imported once instead of three times. For tests only:
what runs is the stock server with stock options, and every process of it is a real one.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

# What the engine core and the workers would import: here, once, before they are forked.
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms.cpu import CpuPlatform

_spawning = CpuPlatform.check_and_update_config


def _forking(vllm_config: Any) -> None:
    _spawning(vllm_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


if __name__ == "__main__":
    CpuPlatform.check_and_update_config = staticmethod(_forking)
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
