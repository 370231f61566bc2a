"""The script for machines with a GPU, on one without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def check(**environment):
    return subprocess.run([SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True)


def test_it_says_that_there_is_no_gpu():
    done = check()
    assert done.returncode == 2
    assert "gpu_check: NO GPU HERE, nothing was checked: " in done.stderr
    assert done.stdout == ""


def test_it_says_that_torch_finds_none(tmp_path):
    """Such as a build of torch without CUDA, or a driver that is too old."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    driver.chmod(0o755)
    done = check(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=sys.executable)
    assert done.returncode == 2
    assert "gpu_check: NO GPU HERE, nothing was checked: the torch of " in done.stderr
    assert torch.__version__ in done.stderr
