"""Every test; then the few that failed, each by itself.

    python scripts/every_test.py [pytest's arguments]

Ends with pytest's status, 0 if all have passed. Thousands of tests and the hundreds of processes that they start share
two cores or less, and one of them may fail by the machine alone. So a test that failed beside all the others has to
pass `_TIMES` in a row with nothing beside it. One that does so is UNSTEADY: the last lines name it, for it is a defect
all the same, of the test or of the product, which is rare. More than `_FEW` are no accident, and neither is what a test
leaves behind, which shows when it is torn down: those are not run again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_TIMES = 3
_FEW = 3


class Failed:
    """The tests that failed, and whether anything else was wrong."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.otherwise = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "teardown":
            self.otherwise = True
        elif report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.otherwise |= report.failed


def passes_alone(test: str) -> bool:
    """Whether it passes `_TIMES` in a row, each time in a process of its own."""
    command = [sys.executable, "-m", "pytest", test]
    return all(subprocess.run(command).returncode == pytest.ExitCode.OK for _ in range(_TIMES))


def main() -> int:
    failed = Failed()
    status = pytest.main(sys.argv[1:], plugins=[failed])
    if status != pytest.ExitCode.TESTS_FAILED or failed.otherwise or len(failed.tests) > _FEW:
        return int(status)
    unsteady = [test for test in failed.tests if passes_alone(test)]
    for test in failed.tests:
        times = f"UNSTEADY: failed among the others, passed {_TIMES} times by itself"
        print(f"{times if test in unsteady else 'FAILED'}: {test}", flush=True)
    return int(status) if len(unsteady) < len(failed.tests) else 0


if __name__ == "__main__":
    sys.exit(main())
