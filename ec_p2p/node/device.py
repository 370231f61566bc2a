"""Copies between the arena and a device, and when they are over.

Owns what the process has registered with CUDA, and the streams of its copies: the only module that knows of either. It
must never say that a copy is over while the device may still touch the arena, nor unmap what is registered.

    copy on the host: done on return, its mark has passed
    copy of a GPU:    enqueued on return -> its mark has passed -> the arena's bytes are in place, or may be used again

An arena is pinned slab by slab, each with the first copy that touches it. Of a slab that cannot be pinned the copies
are plain ones: done on return.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, Protocol

import torch

from ec_p2p.engine.arena import Arena
from ec_p2p.engine.views import copy_in, copy_out

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not for the current one only."""


class Mark(Protocol):
    """A point in a device's work. Any thread may ask. Raises RuntimeError if the device has failed."""

    def passed(self) -> bool:
        """Whether the device is past it. Never waits."""

    def wait(self) -> None:
        """Sleep until the device is past it, with the interpreter lock free."""


class Device(Protocol):
    """Where tensors are. Any thread may call; 'current stream' is the calling thread's, for this device."""

    kind: Literal["DRAM", "VRAM", ""]
    """NIXL's word for its memory; empty: it has none."""
    index: int

    def use(self) -> None:
        """Make it the calling thread's current one: libraries that copy on their own look there."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Fresh bytes of it, not zeroed. Who writes to them from elsewhere than the current stream first waits for a
        `mark()` made afterwards: earlier work may still use what the allocator has handed on."""

    def mark(self) -> Mark:
        """Passed once everything is done that is enqueued on the current stream by now."""

    def copy_out(self, arena: Arena, offset: int, tensor: torch.Tensor) -> Mark:
        """Fill a contiguous tensor of this device from the arena, on the current stream. When the mark has passed, the
        arena's bytes may be used again; until then they, and the arena, must stay."""

    def copy_in(self, arena: Arena, offset: int, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Mark:
        """Write a 2-D tensor of this device, of any layout, to the arena, as contiguous `dtype` (None: its own). It is
        written as it is after what is enqueued on the current stream by now, and may be dropped at once, but not
        overwritten before the mark has passed. Then the bytes are in place; until then nobody else may use them."""

    def forget(self, arena: Arena) -> None:
        """No more copies of this arena: undo what was done for them. Waits for those under way."""


def device_for(device: torch.device | str) -> Device:
    """The one that these copies go to or come from. RuntimeError if torch does not know it or has no such device."""
    device = torch.device(device)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        with _LOCK:
            index = device.index if device.index is not None else torch.cuda.current_device() if count else 0
            if index >= count:
                raise RuntimeError(f"there is no {device}: torch finds {count} GPUs here")
            if index not in _CUDA:
                _CUDA[index] = _Cuda(index)
            return _CUDA[index]
    return _HOST if device.type == "cpu" else _Blocking(device)


# -------------------------------------------------------- the host, and what there is nothing better for


class _Passed:
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


PASSED: Mark = _Passed()
"""Of what was over before it was asked for."""


class _Blocking:
    """Every copy is over when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self.kind: Literal["DRAM", "VRAM", ""] = "DRAM" if device.type == "cpu" else ""
        self.index = device.index or 0
        self._device = device

    def use(self) -> None:
        pass

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def mark(self) -> Mark:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return PASSED

    def copy_out(self, arena: Arena, offset: int, tensor: torch.Tensor) -> Mark:
        copy_out(arena, offset, tensor)
        return PASSED

    def copy_in(self, arena: Arena, offset: int, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Mark:
        copy_in(arena, offset, tensor, dtype or tensor.dtype)
        return PASSED

    def forget(self, arena: Arena) -> None:
        pass


_HOST: Device = _Blocking(torch.device("cpu"))


# -------------------------------------------------------- CUDA


class _Event:
    """Keeps the arena of its copy mapped, and so pinned, for as long as anybody may ask."""

    def __init__(self, index: int, arena: Arena | None = None) -> None:
        """Of the current stream, which must be one of device `index`."""
        self._index = index
        self._arena = arena
        # Without `blocking` a wait would burn a core.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    # A thread that has not used CUDA so far is on device 0: there each call would first make a context, of hundreds of
    # megabytes, that nobody needs.

    def passed(self) -> bool:
        with torch.cuda.device(self._index):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with torch.cuda.device(self._index):
            self._event.synchronize()


class _Cuda:
    """One GPU."""

    def __init__(self, index: int) -> None:
        self.kind: Literal["DRAM", "VRAM", ""] = "VRAM"
        self.index = index

    @cached_property
    def _saves(self) -> torch.cuda.Stream:
        """Saves must not wait for what is enqueued after them, nor that for them."""
        return torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]

    def use(self) -> None:
        torch.cuda.set_device(self.index)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.index}")

    def mark(self) -> Mark:
        with torch.cuda.device(self.index):
            return _Event(self.index)

    def copy_out(self, arena: Arena, offset: int, tensor: torch.Tensor) -> Mark:
        with torch.cuda.device(self.index):
            return self._copy(arena, offset, tensor, out=True)

    def copy_in(self, arena: Arena, offset: int, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Mark:
        with torch.cuda.device(self.index):
            self._saves.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._saves):
                tensor.record_stream(self._saves)
                source = tensor.detach().to(dtype or tensor.dtype).contiguous()
                return self._copy(arena, offset, source, out=False)

    def forget(self, arena: Arena) -> None:
        _PINNED.forget(arena)

    def _copy(self, arena: Arena, offset: int, tensor: torch.Tensor, *, out: bool) -> Mark:
        """On the current stream; out of the arena, or into it. The tensor is contiguous."""
        enqueued = False
        try:
            for slab, ours, its in _pieces(arena, offset, tensor):
                pinned = _PINNED.pin(arena, slab, self.index)
                target, source = (its, ours) if out else (ours, its)
                target.copy_(source, non_blocking=pinned)
                enqueued |= pinned
            return _Event(self.index, arena) if enqueued else PASSED
        except BaseException:
            # A copy that raises has no mark: what is enqueued of it must be over.
            torch.cuda.current_stream().synchronize()
            raise


def _pieces(arena: Arena, offset: int, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(offset of the slab, the arena's bytes, the tensor's), slab by slab: CUDA refuses a copy of which one
    registration covers only a part."""
    flat = tensor.view(-1).view(torch.uint8)
    done = 0
    while done < flat.nbytes:
        at = offset + done
        slab = at - at % arena.slab_bytes
        size = min(flat.nbytes - done, slab + arena.slab_bytes - at)
        yield slab, torch.frombuffer(arena.buffer, dtype=torch.uint8, count=size, offset=at), flat[done : done + size]
        done += size


class _PinnedArena:
    """The slabs of one arena that are registered with CUDA, or were refused. Keeps the arena's memory mapped, but not
    the Arena: when nobody has that any more, there can be no further copies."""

    def __init__(self, arena: Arena) -> None:
        self.slabs: dict[int, bool] = {}
        """By offset: whether it is pinned."""
        self.devices: set[int] = set()
        """Those whose copies may be under way."""
        self._base = arena.base
        self._mapping: memoryview | None = arena.buffer

    def pin(self, offset: int, nbytes: int) -> bool:
        """On the current device. False if the slab was refused, now or before."""
        if offset not in self.slabs:
            log = logger.debug if False in self.slabs.values() else logger.warning
            refusal = _cuda("cudaHostRegister", self._base + offset, nbytes, _PORTABLE)
            self.slabs[offset] = not refusal
            if refusal:
                log("%d bytes of the arena cannot be pinned (%s): their copies will be waited for", nbytes, refusal)
        return self.slabs[offset]

    def close(self) -> None:
        """Wait for the copies under way, and unregister. Idempotent."""
        try:
            for index in self.devices:
                torch.cuda.synchronize(index)
            for offset in [offset for offset, pinned in self.slabs.items() if pinned]:
                with torch.cuda.device(min(self.devices)):
                    if refusal := _cuda("cudaHostUnregister", self._base + offset):
                        logger.warning("a slab of the arena is not unregistered: %s", refusal)
        except RuntimeError as error:
            logger.warning("an arena could not be unregistered: %s", error)
        self.slabs.clear()
        self.devices.clear()
        self._mapping = None


class _Pinned:
    """What is pinned, of every arena: CUDA knows one registration of a page in a process, whatever the device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: weakref.WeakKeyDictionary[Arena, tuple[_PinnedArena, weakref.finalize[[], Arena]]] = (
            weakref.WeakKeyDictionary()
        )

    def pin(self, arena: Arena, slab: int, index: int) -> bool:
        """Whether the slab at this offset is pinned, which is tried now if it was not before. On the current device,
        which is `index`. Raises ValueError if the arena is closed."""
        # The driver is called under the lock, and takes tens of ms for a slab: whoever else wants it wants it pinned.
        with self._lock:
            pinned = self._of(arena)
            pinned.devices.add(index)
            return pinned.pin(slab, min(arena.slab_bytes, arena.nbytes - slab))

    def forget(self, arena: Arena) -> None:
        with self._lock:
            known = self._arenas.pop(arena, None)
        if known is not None:
            known[1]()

    def _of(self, arena: Arena) -> _PinnedArena:
        known = self._arenas.get(arena)
        if known is None:
            pinned = _PinnedArena(arena)
            # Nobody has to remember to forget an arena: the last mark of its copies lets it go.
            unregister = weakref.finalize(arena, pinned.close)
            unregister.atexit = False  # the driver may be gone by then, and undoes it by itself
            known = self._arenas[arena] = (pinned, unregister)
        return known[0]


def _cuda(function: str, *arguments: int) -> str:
    """Call the runtime, for the current device. Empty, or what it objects to."""
    error = getattr(torch.cuda.cudart(), function)(*arguments)  # type: ignore[no-untyped-call]
    if not error.value:
        return ""
    # The runtime keeps the error for whoever launches next, who would take it for its own: that shall be us.
    try:
        torch.empty(1, device=f"cuda:{torch.cuda.current_device()}").fill_(1.0)
    except RuntimeError:
        pass
    return f"{function}: {error}"


_LOCK = threading.Lock()
_CUDA: dict[int, _Cuda] = {}
_PINNED = _Pinned()
