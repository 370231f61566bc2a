"""Nothing that a run has started outlives it, however it was started and however it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import procfs
import pytest
from processes import Failed, Run, free_port, until

from tests.node.conftest import free_ports

PYTHON = (sys.executable, "-S", "-c")
SLEEP = "import time; time.sleep(600)"
DETACHED = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SLEEP}
    os._exit(0)
os.wait()
print("detached", flush=True)
{SLEEP}
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);" + SLEEP
RENAMED = "import setproctitle; setproctitle.setproctitle('somebody else, with a rather long name' * 40);" + SLEEP


def gone(pids: list[int]) -> bool:
    return not set(pids) & set(procfs.living())


def test_a_detached_orphan_ends_with_the_run(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        process = run.start("program", [*PYTHON, DETACHED])
        until(lambda: "detached" in process.tail(), "parent and orphan", timeout_s=60)
        assert len(run.living()) == 2
        assert len(process.session()) == 1
        started = run.living()
    assert gone(started)


def test_killing_a_program_leaves_what_it_detached(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        process = run.start("program", [*PYTHON, DETACHED])
        until(lambda: "detached" in process.tail(), "parent and orphan", timeout_s=60)
        assert len(run.living()) == 2
        process.kill()
        assert not process.alive()
        assert len(run.living()) == 1


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        process = run.start("stubborn", [*PYTHON, STUBBORN])
        until(lambda: "deaf" in process.tail(), "SIGTERM ignored", timeout_s=60)
        process.stop(grace_s=0.2)
        assert not process.alive()
    assert gone([process.pid])


def test_the_mark_survives_a_change_of_name(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        process = run.start("renamed", [sys.executable, "-c", RENAMED])
        until(lambda: "somebody else" in procfs.command(process.pid), "another name", timeout_s=60)
        assert run.living() == [process.pid]


def test_shared_memory_of_the_killed_is_removed(tmp_path: Path) -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    path = Path("/dev/shm", segment.name)
    maps = f"import mmap; file = open({str(path)!r}, 'r+b'); m = mmap.mmap(file.fileno(), 4096);" + SLEEP
    with Run(tmp_path) as run:
        process = run.start("mapping", [*PYTHON, maps])
        until(lambda: path in procfs.shared_memory(process.pid), "the segment mapped", timeout_s=60)
        segment.close()
    assert not path.exists()


def test_a_program_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        process = run.start("brief", [*PYTHON, "import sys; sys.exit('no such model')"])
        with pytest.raises(Failed, match=r"brief ended with status 1.*\n.*no such model"):
            process.wait_ready(lambda: False, timeout_s=60)


def test_a_program_that_is_never_ready_is_reported_in_time(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        process = run.start("slow", [*PYTHON, SLEEP])
        with pytest.raises(Failed, match=r"slow ready: not within 0\.2 s"):
            process.wait_ready(lambda: False, timeout_s=0.2)


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(procfs.__file__).parent)!r})
from pathlib import Path
from processes import Run
with Run(Path({str(tmp_path)!r})) as run:
    run.start("program", [sys.executable, "-S", "-c", {DETACHED!r}])
    print(run.mark, run.tmp, flush=True)
    import time; time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has what it starts in the background ignore SIGINT, and that would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as outer:
        assert outer.stdout
        mark, tmp = outer.stdout.readline().split()
        log = tmp_path / "program.log"
        until(lambda: log.exists() and "detached" in log.read_text(), "parent and orphan", timeout_s=60)
        assert len(procfs.marked("EC_P2P_RUN", mark)) == 2
        outer.send_signal(signal.SIGINT)
        _, errors = outer.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert procfs.marked("EC_P2P_RUN", mark) == []
    assert not Path(tmp).exists()


def test_a_port_in_use_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_ports()
    offers = iter([taken, free, free + 1])
    monkeypatch.setattr("processes.random.randrange", lambda *_: next(offers))
    monkeypatch.setattr("processes._handed_out", {free})
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        assert free_port() == free + 1


def test_session_of_this_process_holds_it() -> None:
    assert os.getpid() in procfs.session(os.getsid(0))
