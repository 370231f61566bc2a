"""A writer that evicts and rewrites a small arena without a pause, and readers in other processes that READ from it all
the while: the read protocol, with nothing between it and the transport.

Every 8-byte word of a payload is a tag made of the entry's identity and generation, so a single foreign word shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from typing import NamedTuple

import msgpack
import torch
import zmq

from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import LocalCPUBackend
from ec_p2p.engine.entry import layout_of
from ec_p2p.engine.extents import Extents
from ec_p2p.engine.generation import RECORD_BYTES, proves
from ec_p2p.transport import open_transport
from ec_p2p.transport.interface import Span, State
from tests.transport.ends import MIB, until

_ARENA = 32 * MIB
_SLAB = 8 * MIB
_SIZES = (64 << 10, 256 << 10, MIB)
LIVES = _ARENA * len(_SIZES) // sum(_SIZES)
"""An entry is evicted when about so many others have been written."""
_DIM = 32
_WORD = torch.int64.itemsize


class Promise(NamedTuple):
    """What an advert says."""

    identity: bytes
    nbytes: int
    offset: int
    record: int
    generation: int


class Tally(NamedTuple):
    """What a reader has seen. `torn`: rejected, and rightly so, for words of another entry were in the payload."""

    valid: int
    valid_words: int
    wrong: int
    rejected: int
    torn: int


def tag(identity: bytes, generation: int) -> int:
    """63 bits that no other entry's words have."""
    return int.from_bytes(hashlib.sha256(identity + generation.to_bytes(8, "little")).digest()[:8], "little") >> 1


class _End:
    """An arena of the product's own, all of it registered with a transport."""

    def __init__(self, kind, name, arena):
        self.arena = arena
        self.context = zmq.Context()
        self.transport = open_transport(
            kind,
            name,
            arena.base,
            arena.nbytes,
            context=self.context,
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
        )
        for offset in range(0, arena.nbytes, arena.slab_bytes):
            self.transport.register(offset, arena.slab_bytes)

    def close(self):
        self.transport.close()
        self.context.destroy(linger=0)


def write(pipe, kind, name):
    """Serve, rewrite, and publish promises on a PUB socket, until told to stop; reports how many were written."""
    end = _End(kind, name, Arena.create(_ARENA, _SLAB))
    stop = threading.Event()
    written = []
    with end.context.socket(zmq.PUB) as promises:
        promises.setsockopt(zmq.SNDHWM, 4)
        port = promises.bind_to_random_port("tcp://127.0.0.1")
        writer = threading.Thread(target=_rewrite, args=(end.arena, promises, stop, written))
        pipe.send((end.transport.card(), port))
        writer.start()
        poller = zmq.Poller()
        for target in (pipe.fileno(), *end.transport.sockets()):
            poller.register(target, zmq.POLLIN)
        while not pipe.poll():
            poller.poll(100)
            end.transport.progress()
        stop.set()
        writer.join()
    pipe.send(len(written))
    end.close()


def _rewrite(arena, promises, stop, written):
    backend = LocalCPUBackend(arena)
    words = torch.frombuffer(arena.buffer, dtype=torch.int64)
    generation = 0
    while not stop.is_set():
        generation += 1
        nbytes = _SIZES[generation % len(_SIZES)]
        identity = hashlib.sha256(generation.to_bytes(8, "little")).digest()
        extent = backend.reserve(nbytes)
        start = extent.offset // _WORD
        words[start : start + nbytes // _WORD].fill_(tag(identity, generation))
        entry = backend.publish(extent, identity, nbytes, nbytes // (2 * _DIM), _DIM, "bfloat16")
        assert entry.generation == generation
        promise = Promise(identity, nbytes, entry.offset, entry.record_offset, generation)
        with contextlib.suppress(zmq.Again):
            promises.send(msgpack.packb(promise), zmq.NOBLOCK)
        written.append(generation)


def read(pipe, kind, name, peer, card, port, words_wanted, rejections_wanted):
    """READ what is promised, as a node does: the payload, then its record, then the comparison."""
    end = _End(kind, name, Arena.create(2 * _SLAB, _SLAB))
    end.transport.connect(peer, card)
    landing = Extents(end.arena).reserve(max(_SIZES))
    place = landing.landing_record
    words = torch.frombuffer(end.arena.buffer, dtype=torch.int64)[landing.offset // _WORD :]
    valid = valid_words = wrong = rejected = torn = 0
    known: list[Promise] = []
    with end.context.socket(zmq.SUB) as promises:
        promises.setsockopt(zmq.RCVHWM, 4)
        promises.subscribe(b"")
        promises.connect(f"tcp://127.0.0.1:{port}")
        while valid_words < words_wanted or rejected < rejections_wanted or not torn:
            promise = _choose(promises, known)
            _transfer(end, peer, Span(promise.offset, landing.offset, promise.nbytes))
            _transfer(end, peer, Span(promise.record, place, RECORD_BYTES))
            record = end.arena.buffer[place : place + RECORD_BYTES]
            layout = layout_of(promise.nbytes // (2 * _DIM), _DIM, "bfloat16")
            foreign = int((words[: promise.nbytes // _WORD] != tag(promise.identity, promise.generation)).sum())
            if proves(record, promise.generation, promise.identity, layout):
                valid += 1
                valid_words += promise.nbytes // _WORD
                wrong += foreign
            else:
                rejected += 1
                torn += foreign > 0
    pipe.send(Tally(valid, valid_words, wrong, rejected, torn))
    end.close()


def _choose(promises, known):
    """The newest promise, or one whose entry is about to be evicted, or was just now."""
    while promises.poll(0 if known else 30_000):
        known.append(Promise(*msgpack.unpackb(promises.recv())))
    assert known, "the writer is silent"
    newest = known[-1].generation
    known[:] = [promise for promise in known if promise.generation > newest - LIVES - 2]
    return random.choice((known[0], known[-1]))


def _transfer(end, peer, span):
    reading = end.transport.read(peer, [span])

    def ended():
        end.transport.progress()
        return reading.poll() is not State.POSTED

    until(ended, "a READ")
    assert reading.poll() is State.DONE, reading.error
    assert reading.release()
