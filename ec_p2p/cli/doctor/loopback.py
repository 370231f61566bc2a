"""A READ between two processes of this host, as a node does it: the shortest proof that the data plane works."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from ec_p2p.cli.doctor.finding import Finding, Level, note, ok, problem
from ec_p2p.cli.doctor.library_words import warnings_in, write_to
from ec_p2p.cli.doctor.ports import LOOPBACK, bind_host
from ec_p2p.cli.ending import end_with_starter
from ec_p2p.cli.words import size
from ec_p2p.config import Config
from ec_p2p.control.sockets import new_context
from ec_p2p.node.network import interconnect_of
from ec_p2p.transport import Span, State, Transport, chosen_kind, open_transport

_BYTES = 16 << 20
_SMALL = 64
_ROUNDS = 20
_PATIENCE_S = 20.0
_SLOW = 125e6
"""Bytes a second. A busy machine of two cores does several times this, whatever the transport."""
LOG_LEVELS = {"UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"}


class Measured(NamedTuple):
    """Seconds of a READ of 64 bytes, and bytes a second of one of 16 MiB."""

    kind: str
    small_s: float
    bytes_per_s: float


class Attempt(NamedTuple):
    """What came of trying."""

    measured: Measured | None
    error: str
    """Why nothing was measured; empty: something was."""
    words: list[str]
    """The libraries' own complaints, which there may be even so."""


def attempt(config: Config) -> Attempt:
    """Whatever the libraries raise, or do, ends here."""
    with tempfile.NamedTemporaryFile("r", prefix="ec-p2p-doctor-", errors="replace") as written:
        measured, error = None, ""
        try:
            measured = measure(config, written.name)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        text = written.read()
    if LOG_LEVELS & os.environ.keys():  # somebody wants to read it
        print(text, end="", file=sys.stderr)
    return Attempt(measured, error, warnings_in(text))


def read(config: Config, attempt: Attempt, causes: Sequence[Finding] = ()) -> Finding:
    """`causes`: what else was found that would explain a failure, which is not counted twice then."""
    measured = attempt.measured
    if measured is None:
        known = [finding.thing for finding in causes if finding.level is Level.PROBLEM]
        if known:
            return note("loopback read", f"failed, which follows from the above: {', '.join(known)}")
        wrote = f"; what was written meanwhile: {'; '.join(attempt.words)}" if attempt.words else ""
        mend = "look at nixl_backend, nixl_params and ucx_tls, and at UCX_*; `transport: zmq` needs none of it"
        return problem("loopback read", f"failed: {attempt.error}{wrote}", mend)
    chosen = str(interconnect_of(config)) if measured.kind == "nixl" else ""
    says = (
        f"{measured.kind}{' with ' + chosen if chosen else ''}: {_SMALL} bytes in {measured.small_s * 1e6:.0f} us, "
        f"{size(_BYTES)} at {measured.bytes_per_s / 1e9:.2f} GB/s"
    )
    if measured.bytes_per_s < _SLOW:
        mend = "see what else runs here, and measure for longer with `ec-p2p bench fetch`"
        return note("loopback read", f"{says}: slower than a network of 1 Gbit/s", mend)
    return ok("loopback read", says)


def measure(config: Config, log: str = os.devnull) -> Measured:
    """With the transport, and over the interconnect, that is configured. What libraries write goes to the file `log`.

    In two processes of their own: a library that aborts, or hangs, takes none of ours along. Raises whatever the
    transport does, and TimeoutError."""
    context = multiprocessing.get_context("spawn")
    to_holder, holders = context.Pipe()
    to_reader, readers = context.Pipe()
    children = [
        context.Process(target=_hold, args=(config, holders, log), daemon=True),
        context.Process(target=_read, args=(config, readers, log), daemon=True),
    ]
    for child in children:
        child.start()
    holders.close()
    readers.close()
    try:
        to_reader.send(_answer(to_holder, "the holder"))
        measured = _answer(to_reader, "the reader")
        assert isinstance(measured, Measured)
        return measured
    finally:
        for child in children:
            child.kill()
            child.join()
        for pipe in (to_holder, to_reader):
            pipe.close()


def _answer(pipe: multiprocessing.connection.Connection, who: str) -> object:
    try:
        if not pipe.poll(_PATIENCE_S):
            raise TimeoutError(f"{who} said nothing for {_PATIENCE_S:.0f} s")
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError(f"{who} ended without a word") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _hold(config: Config, pipe: multiprocessing.connection.Connection, log: str) -> None:
    end_with_starter()
    write_to(log)
    try:
        with mmap.mmap(-1, _BYTES) as memory:
            transport = _open(config, "holder", memory)
            pipe.send(transport.card())
            poller = zmq.Poller()
            for socket in transport.sockets():
                poller.register(socket, zmq.POLLIN)
            while True:
                poller.poll(20)
                transport.progress()
    except Exception as error:
        pipe.send(error)


def _read(config: Config, pipe: multiprocessing.connection.Connection, log: str) -> None:
    end_with_starter()
    write_to(log)
    try:
        with mmap.mmap(-1, _BYTES) as memory:
            transport = _open(config, "reader", memory)
            transport.connect(f"holder-{os.getppid()}", pipe.recv())
            small = [_time(transport, _SMALL) for _ in range(_ROUNDS)]
            large = [_time(transport, _BYTES) for _ in range(_ROUNDS)]
            pipe.send(Measured(transport.kind, statistics.median(small), _BYTES / statistics.median(large)))
            pipe.poll(None)
    except Exception as error:
        pipe.send(error)


def _open(config: Config, role: str, memory: mmap.mmap) -> Transport:
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    name = f"{role}-{os.getppid()}"
    transport = open_transport(
        config.transport,
        name,
        base,
        _BYTES,
        context=new_context(),
        bind_host=_bind_host(config),
        advertise_host=LOOPBACK,
        interconnect=interconnect_of(config),
    )
    transport.register(0, _BYTES)
    return transport


def _bind_host(config: Config) -> str:
    """NIXL's as the node's, since UCX may use nothing but the loopback device where that is the loopback. ZMQ's need
    not be open to others, if only for a moment."""
    if chosen_kind(config.transport) != "nixl":
        return LOOPBACK
    return bind_host(config) or LOOPBACK


def _time(transport: Transport, nbytes: int) -> float:
    begun = time.perf_counter()
    reading = transport.read(f"holder-{os.getppid()}", (Span(0, 0, nbytes),))
    while reading.poll() is State.POSTED:
        transport.progress()
        if time.perf_counter() - begun > _PATIENCE_S:
            raise TimeoutError(f"a READ of {nbytes} bytes has not ended in {_PATIENCE_S:.0f} s")
    if reading.poll() is State.FAILED:
        raise RuntimeError(reading.error)
    reading.release()
    return time.perf_counter() - begun
