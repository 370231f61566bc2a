from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ec_p2p import CacheEngineKey, ECCacheEngine, MemoryFormat, StorageManager, stable_u64
from ec_p2p.config import make_config
from ec_p2p.engine.arena import PAGE
from ec_p2p.engine.views import dtype_name, dtype_of
from tests.engine.tiers import entries_of

SLAB = 1 << 20


@pytest.fixture
def storage() -> Iterator[StorageManager]:
    """Two slabs of 1 MiB less two pages of records each."""
    with StorageManager(2 * SLAB, slab_size=SLAB) as storage:
        yield storage


@pytest.fixture
def engine(storage: StorageManager) -> Iterator[ECCacheEngine]:
    with ECCacheEngine("org/model", torch.bfloat16, storage_manager=storage) as engine:
        yield engine


def embedding(rows: int, dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, dim), generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------- put, get, contains


def test_what_was_put_is_got_bit_for_bit(engine: ECCacheEngine) -> None:
    tensor = embedding(37, 65)
    assert not engine.contains("a")
    assert engine.get("a") is None
    assert engine.put("a", tensor)
    assert engine.contains("a")
    got = engine.get("a")
    assert got is not None
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, tensor)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32"]
)
def test_every_dtype_round_trips(storage: StorageManager, dtype: str) -> None:
    engine = ECCacheEngine("m", dtype_of(dtype), storage_manager=storage)
    tensor = torch.randint(0, 100, (9, 31)).to(dtype_of(dtype))
    assert engine.put("a", tensor)
    got = engine.get("a")
    assert got is not None
    assert dtype_name(got.dtype) == dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_the_engines_dtype_is_what_is_stored(storage: StorageManager) -> None:
    engine = ECCacheEngine("m", torch.float16, storage_manager=storage)
    tensor = embedding(5, 7, torch.float32)
    assert engine.put("a", tensor)
    got = engine.get("a")
    assert got is not None
    assert got.dtype is torch.float16
    assert torch.equal(got, tensor.half())


@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (0, 0), (1, 1)])
def test_empty_tensors_keep_their_shape(engine: ECCacheEngine, shape: tuple[int, int]) -> None:
    assert engine.put("a", torch.ones(shape))
    got = engine.get("a")
    assert got is not None
    assert got.shape == shape


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_other_ranks_are_one_clear_error(engine: ECCacheEngine, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'a'.*accepted: \(tokens, dim\)"):
        engine.put("a", torch.ones(shape))
    assert not engine.contains("a")


def test_any_layout_and_autograd_leaf_is_taken(engine: ECCacheEngine) -> None:
    base = embedding(20, 30)
    for name, tensor in {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "row slice": base[3:9],
        "expanded": base[:1].expand(6, 30),
        "grad": base.clone().requires_grad_(),
    }.items():
        assert engine.put(name, tensor)
        got = engine.get(name)
        assert got is not None
        assert torch.equal(got, tensor)
        assert not got.requires_grad
        assert got.is_contiguous()


def test_the_source_may_be_overwritten_after_put(engine: ECCacheEngine) -> None:
    tensor = embedding(10, 10)
    copy = tensor.clone()
    engine.put("a", tensor)
    tensor.zero_()
    got = engine.get("a")
    assert got is not None
    assert torch.equal(got, copy)


def test_what_was_got_is_the_callers(engine: ECCacheEngine) -> None:
    tensor = embedding(10, 10)
    engine.put("a", tensor)
    got = engine.get("a")
    assert got is not None
    got.zero_()
    again = engine.get("a")
    assert again is not None
    assert torch.equal(again, tensor)


def test_the_first_put_of_a_key_wins_and_the_second_copies_nothing(engine: ECCacheEngine) -> None:
    first = embedding(10, 10, seed=1)
    assert engine.put("a", first)
    used = engine.storage_manager.cpu.used_bytes
    assert engine.put("a", embedding(99, 10, seed=2))
    assert engine.storage_manager.cpu.used_bytes == used
    got = engine.get("a")
    assert got is not None
    assert torch.equal(got, first)


@pytest.mark.parametrize(
    "pair", [("a/b", "a-b"), ("x" * 300, "x" * 301), ("é", "e\u0301"), ("\ud800", "\udfff"), ("", " "), ("12", "012")]
)
def test_identifiers_are_opaque(engine: ECCacheEngine, pair: tuple[str, str]) -> None:
    tensors = [embedding(3, 3, seed=seed) for seed in (1, 2)]
    for identifier, tensor in zip(pair, tensors, strict=True):
        assert engine.put(identifier, tensor)
    for identifier, tensor in zip(pair, tensors, strict=True):
        got = engine.get(identifier)
        assert got is not None
        assert torch.equal(got, tensor)


@pytest.mark.parametrize("bad", [123, None, b"abc"])
def test_an_identifier_that_is_no_text_is_an_error(engine: ECCacheEngine, bad: object) -> None:
    for call in (engine.contains, engine.get, engine.key, lambda value: engine.put(value, torch.ones(1, 1))):
        with pytest.raises(TypeError, match="accepted: str"):
            call(bad)  # type: ignore[arg-type]


def test_get_delivers_to_the_device(engine: ECCacheEngine) -> None:
    engine.put("a", embedding(3, 3))
    got = engine.get("a", "meta")
    assert got is not None
    assert got.device.type == "meta"


# ---------------------------------------------------------------- pressure


def test_an_item_that_can_never_fit_evicts_nothing(engine: ECCacheEngine) -> None:
    for number in range(5):
        assert engine.put(str(number), embedding(16, 16, seed=number))
    assert engine.put("huge", torch.zeros(SLAB, 2)) is False
    assert not engine.contains("huge")
    assert all(engine.contains(str(number)) for number in range(5))


def test_put_says_no_while_everything_is_in_use_and_yes_after(engine: ECCacheEngine) -> None:
    tensor = torch.zeros(400, 1024)  # 800 KiB: one per slab
    cpu = engine.storage_manager.cpu
    assert engine.put("a", tensor)
    assert engine.put("b", tensor)
    pins = [cpu.pin(entry) for entry in entries_of(cpu)]
    assert engine.put("c", tensor) is False
    assert engine.contains("a")
    assert engine.contains("b")
    pins[0].close()
    assert engine.put("c", tensor) is True
    assert not engine.contains("a")
    pins[1].close()


def test_a_failing_copy_gives_the_memory_back(engine: ECCacheEngine) -> None:
    cpu = engine.storage_manager.cpu
    with pytest.raises(NotImplementedError):
        engine.put("a", torch.ones((4, 4), device="meta"))
    assert cpu.free_bytes == cpu.capacity_bytes
    assert not engine.contains("a")


def test_the_oldest_goes_first_and_its_get_is_a_miss(engine: ECCacheEngine) -> None:
    for number in range(6):
        assert engine.put(str(number), torch.full((200, 1024), float(number)))  # 400 KiB: two per slab
        engine.get("0")
    present = [number for number in range(6) if engine.contains(str(number))]
    assert present == [0, 3, 4, 5]
    assert engine.get("1") is None
    kept = engine.get("0")
    assert kept is not None
    assert not kept.any()


# ---------------------------------------------------------------- sharing and names


def test_engines_share_a_manager_and_see_each_other(storage: StorageManager) -> None:
    one = ECCacheEngine("m", torch.float16, namespace="n", storage_manager=storage)
    two = ECCacheEngine("m", torch.float16, namespace="n", storage_manager=storage)
    tensor = embedding(3, 3, torch.float16)
    one.put("a", tensor)
    one.close()
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, tensor)


def test_engines_of_other_models_or_dtypes_share_memory_only(storage: StorageManager) -> None:
    engines = [
        ECCacheEngine("m", torch.float16, storage_manager=storage),
        ECCacheEngine("m", torch.float32, storage_manager=storage),
        ECCacheEngine("o", torch.float16, storage_manager=storage),
        ECCacheEngine("m", torch.float16, namespace="n", storage_manager=storage),
    ]
    engines[0].put("a", torch.ones(1, 1))
    assert [engine.contains("a") for engine in engines] == [True, False, False, False]


def test_the_key_is_lmcaches(engine: ECCacheEngine) -> None:
    key = engine.key("abc")
    assert key == CacheEngineKey("org/model", 1, 0, stable_u64("abc"), torch.bfloat16, {})
    assert key.to_string() == "org/model@1@0@ba7816bf8f01cfea@bfloat16"


def test_there_is_one_memory_format() -> None:
    assert MemoryFormat.EC_TD.value == "token, dim"


# ---------------------------------------------------------------- closing


def test_close_frees_the_engines_own_memory() -> None:
    engine = ECCacheEngine("m", torch.float16, config=make_config({"max_local_cpu_size": "1MiB"}))
    engine.put("a", torch.ones(100, 100))
    got = engine.get("a")
    base = engine.storage_manager.arena.base
    engine.close()
    engine.close()
    gc.collect()
    assert f"{base:x}-" not in Path("/proc/self/maps").read_text()
    assert got is not None
    assert got.all()
    for call in (engine.contains, engine.get, lambda name: engine.put(name, torch.ones(1, 1))):
        with pytest.raises(ValueError, match="closed"):
            call("a")


def test_close_leaves_a_managers_memory_to_its_maker(storage: StorageManager) -> None:
    with ECCacheEngine("m", torch.float16, storage_manager=storage):
        pass
    storage.arena.buffer[PAGE] = 1


def test_an_engine_over_a_closed_manager_says_so(storage: StorageManager) -> None:
    engine = ECCacheEngine("m", torch.float16, storage_manager=storage)
    engine.put("a", torch.ones(2, 2))
    storage.close()
    with pytest.raises(ValueError, match="closed"):
        engine.put("b", torch.ones(2, 2))
    with pytest.raises(ValueError, match="closed"):
        engine.get("a")


def test_an_impossible_size_leaves_no_descriptor_behind() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ValueError, match="no room"):
        StorageManager(PAGE)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_torch_free_part_loads_no_torch() -> None:
    script = (
        "import sys, ec_p2p, ec_p2p.identity, ec_p2p.engine.cpu, ec_p2p.engine.policy\n"
        "from ec_p2p.engine import LocalCPUBackend, MemoryFormat, StorageManager\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# ---------------------------------------------------------------- threads


def test_threads_put_and_get_under_pressure(engine: ECCacheEngine) -> None:
    """Every hit is the right tensor, whole, whatever is being evicted meanwhile."""
    failures: list[str] = []
    hits = [0] * 4
    go = threading.Barrier(4)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        go.wait()
        for _ in range(400):
            number = rng.randrange(20)
            rows = 40 + number * 5
            got = engine.get(str(number))
            if got is None:
                engine.put(str(number), torch.full((rows, 1024), float(number)))
            elif got.shape != (rows, 1024) or not torch.all(got == number):
                failures.append(f"{number}: {tuple(got.shape)}, {got[0, 0].item()}")
            else:
                hits[seed] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu = engine.storage_manager.cpu
    assert failures == []
    assert all(hits)
    assert (cpu.pinned_bytes, cpu.reserved_bytes) == (0, 0)


def test_closing_under_traffic_is_an_error_for_the_callers_and_no_crash() -> None:
    storage = StorageManager(2 * SLAB, slab_size=SLAB)
    engine = ECCacheEngine("m", torch.float32, storage_manager=storage)
    started = threading.Barrier(4)
    complaints: list[str] = []

    def work(seed: int) -> None:
        tensor = torch.full((64, 1024), float(seed))
        try:
            engine.put(f"{seed}", tensor)
            started.wait()
            for number in range(100_000):
                engine.put(f"{seed}-{number}", tensor)
                engine.get(f"{seed}")
        except ValueError as error:
            complaints.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    engine.close()
    storage.close()
    for thread in threads:
        thread.join()
    assert len(complaints) == 3
    assert all("closed" in complaint for complaint in complaints)
