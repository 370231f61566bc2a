"""What a directory that cannot be made leaves behind: nothing."""

from __future__ import annotations

import errno
import gc
import os
import threading
from typing import Any

import pytest
import zmq

from ec_p2p.control import directory, security
from ec_p2p.control.directory import Directory
from tests.control.keys import Pair


def held() -> tuple[set[str], int]:
    """Names of threads, and how many descriptors are open."""
    gc.collect()
    return {thread.name for thread in threading.enumerate()}, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.XPUB])
def test_a_socket_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    opened = directory.open_socket

    def no_more(context: Any, wanted: int, *where: Any, **options: Any) -> Any:
        if wanted == kind:
            raise zmq.ZMQError(errno.EMFILE)
        return opened(context, wanted, *where, **options)

    monkeypatch.setattr(directory, "open_socket", no_more)
    before = held()
    with pytest.raises(zmq.ZMQError):
        Directory("tcp://127.0.0.1:0", security=Pair().security())
    assert held() == before


def test_a_gate_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: Any) -> int:
        raise OSError("no descriptor left")

    monkeypatch.setattr(security.os, "eventfd", no_more)
    before = held()
    with pytest.raises(OSError, match="no descriptor left"):
        Directory("tcp://127.0.0.1:0", security=Pair().security())
    assert held() == before
