"""Single keys of a terminal, while a command shows something in it.

Owns the terminal's mode, and puts it back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator


class Keyboard:
    """Keys come in one by one, and unseen."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        """To be polled."""

    def wants_to_end(self) -> bool:
        """Once there is something to read: whether it is a q. So is the end of the terminal."""
        typed = os.read(self.descriptor, 1024)
        return not typed or b"q" in typed.lower()


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard | None]:
    """That of this process's terminal; None where there is none."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        mode = termios.tcgetattr(descriptor)
        # A command stopped by ctrl-z would leave the shell a terminal in this state.
        mode[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, mode)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
