"""This host's node, asked as a client asks it.

Never starts one, and keeps nothing of the one that there is: the descriptor of the arena is closed at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.config import Config
from ec_p2p.control.codec import BadFrame, encode
from ec_p2p.node.address import attach_address
from ec_p2p.node.link import Link, hail, hear_answer
from ec_p2p.node.messages import CLIENT_PROTOCOL_VERSION, Attach, Inspect, Inspection

_ANSWER_S = 3.0
_HELLO = Attach(CLIENT_PROTOCOL_VERSION, "tool", "doctor", -1)
_BLOCK = 512

_T = TypeVar("_T")


class HostNode(NamedTuple):
    """What was found under the node's name."""

    answer: Inspection | None
    """None: there is no node, or it is of no use."""
    trouble: str
    """Why one that is there is of no use; empty: it answers, or there is none."""
    arena_held: int
    """Bytes of memory that its arena has taken so far."""


_NOBODY = HostNode(None, "", 0)


def look(config: Config) -> HostNode:
    """Takes a few seconds where a node is there and does not answer."""
    until = time.monotonic() + _ANSWER_S
    try:
        with contextlib.closing(hail(attach_address(config), _HELLO)) as sock:
            attached, arena = _await(lambda: hear_answer(sock), sock.fileno(), until)
            held = os.fstat(arena).st_blocks * _BLOCK
            os.close(arena)
            link = Link(sock, attached, time.monotonic())
            link.send(encode(Inspect(1)))
            return HostNode(_await(lambda: _inspection(link), sock.fileno(), until), "", held)
    except (ConnectionRefusedError, FileNotFoundError):
        return _NOBODY
    except (TimeoutError, BlockingIOError):  # the latter: so many wait for its answer that there is no room for us
        return HostNode(None, f"is there, but has not answered for {_ANSWER_S:.0f} s", 0)
    except PermissionError as error:
        return HostNode(None, f"belongs to another user ({error.strerror})", 0)
    except (OSError, BadFrame) as error:
        return HostNode(None, f"cannot be asked: {error}", 0)


def node(config: Config, host: HostNode) -> Finding:
    """Whether this host has its node."""
    if host.answer is not None:
        return ok("node", f"{config.name!r} runs on this host, as process {host.answer.node['pid']}")
    if host.trouble:
        mend = (
            "look whether it is stopped or hangs (`ps`, its log), runs as another user (node_socket, node_group), or "
        )
        return problem("node", f"{config.name!r} {host.trouble}", f"{mend}is of another version; and start it anew")
    if config.spawn_node:
        return ok("node", f"none called {config.name!r} yet: the first instance will start it")
    return note("node", f"none called {config.name!r}, and spawn_node is off", "start `ec-p2p node`")


def _await(hear: Callable[[], _T | None], fd: int, until: float) -> _T:
    """What `hear` brings once it does. Raises TimeoutError."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        heard = hear()
        if heard is not None:
            return heard
        left_s = until - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError


def _inspection(link: Link) -> Inspection | None:
    while heard := link.receive():
        for message in heard:
            if isinstance(message, Inspection):
                return message
    if not link.alive():
        raise ConnectionResetError("it has ended just now")
    return None
