"""What only NIXL does: READs without the holder's help, and READs that cannot be called back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys

import pytest

from ec_p2p.transport import nixl_available
from ec_p2p.transport.interface import Span, State, TransportError
from tests.transport.ends import ARENA, MIB, SLAB, End, Holder, in_child, stop_process, unique_name, until

pytestmark = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]


@pytest.fixture
def holder():
    holder = Holder("nixl", slabs=2)
    yield holder
    holder.close()


def read_from_stopped(name, card, pid):
    end = End("nixl", unique_name(), slabs=2)
    end.transport.connect(name, card)
    end.fetch(name, 0, 0, 64)
    stop_process(pid)
    landed = end.fetch(name, 1000, 0, SLAB)
    end.close()
    return landed


def test_shared_memory_needs_no_help_of_the_holder(holder):
    assert in_child(read_from_stopped, holder.name, holder.card, holder.pid) == holder.bytes[1000 : 1000 + SLAB]


def read_beyond_the_arena(name, card):
    end = End("nixl", unique_name())
    elsewhere = mmap.mmap(-1, 4 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(elsewhere))
    end.transport.register_beyond(address, 3 * MIB, "DRAM", 0)
    end.transport.connect(name, card)
    reading = end.transport.read(name, [Span(77, ARENA + 5, MIB), Span(5 * MIB, ARENA + 2 * MIB, MIB)])
    states = [end.wait(reading)]
    end.fetch(name, 9, 0, 64)  # the arena is as it was
    refusals = []
    for span in (Span(0, ARENA + 3 * MIB - 63, 64), Span(0, ARENA - 32, 64)):
        with pytest.raises(TransportError) as refused:
            end.transport.read(name, [span])
        refusals.append(str(refused.value))
    landed = elsewhere[5 : 5 + MIB], elsewhere[2 * MIB : 3 * MIB], elsewhere[3 * MIB :]
    end.close()
    return states, landed, refusals


def test_memory_beyond_the_arena_is_landed_in_like_the_arena(holder):
    states, (first, second, behind), refusals = in_child(read_beyond_the_arena, holder.name, holder.card)
    assert states == [State.DONE]
    assert first == holder.bytes[77 : 77 + MIB]
    assert second == holder.bytes[5 * MIB : 6 * MIB]
    assert behind == bytes(MIB)
    assert refusals == [
        f"beyond our arena: 64 bytes at offset {3 * MIB - 63} are not among the {3 * MIB} bytes registered",
        f"our arena: 64 bytes at offset {ARENA - 32} are not among the {SLAB} bytes registered",
    ]


def drop_a_stopped_peer(name, card, pid):
    """Through TCP the holder must answer. What a READ may still do, once nobody wants it any more."""
    end = End("nixl", unique_name())
    transport = end.transport
    transport.connect(name, card)
    end.fetch(name, 0, 0, 64)
    stop_process(pid)
    end.memory[:MIB] = bytes(MIB)
    reading = transport.read(name, [Span(0, 0, MIB)])
    transport.forget(name)
    released = []
    for _ in range(100):
        transport.progress()
        released.append(reading.release())
    os.kill(pid, signal.SIGCONT)
    until(reading.release, "the library to let go")
    written = end.memory[:MIB]

    transport.progress()
    transport.connect(name, card)
    landed = end.fetch(name, 5, 0, 64)
    end.close()
    return released, reading.poll(), written, landed


def test_a_reading_is_not_let_go_while_it_may_still_write(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    holder = Holder("nixl")
    try:
        released, state, written, landed = in_child(drop_a_stopped_peer, holder.name, holder.card, holder.pid)
        assert released == [False] * 100
        assert state is State.FAILED
        assert written == holder.bytes[:MIB], "late, but it was written: the memory was not free to be used"
        assert landed == holder.bytes[5:69]
    finally:
        holder.close()


def learn_of_a_slab_during_a_read(name, card, newer, pid):
    end = End("nixl", unique_name())
    end.transport.connect(name, card)
    end.fetch(name, 0, 0, 64)
    stop_process(pid)
    reading = end.transport.read(name, [Span(0, 0, MIB)])
    end.transport.connect(name, newer)
    end.transport.progress()
    assert reading.poll() is State.POSTED
    os.kill(pid, signal.SIGCONT)
    assert end.wait(reading) is State.DONE
    landed = end.memory[:MIB], end.fetch(name, SLAB, 0, 64)
    end.close()
    return landed


def test_a_newer_card_during_a_read(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    holder = Holder("nixl")
    try:
        newer = holder.ask("add_slab")
        landed = in_child(learn_of_a_slab_during_a_read, holder.name, holder.card, newer, holder.pid)
        assert landed == (holder.bytes[:MIB], holder.bytes[SLAB : SLAB + 64])
    finally:
        holder.close()


def close_beside_a_stopped_peer(name, card, pid):
    end = End("nixl", unique_name())
    end.transport.connect(name, card)
    end.fetch(name, 0, 0, 64)
    stop_process(pid)
    readings = [end.transport.read(name, [Span(0, place * MIB, MIB)]) for place in range(8)]
    end.close()
    states = [reading.poll() for reading in readings]
    return states, [reading.release() for reading in readings]


def test_closing_beside_a_stopped_peer(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    holder = Holder("nixl")
    try:
        states, released = in_child(close_beside_a_stopped_peer, holder.name, holder.card, holder.pid)
        assert states == [State.FAILED] * 8
        assert released == [True] * 8
    finally:
        holder.close()


def read_over_tcp(name, card):
    end = End("nixl", unique_name(), slabs=2)
    end.transport.connect(name, card)
    landed = end.fetch(name, 3, 5, ARENA - 8)
    end.close()
    return landed


def test_reads_over_tcp(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    holder = Holder("nixl", slabs=2)
    try:
        assert in_child(read_over_tcp, holder.name, holder.card) == holder.bytes[3 : ARENA - 5]
    finally:
        holder.close()


def listening_addresses():
    end = End("nixl", unique_name())
    addresses = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.family != socket.AF_UNIX:
                    addresses.add(found.getsockname()[0])
    end.close()
    return addresses


def test_an_end_bound_to_the_loopback_listens_nowhere_else():
    assert in_child(listening_addresses) == {"127.0.0.1"}


def test_signals_stay_ours_and_settings_of_the_user_win():
    program = """
import os, signal
os.environ["UCX_KEEPALIVE_INTERVAL"] = "7s"
before = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
from tests.transport.ends import End
end = End("nixl", "x")
after = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
hangup = 1 << (signal.SIGHUP - 1)
assert int(before, 16) & hangup == int(after, 16) & hangup == 0
assert os.environ["UCX_KEEPALIVE_INTERVAL"] == "7s"
assert os.environ["UCX_DEBUG_SIGNO"] == "0"
end.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
