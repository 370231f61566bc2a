"""The script for machines with a GPU, on any: in a tree of its own, with an nvidia-smi that says that there is
one, and with Pythons whose torch says what a test wants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
SEES = "2.13.0+cu130", "13.0", ["NVIDIA H200"]
CPU_BUILD = "2.13.0+cpu", None, []
OLD_DRIVER = "2.13.0+cu130", "13.0", []
HANGS = dedent("""
    import signal, sys, time
    print('at it', flush=True)
    if {deaf}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
""")
ENDS = "print('2 passed')"


def check(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH", "DEVICE")}
    return subprocess.run([script], env={**clean, **environment}, capture_output=True, text=True)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Machine:
    """A tree with the script in it, and the folder of its PATH that comes first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.script = root / "scripts" / "gpu_check.sh"
        self.script.parent.mkdir()
        shutil.copy(SCRIPT, self.script)
        executable(self.bin / "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'")
        executable(self.bin / "python3", "exit 127")  # none, until a test wants one
        self.write("transport/__init__.py", "def nixl_available(): return True")
        self.runs("tests", ENDS)
        self.runs("bench", ENDS)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def python(self, name: str, build: tuple[str, str | None, list[str]], imports: str = "") -> None:
        """One with this torch, and the module pytest, which runs the tests of a test."""
        version, cuda, gpus = build
        modules = self.root / "modules" / name
        self.write(
            f"{modules}/torch.py",
            dedent(f"""
                {imports}
                __version__ = {version!r}
                class version: cuda, hip = {cuda!r}, None
                class cuda:
                    is_available = lambda: {bool(gpus)}
                    device_count = lambda: {len(gpus)}
                    get_device_name = {gpus!r}.__getitem__
            """),
        )
        self.write(f"{modules}/pytest.py", "if __name__ == '__main__':\n    exec(open('tests/run').read())")
        executable(self.root / name, f'PYTHONPATH="{modules}:$PYTHONPATH" exec {sys.executable} "$@"')

    def runs(self, part: str, script: str) -> None:
        """What the tests do, or the benchmarks."""
        self.write("tests/run" if part == "tests" else "ec_p2p/cli/__main__.py", script)
        self.write("ec_p2p/__init__.py", "")
        self.write("ec_p2p/cli/__init__.py", "")

    def check(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return check(self.script, PATH=f"{self.bin}:{os.environ['PATH']}", **environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_says_that_there_is_no_gpu() -> None:
    done = check(SCRIPT)
    assert done.returncode == 2
    assert "gpu_check: NO GPU HERE, nothing was checked: " in done.stderr
    assert done.stdout == ""


def test_the_next_python_is_tried_when_the_torch_of_one_sees_no_gpu(machine: Machine) -> None:
    machine.python(".venv/bin/python", CPU_BUILD)
    machine.python("bin/python3", SEES)
    done = machine.check()
    assert f"gpu_check: 1 x NVIDIA H200, torch 2.13.0+cu130 ({machine.bin}/python3)\n" in done.stdout
    assert "==== ALL IS WELL" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


def test_the_one_that_is_named_comes_first(machine: Machine) -> None:
    machine.python("mine", SEES)
    machine.python(".venv/bin/python", SEES)
    done = machine.check(PYTHON=str(machine.root / "mine"))
    assert f"({machine.root}/mine)\n" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (CPU_BUILD, "is a CPU build (2.13.0+cpu)"),
        (OLD_DRIVER, "finds none (2.13.0+cu130: a driver that is too old?)"),
    ],
)
def test_a_gpu_that_no_torch_sees_is_not_no_gpu(
    machine: Machine, build: tuple[str, str | None, list[str]], why: str
) -> None:
    machine.python(".venv/bin/python", build)
    machine.python("mine", CPU_BUILD)
    mine = str(machine.root / "mine")
    done = machine.check(PYTHON=mine)
    assert done.returncode == 3
    assert done.stderr == (
        f"gpu_check: THERE IS A GPU, nothing was checked: the torch of {mine} is a CPU build (2.13.0+cpu); "
        f"the torch of .venv/bin/python {why}; set PYTHON=... to a Python whose torch sees it\n"
    )
    assert done.stdout == ""


def test_what_a_torch_that_sees_the_gpu_lacks_is_installed_over_it(machine: Machine) -> None:
    """Here it cannot be: what would make the environment fails."""
    machine.python(".venv/bin/python", CPU_BUILD)
    machine.python("bin/python3", SEES)
    machine.write("modules/bin/python3/pytest.py", "raise ImportError")
    machine.write("modules/bin/python3/venv.py", "raise SystemExit(1)")
    done = machine.check()
    assert done.returncode == 3
    assert done.stdout == "gpu_check: making build/gpu-venv, over what python3 has\n"
    assert done.stderr.startswith("gpu_check: THERE IS A GPU, nothing was checked: no Python with torch and pytest, ")


def test_a_python_that_takes_too_long_is_named(machine: Machine) -> None:
    machine.python(".venv/bin/python", SEES, imports="import time; time.sleep(1000)")
    done = machine.check(PROBE_S="1")
    assert done.returncode == 3
    assert "the torch of .venv/bin/python was not imported within 1 s; set PYTHON=... to" in done.stderr


@pytest.mark.parametrize(
    ("deaf", "said"),
    [(False, "within 10 s\n"), (True, "within 10 s, nor when it was told to: killed\n")],
)
def test_what_does_not_end_is_named(machine: Machine, deaf: bool, said: str) -> None:
    machine.python("bin/python3", SEES)
    machine.runs("tests", HANGS.format(deaf=deaf))
    done = machine.check(TESTS_S="10")
    assert f"gpu_check: tests/gpu did not end {said}" in done.stdout
    assert "the benchmark did not end" not in done.stdout
    assert "==== SOMETHING IS WRONG" in done.stdout
    assert done.returncode == 1


def test_what_somebody_else_kills_did_not_take_too_long(machine: Machine) -> None:
    machine.python("bin/python3", SEES)
    machine.runs("bench", "import os; os.kill(os.getpid(), 9)")
    done = machine.check()
    assert "gpu_check: the benchmark: killed by somebody else (is memory short?)\n" in done.stdout
    assert "did not end" not in done.stdout
    assert done.returncode == 1


def test_all_parts_together_have_one_limit(machine: Machine) -> None:
    """Or this would take their 225 seconds."""
    machine.python("bin/python3", SEES)
    machine.runs("tests", HANGS.format(deaf=False))
    machine.runs("bench", HANGS.format(deaf=False))
    done = machine.check(BUDGET_S="4")
    for part in ("the benchmark", "landing on the device"):
        assert f"gpu_check: {part} did not end within 1 s\n" in done.stdout
    assert done.returncode == 1
