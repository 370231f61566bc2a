"""The two ends of a transport: arenas, the reader in this process, holders in processes of their own.

UCX wants one agent per process, so every end has its own, and what must close its end early runs in a child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import zmq

from ec_p2p.transport import Interconnect, open_transport, zmq_reading
from ec_p2p.transport.interface import Span, State

MIB = 1 << 20
SLAB = 20 * MIB
ARENA = 2 * SLAB
PATIENCE_S = 30.0

_ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


def until(condition, what="the condition", patience_s=PATIENCE_S):
    """Poll until `condition()` is true; returns its value."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(0.002)
    return value


def pattern(seed):
    """Bytes that repeat, but not at a distance that a mistaken offset would have."""
    block = random.Random(seed).randbytes(1_000_003)
    return (block * (ARENA // len(block) + 1))[:ARENA]


def unique_name():
    return f"{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"


class End:
    """An arena, and a transport of its first slab. settings: of Interconnect."""

    def __init__(self, kind, name, slabs=1, **settings):
        # The first READ from a peer would fail if it stood still while the connection is made.
        zmq_reading._HANDSHAKE_MS = int(1000 * PATIENCE_S)
        self.memory = mmap.mmap(-1, ARENA)
        self.context = zmq.Context()
        self.transport = open_transport(
            kind,
            name,
            ctypes.addressof(ctypes.c_char.from_buffer(self.memory)),
            ARENA,
            context=self.context,
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
            interconnect=Interconnect(**settings),
        )
        self.slabs = 0
        for _ in range(slabs):
            self.add_slab()

    def add_slab(self):
        self.transport.register(self.slabs * SLAB, SLAB)
        self.slabs += 1

    def wait(self, reading):
        """Drive the reading, as a node does, until it has ended."""

        def ended():
            self.transport.progress()
            return reading.poll() is not State.POSTED

        until(ended, f"a READ from {reading.peer}")
        assert reading.release()
        return reading.poll()

    def fetch(self, peer, remote, local, nbytes):
        """Read into wiped memory; returns what landed."""
        self.memory[local : local + nbytes] = bytes(nbytes)
        reading = self.transport.read(peer, [Span(remote, local, nbytes)])
        assert self.wait(reading) is State.DONE, reading.error
        return self.memory[local : local + nbytes]

    def close(self):
        self.transport.close()
        self.context.destroy(linger=0)


class Holder:
    """A process that fills its arena with `pattern(name)` and lets peers read it."""

    def __init__(self, kind, name=None, slabs=1):
        self.name = name or unique_name()
        self._process, self._pipe = start_process(_hold, kind, self.name, slabs)
        self.pid = self._process.pid
        self.card = self._answer()

    @functools.cached_property
    def bytes(self):
        """What its arena holds, as far as it is registered."""
        return pattern(self.name)

    def ask(self, order, *args):
        self._pipe.send((order, args))
        return self._answer()

    def _answer(self):
        assert self._pipe.poll(PATIENCE_S), f"holder {self.name} does not answer"
        return self._pipe.recv()

    def open_files(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self):
        stop_process(self.pid)

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def close(self):
        self.kill()
        self._pipe.close()


def stop_process(pid):
    """As SIGSTOP does, and wait until it has: its other threads answer a moment longer, and with them the library's."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _thread_states(pid) == {"T"}, f"process {pid} to stop")


def _thread_states(pid):
    stats = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            stats.append(path.read_text())
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def _hold(pipe, kind, name, slabs):
    end = End(kind, name, slabs)
    end.memory[: slabs * SLAB] = pattern(name)[: slabs * SLAB]
    pipe.send(end.transport.card())
    poller = zmq.Poller()
    for target in (pipe.fileno(), *end.transport.sockets()):
        poller.register(target, zmq.POLLIN)
    with contextlib.suppress(EOFError):
        while True:
            poller.poll(100)
            end.transport.progress()
            while pipe.poll():
                order, args = pipe.recv()
                pipe.send(_ORDERS[order](end, *args))
    end.close()


def _add_slab(end):
    end.memory[SLAB:] = pattern(end.transport.name)[SLAB:]
    end.add_slab()
    return end.transport.card()


def _write(end, offset, data):
    end.memory[offset : offset + len(data)] = data


def _cut_connections(end):
    """What a network does that loses a connection: both processes live on."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def _bad_frames(end):
    return end.transport.bad_frames


_ORDERS = {"add_slab": _add_slab, "write": _write, "cut": _cut_connections, "bad_frames": _bad_frames}


def in_child(function, *args):
    """What `function(*args)` returns in a process of its own, which must then end cleanly."""
    process, pipe = start_process(_report, function, *args)
    try:
        assert pipe.poll(2 * PATIENCE_S), "the child does not answer"
        answer = pipe.recv()
        assert process.wait(PATIENCE_S) == 0
        return answer
    finally:
        process.kill()
        process.wait()
        pipe.close()


def _report(pipe, function, *args):
    pipe.send(function(*args))


def start_process(function, *args):
    """A process that runs `function(pipe, *args)`, and our end of the pipe."""
    ours, theirs = Pipe()
    program = "import sys; from tests.transport.ends import run; run(int(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=_ROOT
    )
    theirs.close()
    ours.send((function, args))
    return process, ours


def run(descriptor):
    pipe = Connection(descriptor)
    function, args = pipe.recv()
    function(pipe, *args)
