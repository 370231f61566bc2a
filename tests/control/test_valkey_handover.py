"""The queues between a loop and a thread: in order, bounded, and never in the way of an end."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from ec_p2p.control.valkey_handover import ToLoop, ToThread
from tests.control.harness import PATIENCE_S


@pytest.fixture
def to_loop() -> Iterator[ToLoop[str]]:
    queue: ToLoop[str] = ToLoop(room=10)
    yield queue
    queue.close()


def readable(queue: ToLoop[str]) -> bool:
    return bool(select.select([queue.fd], [], [], 0)[0])


def test_the_loop_takes_in_order_and_is_woken_while_something_is_left(to_loop: ToLoop[str]) -> None:
    assert not readable(to_loop)
    for word in ("a", "b", "c"):
        to_loop.post(word, 3)
    assert readable(to_loop)
    assert to_loop.take(4) == ["a", "b"]
    assert readable(to_loop)
    assert to_loop.take(4) == ["c"]
    assert not readable(to_loop)
    assert to_loop.take(4) == []
    to_loop.wake()
    assert readable(to_loop)


def test_the_thread_waits_for_room(to_loop: ToLoop[str]) -> None:
    to_loop.post("large", 10)
    thread = threading.Thread(target=to_loop.post, args=("next", 1))
    thread.start()
    assert thread.is_alive()
    assert to_loop.take(1) == ["large"]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert to_loop.take(1) == ["next"]


def test_an_end_frees_who_waits_for_room(to_loop: ToLoop[str]) -> None:
    to_loop.post("large", 10)
    thread = threading.Thread(target=to_loop.post, args=("next", 1))
    thread.start()
    to_loop.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    to_loop.post("too late")
    to_loop.wake()


def test_what_the_thread_has_not_done_stays_first() -> None:
    queue: ToThread[str] = ToThread(room=2)
    assert [queue.offer(word) for word in ("a", "b", "c")] == [True, True, False]
    assert (queue.first(), queue.first()) == ("a", "a")
    queue.done("a")
    assert queue.first() == "b"
    assert queue.unfinished() == ["b"]


def test_what_was_replaced_is_not_done_in_its_place() -> None:
    queue: ToThread[str] = ToThread(room=2)
    queue.offer("a")
    begun = queue.first()
    queue.replace("anew")
    assert begun == "a"
    queue.done(begun)
    assert queue.first() == "anew"


def test_after_the_end_the_rest_may_still_be_done() -> None:
    queue: ToThread[str] = ToThread(room=2)
    queue.offer("goodbye")
    queue.close()
    assert not queue.offer("more")
    queue.replace("more")
    assert queue.first() == "goodbye"
    queue.done("goodbye")
    assert queue.first() is None
