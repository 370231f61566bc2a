"""A device that copies nothing before the test says so: a host is never caught in the middle of a copy."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ec_p2p.engine.views import copy_in, copy_out

PATIENCE_S = 60.0


class SlowMark:
    def __init__(self):
        self._over = threading.Event()
        self.waited_for = threading.Event()
        self._error = None

    def passed(self):
        if self._error:
            raise self._error
        return self._over.is_set()

    def wait(self):
        self.waited_for.set()
        assert self._over.wait(PATIENCE_S)
        if self._error:
            raise self._error

    def end(self, error=None):
        self._error = error
        self._over.set()


class SlowDevice:
    """Its tensors are the host's. What it is told to copy it does with `work`, the oldest first."""

    kind = "VRAM"
    index = 0

    def __init__(self):
        self._queue = deque()
        self.marks = []

    def of(self, device):
        """For whoever asks which device a tensor's is."""
        return self

    def memory(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self):
        return self._enqueue(lambda: None)

    def copy_out(self, arena, offset, tensor):
        return self._enqueue(lambda: copy_out(arena, offset, tensor))

    def copy_in(self, arena, offset, tensor, dtype=None):
        return self._enqueue(lambda: copy_in(arena, offset, tensor, dtype or tensor.dtype))

    def forget(self, arena):
        pass

    def work(self, copies=None):
        """Make so many of the copies that wait; None: all."""
        for _ in range(len(self._queue) if copies is None else copies):
            copy, mark = self._queue.popleft()
            copy()
            mark.end()

    def fail(self):
        """The copy that is next fails."""
        self._queue.popleft()[1].end(RuntimeError("an illegal memory access was encountered"))

    def _enqueue(self, copy):
        mark = SlowMark()
        self.marks.append(mark)
        self._queue.append((copy, mark))
        return mark
