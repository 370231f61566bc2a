"""torch.cuda, played on the host: streams that do their work when they are told to, and a driver that keeps account.

For what the GPU's copies promise: in which order things are asked of CUDA, what is pinned when, and what becomes of it
when the driver refuses. Whether the device then does what it was asked is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from types import SimpleNamespace

import torch


class Stream:
    def __init__(self, cuda, device):
        self.cuda, self.device = cuda, device
        self.queue = deque()

    def synchronize(self):
        self.cuda.work()
        assert not self.queue

    def wait_stream(self, other):
        self.queue.append(("wait", self.cuda.Event().recorded_in(other)))

    def work(self):
        """Do what is enqueued, as far as it waits for nothing that is not done."""
        while self.queue:
            kind, it = self.queue[0]
            if kind == "wait" and not it.done:
                return
            self.queue.popleft()
            if kind == "event":
                it.done = True
            elif kind == "do":
                it()


class Event:
    def __init__(self, cuda, blocking=False):
        self.cuda, self.blocking, self.done, self.device = cuda, blocking, False, None

    def recorded_in(self, stream):
        self.device = stream.device
        stream.queue.append(("event", self))
        return self

    def record(self):
        self.recorded_in(self.cuda.current_stream())

    def query(self):
        assert self.cuda.current_device() == self.device, "a context would be made on a device that is not ours"
        return self.done

    def synchronize(self):
        assert self.cuda.current_device() == self.device
        assert self.blocking
        self.cuda.work()
        assert self.done


class Cuda:
    """In place of torch.cuda."""

    def __init__(self, devices=2):
        self.devices = devices
        self.refuses = lambda address: False
        self.registered = {}
        """{address: bytes}, as the driver has them."""
        self.unregistered = []
        self.pending_error = False
        self.streams = []
        self._own = threading.local()
        self._defaults = [self._stream(index) for index in range(devices)]

    # what torch.cuda has

    def device_count(self):
        return self.devices

    def current_device(self):
        return getattr(self._own, "device", 0)

    def current_stream(self):
        return getattr(self._own, "streams", {}).get(self.current_device(), self._defaults[self.current_device()])

    @contextlib.contextmanager
    def device(self, index):
        before = self.current_device()
        self._own.device = index
        try:
            yield
        finally:
            self._own.device = before

    @contextlib.contextmanager
    def stream(self, stream):
        streams = self._own.__dict__.setdefault("streams", {})
        before = streams.get(stream.device)
        streams[stream.device] = stream
        try:
            yield
        finally:
            if before is None:
                del streams[stream.device]
            else:
                streams[stream.device] = before

    def Stream(self, index):
        return self._stream(index)

    def Event(self, blocking=False):
        return Event(self, blocking)

    def synchronize(self, index):
        self.work()

    def cudart(self):
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    # what the test does

    def work(self):
        """All that is enqueued, on every stream."""
        before = None
        while before != (before := sum(len(stream.queue) for stream in self.streams)):
            for stream in self.streams:
                stream.work()

    def enqueue(self, action):
        """As a kernel, on the current stream."""
        self.current_stream().queue.append(("do", action))

    def launched(self):
        """Whoever launches a kernel finds the error of the call before."""
        if self.pending_error:
            self.pending_error = False
            raise RuntimeError("CUDA error: out of memory")

    def covered(self, address, nbytes):
        """How much of these bytes the registration covers that covers most of them."""
        ends = (min(address + nbytes, base + size) - max(address, base) for base, size in self.registered.items())
        return max(0, *ends, 0)

    # inside

    def _stream(self, index):
        self.streams.append(Stream(self, index))
        return self.streams[-1]

    def _register(self, address, nbytes, flags):
        assert flags == 1
        assert not any(base < address + nbytes and address < base + size for base, size in self.registered.items())
        if self.refuses(address):
            self.pending_error = True
            return Refused()
        self.registered[address] = nbytes
        return SimpleNamespace(value=0)

    def _unregister(self, address):
        ctypes.string_at(address, 1)  # ends the process if it is not mapped any more
        if address not in self.registered:
            self.pending_error = True
            return Refused()
        self.unregistered.append((address, self.registered.pop(address)))
        return SimpleNamespace(value=0)


class Refused:
    value = 2

    def __str__(self):
        return "out of memory"


class OnGpu(torch.Tensor):
    """A tensor of the host that passes for one of the played device: copies go through the streams."""

    cuda: Cuda
    recorded = None

    def record_stream(self, stream):
        self.recorded = stream

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            return cls._copy(*args, **(kwargs or {}))
        if function is torch.Tensor.fill_:
            cls.cuda.launched()
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def _copy(cls, target, source, non_blocking=False):
        plain_target, plain_source = target.as_subclass(torch.Tensor), source.as_subclass(torch.Tensor)
        host = plain_source if isinstance(target, cls) else plain_target
        covered = cls.cuda.covered(host.data_ptr(), host.nbytes)
        assert covered == (host.nbytes if non_blocking else 0), "one registration must cover the copy, or none"
        cls.cuda.enqueue(lambda: plain_target.copy_(plain_source))
        if not non_blocking:
            cls.cuda.current_stream().synchronize()
        return target


class Torch:
    """In place of torch: as it is, with a played GPU."""

    def __init__(self, cuda):
        self.cuda = cuda

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, device="cpu", **settings):
        tensor = torch.empty(*shape, **settings)
        return tensor.as_subclass(OnGpu) if "cuda" in str(device) else tensor
