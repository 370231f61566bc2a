"""What `make test` makes of tests that fail, on suites of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "every_test.py"
PASSES = "def test_passes(): pass"
FAILS = "def test_fails(): assert not 'ever'"
# Fails as often as it is told to: each run leaves a letter.
UNSTEADY = dedent("""
    import pathlib
    def test_unsteady():
        runs = pathlib.Path(__file__).with_suffix(".runs")
        runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
        assert len(runs.read_text()) not in {failing}
""")
LEAVES = dedent("""
    import pathlib, pytest
    @pytest.fixture
    def left():
        yield
        mark = pathlib.Path(__file__).with_suffix(".left")
        seen = mark.exists()
        mark.touch()
        assert seen
    def test_leaves(left): pass
""")


def every_test(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return subprocess.run([sys.executable, SCRIPT], cwd=folder, capture_output=True, text=True)


def runs(folder: Path, name: str) -> int:
    return len((folder / f"test_{name}.runs").read_text())


def test_all_pass_and_nothing_is_run_twice(tmp_path):
    done = every_test(tmp_path, good=PASSES, other=UNSTEADY.format(failing={9}))
    assert done.returncode == 0
    assert runs(tmp_path, "other") == 1


def test_one_that_passes_by_itself_is_named_and_the_suite_passes(tmp_path):
    done = every_test(tmp_path, good=PASSES, odd=UNSTEADY.format(failing={1}))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("UNSTEADY")
    assert done.stdout.splitlines()[-1].endswith("test_odd.py::test_unsteady")
    assert runs(tmp_path, "odd") == 4


@pytest.mark.parametrize("second", [2, 4])
def test_one_that_fails_once_more_fails_the_suite(tmp_path, second):
    done = every_test(tmp_path, good=PASSES, odd=UNSTEADY.format(failing={1, second}))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAILED: test_odd.py::test_unsteady"
    assert runs(tmp_path, "odd") == second


def test_an_unsteady_one_does_not_excuse_one_that_fails(tmp_path):
    done = every_test(tmp_path, bad=FAILS, odd=UNSTEADY.format(failing={1}))
    assert done.returncode == 1
    assert "FAILED: test_bad.py::test_fails" in done.stdout
    assert "UNSTEADY" in done.stdout


def test_many_are_no_accident(tmp_path):
    done = every_test(tmp_path, **{f"odd{number}": UNSTEADY.format(failing={1}) for number in range(4)})
    assert done.returncode == 1
    assert [runs(tmp_path, f"odd{number}") for number in range(4)] == [1, 1, 1, 1]


def test_what_is_left_behind_is_not_excused(tmp_path):
    done = every_test(tmp_path, bad=LEAVES)
    assert done.returncode == 1
    assert "UNSTEADY" not in done.stdout


def test_what_cannot_be_collected_fails_the_suite(tmp_path):
    done = every_test(tmp_path, good=PASSES, bad="import nothing_of_this_name")
    assert done.returncode == 2
