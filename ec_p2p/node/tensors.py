"""Tensors in and out of the arena, on the worker's side.

Owns a worker's write windows, and what is done with the arena's bytes. It must never hand out a tensor that aliases the
arena, and never wait for the node inside a model step, except a moment for a window when none is left: losing an
encoder output costs more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ec_p2p.engine.arena import PAGE
from ec_p2p.engine.extents import whole_pages
from ec_p2p.engine.views import dtype_name, dtype_of
from ec_p2p.node.after_copies import AfterCopies
from ec_p2p.node.client import Detached, NodeClient
from ec_p2p.node.device import PASSED, Device, Mark, device_for
from ec_p2p.node.lander import Lander
from ec_p2p.node.messages import (
    CloseWindow,
    Commit,
    FromNode,
    Landed,
    NoWindow,
    OpenWindow,
    SaveSkipped,
    Window,
)

logger = logging.getLogger(__name__)

_WINDOW_WAIT_S = 0.2
_RETRY_S = 0.5
_SILENCE_S = 5.0
"""A node that did not grant a window in time is not waited for again for so long."""


class Place(NamedTuple):
    """Where a promised entry lies: `nbytes` bytes at `offset` of that incarnation's arena, (rows, dim) of `dtype`; if
    `read` is not 0, it is where that READ has landed on each reader's device."""

    incarnation: bytes
    lease: int
    offset: int
    nbytes: int
    rows: int
    dim: int
    dtype: str
    read: int = 0

    @classmethod
    def of(cls, incarnation: bytes, landed: Landed) -> Place:
        """Where the node of this incarnation says that it has landed."""
        return cls(
            incarnation,
            landed.lease,
            landed.offset,
            landed.nbytes,
            landed.rows,
            landed.dim,
            landed.dtype,
            landed.read,
        )


class Loader:
    """Copies promised entries out of the arena, or from where they have landed on the device."""

    def __init__(self, client: NodeClient, device_of: Callable[[torch.device | str], Device] = device_for) -> None:
        self._client = client
        self._device_of = device_of
        self.lander: Lander | None = None
        """Who lands entries on this worker's device, if anybody does."""

    def load(self, place: Place, device: torch.device | str) -> tuple[torch.Tensor, Mark]:
        """A fresh (rows, dim) tensor on `device`, for use on the current stream, and the mark that must have passed
        before the place's lease is released. Raises LookupError if that node's arena was never mapped here, or nothing
        has landed there."""
        if place.read:
            return self._load_landed(place, device)
        arena = self._client.arena(place.incarnation)
        if arena is None and self._client.attach(1.0):
            arena = self._client.arena(place.incarnation)
        if arena is None:
            raise LookupError(f"the arena of node incarnation {place.incarnation.hex()[:8]} is not mapped")
        tensor = torch.empty((place.rows, place.dim), dtype=dtype_of(place.dtype), device=device)
        return tensor, self._device_of(tensor.device).copy_out(arena, place.offset, tensor)

    def _load_landed(self, place: Place, device: torch.device | str) -> tuple[torch.Tensor, Mark]:
        if self.lander is None:
            raise LookupError(f"nothing lands on this worker's device, {device}")
        tensor = self.lander.view(place.incarnation, place.read).to(device, copy=True)
        return tensor, self._device_of(tensor.device).mark()


class Saver:
    """Copies encoder outputs into write windows, and tells the node about each once its bytes are in place."""

    def __init__(self, client: NodeClient, device_of: Callable[[torch.device | str], Device] = device_for) -> None:
        self._client = client
        self._device_of = device_of
        self._after_copies = AfterCopies(client)
        self._incarnation = b""
        self._windows: list[_WriteWindow] = []
        self._asked: dict[int, int] = {}
        self._not_before = 0.0

    @property
    def copying(self) -> Mark | None:
        """Once this has passed, `settle` has something to say. None: nothing is under way."""
        return self._after_copies.oldest

    def prepare(self) -> None:
        """Take in the node's answers, commit what has been copied, and keep a full window in reserve. Never waits."""
        if self._client.attach():
            self.settle()
            self._renew()

    def settle(self) -> None:
        """Commit what has been copied by now. Never waits."""
        self._take_in(self._client.poll())
        self._after_copies.settle()

    def save(self, identity: bytes, tensor: torch.Tensor) -> str:
        """Copy `tensor`, of shape (rows, dim), as it is after what is enqueued on the current stream by now, and commit
        it as soon as that is done: before this returns if the tensor is on the host, else with a later `settle`. When
        this returns, the tensor may be dropped, and one on the host overwritten.

        Returns 'saved', or why not: 'layout' (not two dimensions, or a dtype that is not shared), 'too_large',
        'no_window', 'detached'.
        """
        if not self._client.attach():
            return "detached"
        self.settle()  # before anything is asked of a node: the end of the one before voids all that is asked by then
        outcome = self._save(identity, tensor)
        if outcome not in ("saved", "detached"):
            self._client.send(SaveSkipped(outcome, identity))
        self._renew()
        return outcome

    def close(self, timeout_s: float) -> bool:
        """Commit what is still being copied, and give the windows back. False: a device is not done with them after
        `timeout_s`, so the node must go on taking them for this client's."""
        for window in self._windows:
            self._after_copies.send(PASSED, CloseWindow(window.window))
        self._windows.clear()
        return self._after_copies.finish(timeout_s)

    # -------------------------------------------------------- inside

    def _save(self, identity: bytes, tensor: torch.Tensor) -> str:
        if tensor.dim() != 2:
            return "layout"
        try:
            dtype = dtype_name(tensor.dtype)
        except ValueError:
            return "layout"
        rows, dim = tensor.shape
        nbytes = tensor.numel() * tensor.element_size()
        takes = whole_pages(nbytes)
        self._after_copies.make_room()
        window = self._window_for(takes)
        if window is None:
            attached = self._client.attached
            if attached is None:
                return "detached"
            return "too_large" if takes > attached.largest_entry else "no_window"
        arena = self._client.arena(self._incarnation)
        assert arena is not None
        offset = window.take(takes)
        copied = self._device_of(tensor.device).copy_in(arena, offset, tensor)
        self._after_copies.send(copied, Commit(window.window, identity, offset, nbytes, rows, dim, dtype))
        return "saved"

    def _window_for(self, takes: int) -> _WriteWindow | None:
        """One with room for an entry that takes so many bytes, whole pages."""
        for window in self._windows:
            if window.room >= takes:
                return window
        # None fits: an item larger than any before, or a burst. One round trip now, larger windows from here on.
        attached = self._client.attached
        if attached is None or takes > attached.largest_entry or time.monotonic() < self._not_before:
            return None
        request = self._ask(max(takes, self._window_bytes))
        deadline = time.monotonic() + _WINDOW_WAIT_S
        while request in self._asked and (left := deadline - time.monotonic()) > 0:
            self._take_in(self._client.poll(left))
        if request in self._asked:
            self._not_before = time.monotonic() + _SILENCE_S
        for window in self._windows:
            if window.room >= takes:
                return window
        return None

    def _renew(self) -> None:
        """Ask for the next window while the current one still has room, so that no save ever waits for one."""
        exhausted = [window for window in self._windows if window.room < window.nbytes // 4]
        fresh = len(self._windows) - len(exhausted)
        if fresh or self._asked or time.monotonic() < self._not_before:
            return
        self._ask(self._window_bytes)

    def _ask(self, nbytes: int) -> int:
        request = self._client.next_id()
        if self._client.send(OpenWindow(request, nbytes)):
            self._asked[request] = nbytes
        return request

    def _take_in(self, messages: list[FromNode | Detached]) -> None:
        for message in messages:
            if isinstance(message, Window):
                if self._asked.pop(message.request, None) is not None:
                    self._adopt(_WriteWindow(message.window, message.offset, message.nbytes))
            elif isinstance(message, NoWindow):
                self._asked.pop(message.request, None)
                self._not_before = time.monotonic() + _RETRY_S
            elif isinstance(message, Detached):
                self._forget_windows()
        if self._client.incarnation != self._incarnation:
            self._forget_windows()
            self._incarnation = self._client.incarnation

    def _adopt(self, window: _WriteWindow) -> None:
        """Use the new window, and give back the exhausted one that it replaces."""
        if len(self._windows) >= 2:
            self._windows.sort(key=lambda known: known.room)
            self._after_copies.send(PASSED, CloseWindow(self._windows.pop(0).window))
        self._windows.append(window)

    def _forget_windows(self) -> None:
        self._after_copies.drop()
        self._windows.clear()
        self._asked.clear()
        self._not_before = 0.0

    @property
    def _window_bytes(self) -> int:
        """What is configured, but never so much that a few workers' windows leave no room for entries."""
        attached = self._client.attached
        if attached is None:
            return PAGE
        return min(self._client.config.window_size, attached.arena_bytes // 8, attached.largest_entry)


class _WriteWindow:
    """A stretch of the arena that only this process writes to, filled from the front."""

    __slots__ = ("_next", "_start", "nbytes", "window")

    def __init__(self, window: int, offset: int, nbytes: int) -> None:
        self.window = window
        self.nbytes = nbytes
        self._start = offset
        self._next = offset

    @property
    def room(self) -> int:
        return self._start + self.nbytes - self._next

    def take(self, nbytes: int) -> int:
        """Offset of `nbytes`, whole pages, that nobody else gets."""
        offset = self._next
        self._next += nbytes
        return offset
