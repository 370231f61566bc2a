"""What a directory that cannot be made leaves behind: nothing."""

from __future__ import annotations

import errno
import gc
from typing import Any

import pytest
import zmq

from ec_p2p.control import directory, security
from ec_p2p.control.directory import Directory
from tests.control.harness import opened
from tests.control.keys import Pair


def held() -> set[object]:
    gc.collect()  # what another test has dropped must not end in between
    return opened()


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.XPUB])
def test_a_socket_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    open_one = directory.open_socket

    def no_more(context: Any, wanted: int, *where: Any, **options: Any) -> Any:
        if wanted == kind:
            raise zmq.ZMQError(errno.EMFILE)
        return open_one(context, wanted, *where, **options)

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
