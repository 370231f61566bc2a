"""Copies between an arena and a GPU: right, in order, and over when their marks say so.

A kernel that takes long stands before what must be waited for. Nothing here depends on how long it takes: where a wait
is missing, it makes that plain.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from ec_p2p.engine.arena import Arena
from ec_p2p.node import device as device_module
from ec_p2p.node.device import device_for

from .conftest import COUNT, SLAB

LONG = 400_000_000
"""Cycles of a GPU's clock: some tenths of a second."""
SIZES = [1, 16, 4096, 4098, 1 << 20, (1 << 20) + 6, SLAB, 3 * SLAB + 4096]
OTHERS = {
    "transposed": lambda index: torch.randn(300, 500, device=f"cuda:{index}").t(),
    "strided": lambda index: torch.randn(300, 500, device=f"cuda:{index}")[:, ::2],
    "rows of a batch": lambda index: torch.randn(4, 300, 500, device=f"cuda:{index}")[2],
    "requires grad": lambda index: torch.randn(30, 50, device=f"cuda:{index}", requires_grad=True),
    "empty": lambda index: torch.randn(0, 50, device=f"cuda:{index}"),
}


def take_long(gpu):
    with torch.cuda.device(gpu.index):
        torch.cuda._sleep(LONG)


def filled(gpu, value, *shape):
    return torch.full(shape, value, device=f"cuda:{gpu.index}")


def nothing(gpu, *shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device=f"cuda:{gpu.index}")


def read(arena, offset, like):
    """The entry's bytes, as they are now."""
    found = torch.frombuffer(arena.buffer, dtype=torch.uint8, count=max(1, like.nbytes), offset=offset)
    return found[: like.nbytes].clone().view(like.dtype).view(like.shape)


def write(arena, offset, tensor):
    arena.buffer[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def is_pinned(arena, offset):
    return torch.frombuffer(arena.buffer, dtype=torch.uint8, count=1, offset=offset).is_pinned()


# ------------------------------------------------------------ the bytes


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, SLAB - 4096])
def test_bytes_go_in_and_come_out(arena, gpu, nbytes, offset):
    """Some of them across the border of slabs, each of which is registered on its own."""
    tensor = torch.randint(256, (1, nbytes), dtype=torch.uint8, device=f"cuda:{gpu.index}")
    gpu.copy_in(arena, offset, tensor).wait()
    assert torch.equal(read(arena, offset, tensor), tensor.cpu())
    loaded = nothing(gpu, 1, nbytes, dtype=torch.uint8)
    gpu.copy_out(arena, offset, loaded).wait()
    assert torch.equal(loaded, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float32], ids=str)
def test_every_dtype_as_it_is_or_cast(arena, gpu, dtype, cast):
    tensor = torch.randn(320, 128, device=f"cuda:{gpu.index}").to(dtype)
    expected = tensor.to(cast or dtype)
    gpu.copy_in(arena, 8192, tensor, cast).wait()
    loaded = nothing(gpu, 320, 128, dtype=expected.dtype)
    gpu.copy_out(arena, 8192, loaded).wait()
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout(arena, gpu, layout):
    tensor = OTHERS[layout](gpu.index)
    gpu.copy_in(arena, 4096, tensor).wait()
    assert torch.equal(read(arena, 4096, tensor), tensor.detach().cpu())


def test_its_memory_is_on_the_device(gpu):
    memory = gpu.memory(1 << 20)
    assert memory.device == torch.device("cuda", gpu.index)
    assert (memory.dtype, memory.nbytes, gpu.kind) == (torch.uint8, 1 << 20, "VRAM")


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
def test_what_one_gpu_has_saved_the_other_loads(arena):
    first, last = device_for("cuda:0"), device_for(f"cuda:{COUNT - 1}")
    tensor = torch.randn(1000, 1000, device="cuda:0")
    first.copy_in(arena, 0, tensor).wait()
    loaded = nothing(last, 1000, 1000)
    last.copy_out(arena, 0, loaded).wait()
    assert torch.equal(loaded.cpu(), tensor.cpu())


# ------------------------------------------------------------ streams


@pytest.fixture(params=["the default stream", "another stream"])
def stream(request, gpu):
    with torch.cuda.device(gpu.index):
        stream = torch.cuda.Stream() if request.param == "another stream" else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            yield stream


def test_a_save_sees_what_was_computed_before_it(arena, gpu, stream):
    tensor = filled(gpu, 1.0, 512, 512)
    take_long(gpu)
    tensor.add_(6)
    gpu.copy_in(arena, 0, tensor).wait()
    assert torch.equal(read(arena, 0, tensor), torch.full((512, 512), 7.0))


def test_what_is_loaded_can_be_used_on_the_same_stream_at_once(arena, gpu, stream):
    write(arena, 0, torch.full((512, 512), 3.0))
    loaded = nothing(gpu, 512, 512)
    take_long(gpu)
    gpu.copy_out(arena, 0, loaded)
    assert torch.equal((loaded * 2).cpu(), torch.full((512, 512), 6.0))


def test_the_arena_may_be_written_to_as_soon_as_a_load_is_over(arena, gpu, stream):
    write(arena, 0, torch.full((512, 512), 3.0))
    loaded = nothing(gpu, 512, 512)
    take_long(gpu)
    gpu.copy_out(arena, 0, loaded).wait()
    write(arena, 0, torch.full((512, 512), 9.0))
    assert torch.equal(loaded.cpu(), torch.full((512, 512), 3.0))


def test_a_tensor_may_be_dropped_while_it_is_saved(arena, gpu, stream):
    """Its memory would be the next tensor's at once, if the allocator did not know of the side stream."""
    gpu.copy_in(arena, 0, filled(gpu, 0.0, 8, 8)).wait()  # so that the slab is pinned
    tensor = filled(gpu, 5.0, 1024, 1024)
    with torch.cuda.stream(gpu._saves):
        take_long(gpu)
    mark = gpu.copy_in(arena, 0, tensor)
    del tensor
    others = [filled(gpu, -1.0, 1024, 1024) for _ in range(8)]
    mark.wait()
    assert torch.equal(read(arena, 0, torch.empty(1024, 1024)), torch.full((1024, 1024), 5.0))
    assert len(others) == 8


def test_saves_are_over_in_their_order(arena, gpu):
    sizes = [4 << 20, 4096, 1 << 20, 4096]
    marks = []
    for number, size in enumerate(sizes):
        marks.append(gpu.copy_in(arena, number * SLAB, filled(gpu, float(number), 1, size // 4)))
    for number in reversed(range(len(sizes))):
        if marks[number].passed():
            assert all(mark.passed() for mark in marks[:number])
    marks[-1].wait()
    assert all(mark.passed() for mark in marks)
    for number, size in enumerate(sizes):
        assert read(arena, number * SLAB, torch.empty(1, size // 4)).unique().tolist() == [float(number)]


def test_a_mark_passes_after_what_was_enqueued_before_it(gpu, stream):
    tensor = filled(gpu, 1.0, 512, 512)
    take_long(gpu)
    tensor.fill_(2.0)
    mark = gpu.mark()
    mark.wait()
    assert mark.passed()
    assert stream.query()
    assert tensor.unique().tolist() == [2.0]


def test_another_thread_may_wait(arena, gpu):
    tensor = filled(gpu, 1.0, 512, 512)
    take_long(gpu)
    tensor.fill_(4.0)
    mark = gpu.copy_in(arena, 0, tensor)
    found = []

    def wait():
        mark.wait()
        found.append((mark.passed(), read(arena, 0, tensor).unique().tolist(), torch.cuda.current_device()))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [(True, [4.0], 0)]


# ------------------------------------------------------------ pinning


def test_what_a_copy_touches_is_pinned_until_it_is_forgotten(arena, gpu):
    mark = gpu.copy_in(arena, SLAB, filled(gpu, 1.0, 64, 64))
    assert is_pinned(arena, SLAB)
    assert is_pinned(arena, 2 * SLAB - 1)
    assert not is_pinned(arena, 0)
    assert not is_pinned(arena, 2 * SLAB)
    gpu.forget(arena)
    assert mark.passed()
    assert not is_pinned(arena, SLAB)
    gpu.copy_in(arena, SLAB, filled(gpu, 2.0, 64, 64)).wait()
    assert is_pinned(arena, SLAB)


def test_what_cannot_be_pinned_is_copied_all_the_same(arena, gpu):
    """CUDA does not register what is registered. Afterwards its error is nobody's."""
    with torch.cuda.device(gpu.index):
        assert torch.cuda.cudart().cudaHostRegister(arena.base, 4096, 0).value == 0
        tensor = filled(gpu, 1.0, 2048, 1024)
        take_long(gpu)
        tensor.fill_(8.0)
        assert gpu.copy_in(arena, 4096, tensor).passed()
        assert torch.equal(read(arena, 4096, tensor), torch.full((2048, 1024), 8.0))
        loaded = nothing(gpu, 2048, 1024)
        assert gpu.copy_out(arena, 4096, loaded).passed()
        assert (loaded + 1).unique().tolist() == [9.0]
        assert torch.cuda.cudart().cudaHostUnregister(arena.base).value == 0


def test_an_arena_that_is_closed_stays_until_its_copies_are_over(gpu):
    for value in (1.0, 2.0):  # the second may be mapped where the first was: what was registered is not any more
        arena = Arena.create(2 * SLAB, SLAB)
        tensor = filled(gpu, 0.0, 1024, 1024)
        take_long(gpu)
        tensor.fill_(value)
        seen = torch.frombuffer(arena.buffer, dtype=torch.float32, count=1024 * 1024)
        mark = gpu.copy_in(arena, 0, tensor)
        assert is_pinned(arena, 0)
        arena.close()
        del arena
        gc.collect()
        mark.wait()
        assert seen.unique().tolist() == [value]
        del mark, seen
        gc.collect()
        assert not device_module._PINNED._arenas


def test_threads_share_an_arena(arena, gpu):
    tensors = [filled(gpu, float(number), 512, 512) for number in range(8)]
    failures = []

    def copy(number):
        try:
            with torch.cuda.device(gpu.index):
                for round_ in range(20):
                    offset = (number * SLAB + round_ * (1 << 20) % SLAB) % (8 * SLAB)
                    gpu.copy_in(arena, offset, tensors[number]).wait()
                    loaded = nothing(gpu, 512, 512)
                    gpu.copy_out(arena, offset, loaded).wait()
                    assert torch.equal(loaded, tensors[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
