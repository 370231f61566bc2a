"""Copies between the arena and a device: the host's for real, a GPU's against a played CUDA."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

from ec_p2p.engine.arena import Arena
from ec_p2p.node import device as device_module
from ec_p2p.node.device import device_for

from .played_cuda import Cuda, OnGpu, Torch

SLAB = 16384
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]


@pytest.fixture
def arena():
    arena = Arena.create(5 * SLAB + 4096, SLAB)
    yield arena
    arena.close()


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(device_module, "torch", Torch(cuda))
    monkeypatch.setattr(device_module, "_CUDA", {})
    pinned = device_module._Pinned()
    monkeypatch.setattr(device_module, "_PINNED", pinned)
    monkeypatch.setattr(OnGpu, "cuda", cuda, raising=False)
    yield cuda
    for arena in list(pinned._arenas):
        pinned.forget(arena)


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def read(arena, offset, like):
    found = torch.frombuffer(arena.buffer, dtype=like.dtype, count=like.numel(), offset=offset)
    return found.view(like.shape).clone()


# ------------------------------------------------------------ the host


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor", [numbers(6, 8), numbers(6, 8).t(), numbers(8, 12)[:, ::2], numbers(0, 4)])
def test_on_the_host_a_copy_is_over_when_it_returns(arena, tensor, dtype):
    device = device_for("cpu")
    tensor = tensor.to(dtype)
    assert device.copy_in(arena, 4096, tensor).passed()
    found = torch.empty(tensor.shape, dtype=dtype)
    mark = device.copy_out(arena, 4096, found)
    mark.wait()
    assert mark.passed()
    assert torch.equal(found, tensor)


def test_a_copy_casts_on_its_way(arena):
    tensor = numbers(6, 8)
    device_for("cpu").copy_in(arena, 0, tensor, torch.float16)
    assert torch.equal(read(arena, 0, tensor.half()), tensor.half())


def test_the_host_is_a_device(arena):
    device = device_for("cpu")
    assert (device.kind, device.index) == ("DRAM", 0)
    assert device.memory(100).shape == (100,)
    assert device.memory(100).dtype == torch.uint8
    assert device.mark().passed()
    device.forget(arena)


def test_of_a_closed_arena_there_is_no_copy(arena):
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        device_for("cpu").copy_in(arena, 0, numbers(2, 2))


def test_a_device_that_is_not_there_is_named(cuda):
    with pytest.raises(RuntimeError, match="there is no cuda:7: torch finds 2 GPUs here"):
        device_for("cuda:7")
    cuda.devices = 0
    with pytest.raises(RuntimeError, match="there is no cuda: torch finds 0 GPUs here"):
        device_for("cuda")


# ------------------------------------------------------------ a GPU


def on_gpu(tensor):
    return tensor.clone(memory_format=torch.preserve_format).as_subclass(OnGpu)


def test_the_current_device_is_what_cuda_stands_for(cuda):
    with cuda.device(1):
        assert device_for("cuda") is device_for("cuda:1")
    assert device_for("cuda") is device_for(torch.device("cuda", 0))
    assert device_for("cuda:1").kind == "VRAM"


@pytest.mark.parametrize("tensor", [numbers(6, 8), numbers(6, 8).t(), numbers(8, 12)[:, ::2]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_save_is_over_when_the_device_has_made_it(arena, cuda, tensor, dtype):
    mark = device_for("cuda:0").copy_in(arena, SLAB, on_gpu(tensor), dtype)
    assert not mark.passed()
    assert not read(arena, SLAB, tensor.to(dtype)).any()
    mark.wait()
    assert mark.passed()
    assert torch.equal(read(arena, SLAB, tensor.to(dtype)), tensor.to(dtype))


def test_a_save_sees_what_was_enqueued_before_it_and_does_not_hold_up_what_comes_after(arena, cuda):
    tensor = on_gpu(torch.zeros(4, 4))
    after = []
    with cuda.stream(cuda.Stream(0)):
        cuda.enqueue(lambda: tensor.as_subclass(torch.Tensor).add_(7))
        mark = device_for("cuda:0").copy_in(arena, 0, tensor)
        cuda.enqueue(lambda: after.append("the model goes on"))
        cuda.streams[-1].work()  # the side stream, which has to wait
        assert not mark.passed()
        cuda.current_stream().work()
    assert after
    assert not mark.passed()
    mark.wait()
    assert torch.equal(read(arena, 0, tensor), torch.full((4, 4), 7.0))


def test_a_tensor_that_is_saved_is_kept_from_the_allocator(arena, cuda):
    tensor = on_gpu(numbers(4, 4))
    device_for("cuda:1").copy_in(arena, 0, tensor)
    assert tensor.recorded is device_for("cuda:1")._saves


def test_saves_of_a_device_share_a_stream_which_is_no_other_ones(arena, cuda):
    device = device_for("cuda:1")
    device.copy_in(arena, 0, on_gpu(numbers(4, 4)))
    device.copy_in(arena, SLAB, on_gpu(numbers(4, 4)))
    assert len(cuda.streams) == cuda.devices + 1
    assert cuda.streams[-1].device == 1


def test_a_load_goes_with_the_current_stream(arena, cuda):
    device = device_for("cuda:0")
    arena.buffer[:64] = bytes(range(64))
    loaded = on_gpu(torch.zeros(4, 16, dtype=torch.uint8))
    stream = cuda.Stream(0)
    with cuda.stream(stream):
        mark = device.copy_out(arena, 0, loaded)
    assert not mark.passed()
    cuda.streams[0].work()
    assert not mark.passed()
    stream.work()
    assert mark.passed()
    assert bytes(loaded.flatten().tolist()) == bytes(range(64))


def test_a_mark_passes_with_what_was_enqueued_before_it(cuda):
    done = []
    cuda.enqueue(lambda: done.append(1))
    mark = device_for("cuda:0").mark()
    assert not mark.passed()
    mark.wait()
    assert done == [1]


def test_any_thread_may_ask_a_mark(arena, cuda):
    """One that is new to CUDA is on device 0: the played event objects to that."""
    mark = device_for("cuda:1").copy_in(arena, 0, on_gpu(numbers(4, 4)))
    answers = []

    def ask():
        answers.append(mark.passed())
        mark.wait()
        answers.append(mark.passed())
        answers.append(cuda.current_device())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False, True, 0]


def test_nothing_is_asked_of_the_device_for_no_bytes(arena, cuda):
    device = device_for("cuda:0")
    assert device.copy_in(arena, 0, on_gpu(torch.empty(0, 8))).passed()
    assert device.copy_out(arena, 0, on_gpu(torch.empty(0, 8))).passed()
    assert not cuda.registered


# ------------------------------------------------------------ pinning


def test_what_a_copy_touches_is_pinned_and_nothing_else(arena, cuda):
    device = device_for("cuda:0")
    device.copy_in(arena, SLAB + 4096, on_gpu(numbers(4, 4)))
    device.copy_out(arena, SLAB, on_gpu(numbers(4, 4)))
    assert cuda.registered == {arena.base + SLAB: SLAB}
    device.copy_in(arena, 5 * SLAB, on_gpu(numbers(4, 4)))
    assert cuda.registered == {arena.base + SLAB: SLAB, arena.base + 5 * SLAB: 4096}


def test_devices_share_what_is_pinned(arena, cuda):
    for device in (device_for("cuda:0"), device_for("cuda:1")):
        with cuda.device(device.index):
            device.copy_in(arena, 0, on_gpu(numbers(4, 4)))
    assert cuda.registered == {arena.base: SLAB}


def test_a_copy_across_slabs_is_one_for_each(arena, cuda):
    """The played copy objects to bytes that no single registration covers, as CUDA does."""
    device = device_for("cuda:0")
    tensor = numbers(100, 100)
    offset = SLAB - 1024
    device.copy_in(arena, offset, on_gpu(tensor)).wait()
    assert torch.equal(read(arena, offset, tensor), tensor)
    loaded = on_gpu(torch.zeros(100, 100))
    device.copy_out(arena, offset, loaded).wait()
    assert torch.equal(loaded.as_subclass(torch.Tensor), tensor)
    assert sorted(cuda.registered) == [arena.base + index * SLAB for index in range(4)]


@pytest.fixture
def refusing(cuda, arena):
    cuda.refuses = lambda address: address < arena.base + 2 * SLAB
    return cuda


def test_what_cannot_be_pinned_is_copied_all_the_same(arena, refusing, caplog):
    device = device_for("cuda:0")
    tensor = on_gpu(torch.zeros(8, 8))
    refusing.enqueue(lambda: tensor.as_subclass(torch.Tensor).add_(3))
    with caplog.at_level(logging.WARNING):
        for offset in (0, SLAB, 4096):
            assert device.copy_in(arena, offset, tensor).passed()
            assert torch.equal(read(arena, offset, tensor), torch.full((8, 8), 3.0))
    loaded = on_gpu(torch.zeros(8, 8))
    assert device.copy_out(arena, SLAB, loaded).passed()
    assert torch.equal(loaded.as_subclass(torch.Tensor), torch.full((8, 8), 3.0))
    assert [record.message for record in caplog.records] == [
        f"{SLAB} bytes of the arena cannot be pinned (cudaHostRegister: out of memory): their copies will be waited for"
    ]
    assert not device.copy_in(arena, 2 * SLAB, tensor).passed()  # of another slab: pinned


def test_a_refusal_is_not_left_for_the_next_to_launch(arena, refusing):
    device_for("cuda:0").copy_in(arena, 0, on_gpu(numbers(4, 4)))
    assert not refusing.pending_error


def test_a_slab_that_was_refused_is_not_tried_again(arena, refusing):
    device = device_for("cuda:0")
    device.copy_in(arena, 0, on_gpu(numbers(4, 4)))
    refusing.refuses = lambda address: False
    assert device.copy_in(arena, 0, on_gpu(numbers(4, 4))).passed()


def test_an_arena_that_is_forgotten_is_unregistered_after_its_copies(arena, cuda):
    device = device_for("cuda:0")
    tensor = numbers(4, 4)
    mark = device.copy_in(arena, 0, on_gpu(tensor))
    device.forget(arena)
    assert mark.passed()
    assert torch.equal(read(arena, 0, tensor), tensor)
    assert cuda.unregistered == [(arena.base, SLAB)]
    device.forget(arena)
    assert not device.copy_in(arena, 0, on_gpu(tensor)).passed()  # not for good
    assert cuda.registered == {arena.base: SLAB}


def test_an_arena_that_is_closed_stays_mapped_and_pinned_until_its_copies_are_over(cuda):
    arena = Arena.create(2 * SLAB, SLAB)
    base = arena.base
    mark = device_for("cuda:0").copy_in(arena, SLAB, on_gpu(numbers(4, 4)))
    arena.close()
    del arena
    gc.collect()
    assert cuda.registered == {base + SLAB: SLAB}
    mark.wait()  # the copy that is made now ends the process if there is nothing there
    del mark
    cuda.work()
    gc.collect()
    assert not cuda.registered
    assert cuda.unregistered == [(base + SLAB, SLAB)]


def test_a_copy_of_which_nobody_keeps_the_mark_is_waited_for(cuda):
    arena = Arena.create(2 * SLAB, SLAB)
    device_for("cuda:0").copy_in(arena, 0, on_gpu(numbers(4, 4)))
    arena.close()
    del arena
    gc.collect()
    assert not any(stream.queue for stream in cuda.streams)
    assert not cuda.registered


def test_a_copy_that_fails_halfway_leaves_nothing_under_way(arena, cuda):
    device = device_for("cuda:0")
    tensor = numbers(100, 100)  # over three slabs
    device.copy_in(arena, 0, on_gpu(tensor)).wait()
    shortened = cuda.registered.pop(arena.base + SLAB)
    with pytest.raises(AssertionError, match="one registration must cover the copy"):
        device.copy_out(arena, 0, on_gpu(tensor))
    assert not cuda.current_stream().queue
    with pytest.raises(AssertionError, match="one registration must cover the copy"):
        device.copy_in(arena, 0, on_gpu(tensor))
    assert not any(stream.queue for stream in cuda.streams)
    cuda.registered[arena.base + SLAB] = shortened


def test_a_copy_over_slabs_of_both_kinds_is_both(arena, refusing):
    device = device_for("cuda:0")
    tensor = numbers(100, 100)
    offset = 2 * SLAB - 4096  # the first slab of it was refused, the others are pinned
    mark = device.copy_in(arena, offset, on_gpu(tensor))
    assert not mark.passed()
    mark.wait()
    assert torch.equal(read(arena, offset, tensor), tensor)
