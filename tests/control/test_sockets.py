"""What contexts have room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

import ec_p2p
from ec_p2p.control import sockets
from ec_p2p.control.sockets import new_context
from ec_p2p.descriptors import allow_descriptors

FEW = 1_023
"""Sockets that libzmq gives unless told."""


def test_a_context_has_room_for_the_sockets_of_a_large_fleet() -> None:
    if allow_descriptors() < 2 * FEW:
        pytest.skip("this process may not have so many descriptors")
    with new_context() as context:
        opened = [context.socket(zmq.DEALER) for _ in range(FEW + 100)]
        for socket in opened:
            socket.close(linger=0)


def test_every_context_of_ours_is_made_so() -> None:
    roots = {Path(str(ec_p2p.__file__)).parent, Path(str(sockets.__file__)).parent}
    makers = {path.name for root in roots for path in root.rglob("*.py") if "zmq.Context(" in path.read_text()}
    assert makers == {"sockets.py"}
