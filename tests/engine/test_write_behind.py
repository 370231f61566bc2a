from __future__ import annotations

import gc
import logging
import threading

import pytest

from ec_p2p.engine.filed import Abandoned
from ec_p2p.engine.write_behind import Job, Offer, WriteBehind
from tests.engine.disks import Memory, identity, in_wait, until

KIB4 = (4, 512)
"""Rows and dim of an entry of 4 KiB."""


class Disk:
    """A disk that writes when it is told to."""

    def __init__(self) -> None:
        self.started: list[bytes] = []
        self.may_go_on = threading.Semaphore(0)

    def write(self, job: Job) -> None:
        self.started.append(job.pin.entry.identity)
        self.may_go_on.acquire()


def give(memory: Memory, queue: WriteBehind, number: int, rows: int = 4, dim: int = 512) -> Offer:
    pin = memory.pin(number, rows, dim)
    offer = queue.offer(pin, memory.payload(pin))
    if offer is not Offer.TAKEN:
        pin.close()
    return offer


def test_what_waits_is_bounded_in_bytes(memory: Memory) -> None:
    disk = Disk()
    queue = WriteBehind(3 * 4096, disk.write)
    assert [give(memory, queue, number, *KIB4) for number in range(4)] == [Offer.TAKEN] * 3 + [Offer.FULL]
    assert queue.queued_bytes == 3 * 4096
    until(lambda: disk.started)
    assert give(memory, queue, 4, *KIB4) is Offer.FULL  # what is being written counts
    disk.may_go_on.release()
    until(lambda: queue.queued_bytes == 2 * 4096)
    assert memory.cpu.pinned_bytes == 2 * 4096
    assert give(memory, queue, 4, *KIB4) is Offer.TAKEN
    disk.may_go_on.release(3)
    assert queue.flush(30)
    assert queue.queued_bytes == memory.cpu.pinned_bytes == 0
    assert queue.close(30)
    assert disk.started == [identity(number) for number in (0, 1, 2, 4)]


def test_what_exceeds_the_bound_alone_is_taken_alone(memory: Memory) -> None:
    disk = Disk()
    queue = WriteBehind(4096, disk.write)
    assert give(memory, queue, 0, 8, 512) is Offer.TAKEN
    assert give(memory, queue, 1, 8, 512) is Offer.FULL
    assert give(memory, queue, 2, 0, 512) is Offer.FULL
    disk.may_go_on.release()
    assert queue.flush(30)
    assert give(memory, queue, 3, 1, 512) is Offer.TAKEN
    assert give(memory, queue, 4, 8, 512) is Offer.FULL
    disk.may_go_on.release()
    assert queue.close(30)


def test_a_key_is_on_its_way_once(memory: Memory) -> None:
    disk = Disk()
    queue = WriteBehind(1 << 20, disk.write)
    assert give(memory, queue, 0) is Offer.TAKEN
    until(lambda: disk.started)
    assert give(memory, queue, 0) is Offer.QUEUED  # being written
    assert give(memory, queue, 1) is Offer.TAKEN
    assert give(memory, queue, 1) is Offer.QUEUED  # waiting
    assert queue.holds(identity(0))
    assert queue.holds(identity(1))
    disk.may_go_on.release(2)
    assert queue.flush(30)
    assert not queue.holds(identity(0))
    assert give(memory, queue, 0) is Offer.TAKEN
    disk.may_go_on.release()
    assert queue.close(30)


def test_flush_waits_for_what_came_before_and_not_for_more(memory: Memory) -> None:
    disk = Disk()
    queue = WriteBehind(1 << 20, disk.write)
    assert queue.flush(0)
    give(memory, queue, 0)
    assert not queue.flush(0.01)
    flushed = threading.Event()
    waiter = threading.Thread(target=lambda: queue.flush(None) and flushed.set())
    waiter.start()
    until(lambda: in_wait(waiter, "flush"))
    give(memory, queue, 1)
    disk.may_go_on.release()
    waiter.join(30)
    assert flushed.is_set()
    disk.may_go_on.release()
    assert queue.close(None)


def test_close_drains_and_takes_nothing_more(memory: Memory) -> None:
    disk = Disk()
    queue = WriteBehind(1 << 20, disk.write)
    for number in range(5):
        give(memory, queue, number)
    disk.may_go_on.release(5)
    assert queue.close(30)
    assert len(disk.started) == 5
    assert memory.cpu.pinned_bytes == 0
    assert give(memory, queue, 9) is Offer.CLOSED
    assert queue.close(30)


def test_what_cannot_be_drained_in_time_keeps_its_pins(memory: Memory) -> None:
    disk = Disk()
    queue = WriteBehind(1 << 20, disk.write)
    pins = [memory.pin(number, *KIB4) for number in range(3)]
    for pin in pins:
        assert queue.offer(pin, memory.payload(pin)) is Offer.TAKEN
    until(lambda: disk.started)
    assert not queue.close(0.01)
    assert queue.abandoned()
    disk.may_go_on.release(3)
    queue._thread.join(30)
    assert disk.started == [identity(0)]
    assert memory.cpu.pinned_bytes == 3 * 4096
    for pin in pins:
        pin.close()


def test_an_unforeseen_error_ends_one_entry_only(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    written: list[bytes] = []

    def write(job: Job) -> None:
        if not written:
            written.append(b"")
            raise ZeroDivisionError
        written.append(job.pin.entry.identity)

    queue = WriteBehind(1 << 20, write)
    with caplog.at_level(logging.ERROR):
        give(memory, queue, 0)
        give(memory, queue, 1)
        assert queue.close(30)
    assert written == [b"", identity(1)]
    assert memory.cpu.pinned_bytes == 0
    assert f"could not write entry {identity(0).hex()}" in caplog.text


def test_an_idle_writer_holds_no_memory(memory: Memory) -> None:
    queue = WriteBehind(1 << 20, lambda job: None)
    pin = memory.pin(0)
    payload = bytearray(memory.payload(pin))
    assert queue.offer(pin, memoryview(payload)) is Offer.TAKEN
    assert queue.flush(30)

    def released() -> bool:
        gc.collect()
        try:
            payload.append(0)  # impossible while there is a view of it
        except BufferError:
            return False
        return True

    until(released)
    assert queue.close(30)


def test_many_threads_offer_at_once(memory: Memory) -> None:
    written: list[bytes] = []
    queue = WriteBehind(64 << 10, lambda job: written.append(job.pin.entry.identity))
    taken: list[list[Offer]] = [[] for _ in range(4)]

    def offer(thread: int) -> None:
        for number in range(200):
            taken[thread].append(give(memory, queue, 1000 * thread + number, 1, 512))

    threads = [threading.Thread(target=offer, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.close(30)
    assert memory.cpu.pinned_bytes == 0
    assert queue.queued_bytes == 0
    assert len(written) == sum(offers.count(Offer.TAKEN) for offers in taken) == len(set(written))


def test_abandoned_by_the_writer_itself(memory: Memory) -> None:
    begun, hung = threading.Event(), threading.Event()

    def write(job: Job) -> None:
        begun.set()
        hung.wait(30)
        raise Abandoned

    queue = WriteBehind(1 << 20, write)
    pin = memory.pin(0)
    queue.offer(pin, memory.payload(pin))
    assert begun.wait(30)
    assert not queue.close(0.01)
    hung.set()
    queue._thread.join(30)
    assert memory.cpu.pinned_bytes > 0
    pin.close()
