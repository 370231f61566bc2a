"""What a command has started ends with it, whatever ends it.

    SIGTERM, ctrl-C     an exception, and so the `finally` of whoever has started something; once more: at once
    any other death     the kernel kills what `end_with` was said in

Run as `python -m ec_p2p.cli.ending PID COMMAND...` this becomes COMMAND, which ends with process PID.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Of the main thread."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def end_with(starter: int) -> None:
    """Have the kernel kill this process once the thread that started it, of the process `starter`, has ended. That
    outlives exec. Ctrl-C, which a terminal sends to both, is for the starter alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:  # it has ended before the kernel was told
        os._exit(1)


def end_with_starter() -> None:
    """The same in a process that multiprocessing has started."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    assert starter.pid is not None
    end_with(starter.pid)


def command_that_ends_with_this(command: list[str]) -> list[str]:
    """The same for a command that this process is to start."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
