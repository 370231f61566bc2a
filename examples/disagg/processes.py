"""Starts programs so that nothing of them stays behind: no process, no file, no socket, no shared memory.

Owns a run: a folder with one log per program, a short temporary folder for sockets, and a mark in the environment that
every program of the run hands down to whatever it starts. The end of a run is the end of everything that carries its
mark, detached or orphaned or not.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import procfs

_MARK = "EC_P2P_RUN"
_T = TypeVar("_T")
_handed_out: set[int] = set()


class Failed(Exception):
    """Something did not come up, or ended, or did not happen in time; the text says what, for people."""


class TooLate(Failed):
    """What was waited for did not happen in time."""


def free_port() -> int:
    """A TCP port on which nobody listens, and which this process has not handed out before.

    Servers that bind with SO_REUSEPORT share a port in silence, so the probe binds without it. Ports come from below
    the range from which Linux takes those of outgoing connections.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in _handed_out:
            _handed_out.add(port)
            return port


def until(question: Callable[[], _T | None], what: str, timeout_s: float, pause_s: float = 0.1) -> _T:
    """Ask until the answer is neither None nor False. Raises TooLate, naming `what`, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = question()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > deadline:
            raise TooLate(f"{what}: not within {timeout_s:g} s")
        time.sleep(pause_s)


def end(find: Callable[[], list[int]], grace_s: float) -> None:
    """SIGTERM to all that `find` finds, SIGKILL after `grace_s`, until it finds none. Removes their shared memory."""
    segments: set[Path] = set()
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    while pids := find():
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + 30:
            raise Failed(f"cannot end {', '.join(f'{pid} ({procfs.command(pid)})' for pid in pids)}")
        new = [pid for pid in pids if pid not in asked]
        # All of them before the first signal: one that ends may take others with it.
        segments.update(*map(procfs.shared_memory, new))
        for pid in pids if late else new:
            _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(new)
        time.sleep(0.05)
    for segment in segments:
        segment.unlink(missing_ok=True)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class Process:
    """One program, its log, and its session: the program and all it has started that did not detach."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.name = name
        self.log = cwd / f"{name}.log"
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def session(self) -> list[int]:
        return procfs.session(self.pid)

    def stop(self, grace_s: float = 15.0) -> None:
        """End the whole session. Idempotent."""
        end(self.session, grace_s)
        self._popen.wait()

    def kill(self) -> None:
        """SIGKILL to the whole session at once, as when a machine fails. Idempotent."""
        self.stop(grace_s=-1.0)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `ready()`. Raises Failed with the end of the log when the program ends first, or is too late."""

        def answer() -> bool:
            if not self.alive():
                raise Failed(f"{self.name} ended with status {self._popen.returncode}. Its last words:\n{self.tail()}")
            return ready()

        try:
            until(answer, f"{self.name} ready", timeout_s, pause_s=0.3)
        except Failed as failure:
            raise Failed(f"{failure}\n(log: {self.log})") from None


class Run:
    """A context manager; on exit everything that was started in it is gone. The logs stay in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark = secrets.token_hex(4)
        # Sockets live here: their paths must be short, and `folder` may be deep.
        self.tmp = Path(tempfile.mkdtemp(prefix="ec-p2p-"))
        self.processes: list[Process] = []

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a program in the run's folder. It inherits this process's environment, changed by `env`."""
        marks = {
            _MARK: self.mark,
            "TMPDIR": str(self.tmp),
            "SPT_NOENV": "1",  # setproctitle would overwrite the environment in /proc, and with it the mark
        }
        process = Process(name, command, {**os.environ, **(env or {}), **marks}, self.folder)
        self.processes.append(process)
        return process

    def living(self) -> list[int]:
        """Every living process of this run, detached ones included."""
        return procfs.marked(_MARK, self.mark)

    def close(self) -> None:
        """End what was started, then what those have detached. Idempotent; a second ctrl-c does not disturb it."""
        with undisturbed():
            end(lambda: [pid for process in self.processes for pid in process.session()], grace_s=15.0)
            for process in self.processes:
                process.stop()
            end(self.living, grace_s=10.0)
            shutil.rmtree(self.tmp, ignore_errors=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def log_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that stays only when something fails, and is then named on stderr."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except Exception:
        print(f"logs: {folder}", file=sys.stderr)
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def interruptible() -> None:
    """Have ctrl-c and SIGTERM raise KeyboardInterrupt, also in a program that was started in the background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back ctrl-c and SIGTERM: for ends that must not be cut short."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        yield
