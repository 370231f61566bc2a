"""The processes that `ec-p2p bench directory` measures: a directory, nodes that announce, replicas that follow.

Owns them and the pipes to them. Each is a real process with real sockets over the loopback; what a process is told to
do over its pipe it does between the turns of its loop, as a node does its work.

A probe's advert carries the time at which it was stored (CLOCK_MONOTONIC, one clock for all processes) as its
generation: whoever sees the advert appear knows how long that took.
"""

from __future__ import annotations

import logging
import math
import mmap
import multiprocessing
import multiprocessing.connection
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from ec_p2p.cli.ending import end_with_starter
from ec_p2p.cli.free_memory import free_memory
from ec_p2p.control.announcer import Announcer
from ec_p2p.control.directory import Directory
from ec_p2p.control.messages import Advert, EntryState, NodeInfo
from ec_p2p.control.replica import Replica
from ec_p2p.control.sockets import Context, new_context

PATIENCE_S = 120.0
PROBE = b"probe"
"""First bytes of the identities that probes advertise."""

_PACE_S = 0.01
_BATCH = 1024
_LOOKUPS = 1_000

Pipe: TypeAlias = "multiprocessing.connection.Connection[Any, Any]"


class Remote:
    """A process that runs `main(pipe, *args)`. Commands are tuples whose first element names them."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(main, there, *args), daemon=True)
        self.process.start()
        there.close()

    def tell(self, *command: Any) -> None:
        self._pipe.send(command)

    def hear(self) -> Any:
        """The next answer. Raises RuntimeError when the process ended, or says nothing for long."""
        try:
            if self._pipe.poll(PATIENCE_S):
                return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a process of the benchmark has ended") from None
        raise RuntimeError("a process of the benchmark does not answer")

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """There is nothing that it would have to leave in order."""
        self._pipe.close()
        self.kill()


def _serve(main: Callable[..., None], *args: Any) -> None:
    end_with_starter()
    logging.disable()  # what is logged when a directory is killed on purpose is of no use
    main(*args)


def serve_directory(pipe: Pipe, bind: str = "tcp://127.0.0.1:0", pub_port: int = 0) -> None:
    """Says (endpoint, port of the publications), and then its stats whenever something is asked."""
    with Directory(bind, pub_port) as directory:
        directory.start()
        pipe.send((directory.endpoint, directory.pub_port))
        with suppress(EOFError, ConnectionError):
            while pipe.recv():
                pipe.send(
                    {
                        **directory.stats(),
                        "cpu_s": time.process_time(),
                        "rss": resident_bytes(),
                        "descriptors": len(os.listdir("/proc/self/fd")),
                    }
                )


def serve_nodes(pipe: Pipe, endpoint: str, numbers: list[int]) -> None:
    """Announcers of the nodes with these numbers.

    ("make", n)         make adverts until each node has n
    ("note",)           note them in the announcers, and stand still until ("send",) comes: then tell them. Both are
                        answered
    ("pace", per_s)     describe entries anew, so many a second over all nodes, until ("rest",), answered with
                        (adverts sent, seconds)
    ("probe", n, gap_s) n adverts, one every gap_s seconds; answered after the last
    ("connected",)      how many nodes the directory has welcomed and told everything
    """
    context = new_context()
    nodes = [_Node(context, endpoint, number) for number in numbers]
    turns = _Turns(pipe, [node.announcer for node in nodes])
    with suppress(EOFError, ConnectionError):
        while True:
            command = turns.until_told()
            if command[0] == "make":
                for node in nodes:
                    node.make(command[1])
                pipe.send(None)
            elif command[0] == "note":
                for node in nodes:
                    node.note()
                pipe.send(None)
                pipe.recv()
                for node in nodes:
                    turns.touch(node.announcer)
                turns.until(lambda: all(_settled(node.announcer) for node in nodes))
                pipe.send(None)
            elif command[0] == "pace":
                pipe.send(_pace(turns, nodes, command[1]))
            elif command[0] == "probe":
                _probe(turns, nodes[0].announcer, *command[1:])
                pipe.send(None)
            elif command[0] == "connected":
                pipe.send(sum(_settled(node.announcer) for node in nodes))
    for node in nodes:
        node.announcer.close()
    context.term()


def serve_replica(pipe: Pipe, endpoint: str) -> None:
    """A replica that follows all the while.

    ("state",)          (entries, number of the last publication applied or None, counters)
    ("latencies",)      milliseconds from each probe's advert until `on_change`, since the last time this was asked
    """
    latencies: list[float] = []

    def on_change(identity: bytes) -> None:
        if identity.startswith(PROBE):
            now = time.monotonic_ns()
            latencies.extend((now - advert.generation) / 1e6 for _, advert in replica.lookup(identity))

    context = new_context()
    replica = Replica(context, endpoint, on_change=on_change)
    turns = _Turns(pipe, [replica])
    with suppress(EOFError, ConnectionError):
        while True:
            (command,) = turns.until_told()
            if command == "state":
                position = replica.position
                pipe.send((len(replica), position and position[1], replica.counters))
            elif command == "latencies":
                pipe.send(latencies[:])
                latencies.clear()
    replica.close()
    context.term()


def serve_newcomer(pipe: Pipe, endpoint: str) -> None:
    """A replica that starts from nothing, once. Answers {seconds, entries, bytes_per_entry, lookup_us}."""
    before = resident_bytes()
    context = new_context()
    replica = Replica(context, endpoint)
    turns = _Turns(pipe, [replica])
    turns.until(lambda: replica.counters["requests"])
    started = time.perf_counter()
    turns.until(lambda: replica.position and replica.fresh)
    seconds = time.perf_counter() - started
    entries = len(replica)
    pipe.send(
        {
            "seconds": seconds,
            "entries": entries,
            "bytes_per_entry": (resident_bytes() - before) / max(1, entries),
            "lookup_us": _lookup_us(replica),
        }
    )
    with suppress(EOFError, ConnectionError):
        pipe.recv()
    replica.close()
    context.term()


def poll_until(condition: Callable[[], object]) -> None:
    """Raises TimeoutError when that never comes true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the benchmark does not get ahead")
        time.sleep(0.005)


def touch_memory(nbytes: int) -> None:
    """Use so much memory and give it back, so that what is measured next does not wait for a virtual machine's host to
    find some. Not more than half of what is free."""
    nbytes = min(nbytes, free_memory() // 2)
    with mmap.mmap(-1, max(1, nbytes)) as memory:
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 1


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Node:
    """One announcing node and the adverts it has made."""

    def __init__(self, context: Context, endpoint: str, number: int) -> None:
        info = NodeInfo(os.urandom(16), f"bench-{number}", f"tcp://127.0.0.1:{1 + number % 65535}")
        self.announcer = Announcer(context, endpoint, info)
        self.adverts: list[Advert] = []
        self._noted = 0

    def make(self, count: int) -> None:
        self.adverts += [self._advert(os.urandom(32), number) for number in range(len(self.adverts), count)]

    def note(self) -> None:
        for advert in self.adverts[self._noted :]:
            self.announcer.store(advert)
        self._noted = len(self.adverts)

    def describe_anew(self, number: int, generation: int) -> None:
        self.announcer.store(self._advert(self.adverts[number % len(self.adverts)].identity, number, generation))

    def _advert(self, identity: bytes, number: int, generation: int = 1) -> Advert:
        return Advert(
            identity=identity,
            state=EntryState.RESIDENT,
            nbytes=4 << 20,
            rows=1024 + number % 1000,
            dim=2048,
            dtype="bfloat16",
            offset=number * (4 << 20),
            record=number * 64,
            generation=generation,
        )


class _Turns:
    """The loop of a process: drives announcers and replicas, and listens to the pipe."""

    def __init__(self, pipe: Pipe, driven: Iterable[Announcer | Replica]) -> None:
        self.pipe = pipe
        self._owners: dict[Any, Announcer | Replica] = {socket: one for one in driven for socket in one.sockets}
        # Those with input and those whose time has come: with hundreds in a process there is no time for the others.
        self._due = dict.fromkeys(driven, 0.0)
        self._poller = zmq.Poller()
        for socket in self._owners:
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(pipe.fileno(), zmq.POLLIN)

    def turn(self, longest_s: float) -> None:
        now = time.monotonic()
        for one, due in self._due.items():
            if due <= now:
                self._due[one] = now + one.tick(now)
        wait_s = max(0.0, min(longest_s, min(self._due.values(), default=now) - now))
        for socket, _ in self._poller.poll(math.ceil(wait_s * 1000)):
            owner = self._owners.get(socket)
            if owner is None:
                continue  # the pipe
            if isinstance(owner, Announcer):
                owner.on_readable()
            else:
                owner.on_readable(socket)
            self._due[owner] = 0.0

    def touch(self, one: Announcer) -> None:
        """It has something to send."""
        self._due[one] = 0.0

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the benchmark does not get ahead")
            self.turn(0.1)

    def until_told(self) -> tuple[Any, ...]:
        """The next command. Raises EOFError when there will be none."""
        while not self.pipe.poll():
            self.turn(1.0)
        command: tuple[Any, ...] = self.pipe.recv()
        return command


def _settled(announcer: Announcer) -> bool:
    return announcer.connected and not announcer.pending


def _pace(turns: _Turns, nodes: list[_Node], per_s: float) -> tuple[int, float]:
    started = time.monotonic()
    sent = 0
    while not turns.pipe.poll():
        owed = int((time.monotonic() - started) * per_s) - sent
        for number in range(sent, sent + min(owed, _BATCH * len(nodes))):
            node = nodes[number % len(nodes)]
            node.describe_anew(number // len(nodes), time.monotonic_ns())
            turns.touch(node.announcer)
            sent += 1
        turns.turn(_PACE_S)
    turns.pipe.recv()
    return sent, time.monotonic() - started


def _probe(turns: _Turns, announcer: Announcer, count: int, gap_s: float) -> None:
    for number in range(count):
        # Not in step with anything else that happens at regular times.
        then = time.monotonic() + gap_s * random.uniform(0.5, 1.5)
        announcer.store(
            Advert(PROBE + bytes(26) + bytes([number % 64]), 1, 4096, 1, 2048, "bfloat16", 0, 0, time.monotonic_ns())
        )
        turns.touch(announcer)
        while (left := then - time.monotonic()) > 0:
            turns.turn(left)


def _lookup_us(replica: Replica) -> float:
    """Of entries picked at random, most of which no cache holds. Median of the means of many rounds."""
    # Other objects than the replica has, as they come with requests.
    picked = [bytes(bytearray(identity)) for identity in random.choices(replica.identities(), k=20 * _LOOKUPS)]
    means = []
    for start in range(0, len(picked), _LOOKUPS):
        started = time.perf_counter()
        for identity in picked[start : start + _LOOKUPS]:
            replica.lookup(identity)
        means.append((time.perf_counter() - started) / _LOOKUPS * 1e6)
    return statistics.median(means)
