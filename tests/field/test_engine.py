"""The engine: what became of entries after restarts, damage, full disks and odd names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ec_p2p import ECCacheEngine, load_ec_engine_config
from ec_p2p.config import ConfigError

DTYPE = torch.float16


def engine(folder: Path, **settings: object) -> ECCacheEngine:
    given = {"max_local_cpu_size": "4MiB", "slab_size": "4MiB", "local_disk": str(folder), **settings}
    return ECCacheEngine("org/model", DTYPE, config=load_ec_engine_config(given, environ={}))


def tensor(seed: int, rows: int = 256, dim: int = 1024) -> torch.Tensor:
    return torch.randn((rows, dim), generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.safetensors") if "damaged" not in path.parts)


def test_a_restart_finds_the_old_entries_and_counts_them_against_the_cap(tmp_path: Path) -> None:
    with engine(tmp_path) as before:
        for number in range(8):
            assert before.put(str(number), tensor(number))
            before.flush()
    with engine(tmp_path, max_local_disk_size="5MiB") as after:
        for number in range(100, 104):
            after.put(str(number), tensor(number))
        after.flush()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 << 20
        hits = 0
        for number in range(8):
            got = after.get(str(number))
            assert got is None or torch.equal(got, tensor(number))
            hits += got is not None
        assert hits


@pytest.mark.parametrize("harm", ["truncated", "one byte flipped", "vanished"])
def test_a_harmed_file_is_a_miss_and_never_an_exception_or_junk(tmp_path: Path, harm: str) -> None:
    with engine(tmp_path) as before:
        before.put("a", tensor(1))
    [file] = files(tmp_path)
    if harm == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "one byte flipped":
        data = bytearray(file.read_bytes())
        data[-7] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    with engine(tmp_path) as after:
        assert after.get("a") is None
        assert not after.contains("a")
        assert after.put("a", tensor(1))
        got = after.get("a")
        assert got is not None
        assert torch.equal(got, tensor(1))


def test_close_right_after_a_burst_leaves_no_torn_file(tmp_path: Path) -> None:
    with engine(tmp_path, max_local_cpu_size="64MiB", slab_size="64MiB") as before:
        for number in range(12):
            before.put(str(number), tensor(number))
    assert len(files(tmp_path)) == 12
    assert all(path.stat().st_size > 512 << 10 for path in files(tmp_path))
    with engine(tmp_path) as after:
        for number in range(12):
            got = after.get(str(number))
            assert got is not None
            assert torch.equal(got, tensor(number))


def test_a_folder_that_vanishes_costs_the_disk_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with engine(folder) as one:
        one.put("before", tensor(0))
        one.flush()
        folder.rename(tmp_path / "elsewhere")
        for number in range(1, 20):
            assert one.put(str(number), tensor(number))
            one.flush()
            got = one.get(str(number))
            assert got is not None
            assert torch.equal(got, tensor(number))
        assert one.storage_manager.cpu.pinned_bytes == 0
        assert not folder.exists(), "nothing may be written beneath a vanished mount"


def test_what_left_memory_and_is_on_disk_is_contained_and_got(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        for number in range(30):
            one.put(str(number), tensor(number))
            one.flush()
        assert len(one.storage_manager.cpu) < 10
        for number in range(30):
            assert one.contains(str(number))
            got = one.get(str(number))
            assert got is not None
            assert torch.equal(got, tensor(number))


def test_odd_identifiers_are_entries_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a-b", "x" * 300, "not hex", "Bücher 図書", "../../etc/passwd", "", "\0", "\ud800", "123", "0123"]
    with engine(tmp_path) as before:
        for number, name in enumerate(names):
            assert before.put(name, tensor(number, rows=4))
    assert len(files(tmp_path)) == len(names)
    with engine(tmp_path) as after:
        for number, name in enumerate(names):
            got = after.get(name)
            assert got is not None
            assert torch.equal(got, tensor(number, rows=4))
        with pytest.raises(TypeError, match="123"):
            after.contains(123)  # type: ignore[arg-type]


_WRITER = """
import sys, torch
from ec_p2p import ECCacheEngine, load_ec_engine_config
settings = {"max_local_cpu_size": "4MiB", "slab_size": "4MiB", "local_disk": sys.argv[1]}
config = load_ec_engine_config(settings, environ={})
with ECCacheEngine("org/model", torch.float16, config=config) as engine:
    print("ready", flush=True)
    for number in range(100_000):
        engine.put(str(number % 50), torch.full((256, 1024), float(number % 50)))
"""


def test_two_processes_write_the_same_keys_and_one_dies_half_way(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 20
    while len(files(tmp_path)) < 5:
        assert time.monotonic() < deadline, "nobody has written five files"
        time.sleep(0.002)
    for writer in writers:
        writer.kill()
        writer.communicate()
    with engine(tmp_path) as after:
        for number in range(50):
            got = after.get(str(number))
            assert got is None or torch.equal(got, torch.full((256, 1024), float(number), dtype=DTYPE))
        after.put("one more", tensor(1))
        after.flush()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (1, 1)])
def test_tensors_without_bytes_come_back_from_disk_too(tmp_path: Path, shape: tuple[int, int]) -> None:
    with engine(tmp_path) as before:
        assert before.put("a", torch.ones(shape))
    with engine(tmp_path) as after:
        got = after.get("a")
        assert got is not None
        assert (tuple(got.shape), got.dtype) == (shape, DTYPE)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_other_ranks_are_one_clear_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with engine(tmp_path) as one, pytest.raises(ValueError, match=r"accepted: \(tokens, dim\)"):
        one.put("a", torch.ones(shape))


def test_any_layout_and_dtype_is_stored_as_the_engines(tmp_path: Path) -> None:
    odd = torch.randn(64, 32).t()[::2].requires_grad_()
    with engine(tmp_path) as before:
        assert before.put("a", odd)
    with engine(tmp_path) as after:
        got = after.get("a")
        assert got is not None
        assert torch.equal(got, odd.detach().to(DTYPE))


@pytest.mark.parametrize("value", ["lots", -3, "NOPE", 0])
def test_a_bad_size_names_the_key_the_value_and_what_is_accepted(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_local_cpu_size=.*accepted: .*GiB"):
        load_ec_engine_config({"max_local_cpu_size": value}, environ={})


def test_a_file_that_is_a_list_or_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    with pytest.raises(ConfigError, match=r"lmcache\.yaml"):
        load_ec_engine_config({}, environ={"LMCACHE_CONFIG_FILE": str(file)})
    file.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match=r"lmcache\.yaml"):
        load_ec_engine_config({}, environ={"LMCACHE_CONFIG_FILE": str(file)})


def test_the_source_may_be_overwritten_when_put_has_returned(tmp_path: Path) -> None:
    source = tensor(1)
    with engine(tmp_path) as before:
        assert before.put("a", source)
        source.zero_()
    with engine(tmp_path) as after:
        got = after.get("a")
        assert got is not None
        assert torch.equal(got, tensor(1))
