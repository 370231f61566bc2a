from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_p2p.engine.arena import PAGE, Arena, Slab


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(10 * PAGE, 4 * PAGE) as arena:
        yield arena


def mapped_at(address: int) -> bool:
    """Whether this process has anything mapped at `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def test_slabs_partition_the_arena(arena: Arena) -> None:
    assert arena.slabs == [Slab(0, 4 * PAGE), Slab(4 * PAGE, 4 * PAGE), Slab(8 * PAGE, 2 * PAGE)]


def test_an_arena_smaller_than_a_slab_is_one_slab() -> None:
    with Arena.create(5 * PAGE - 1, 1 << 20) as arena:
        assert arena.nbytes == 5 * PAGE
        assert arena.slabs == [Slab(0, 5 * PAGE)]


def test_memory_is_zeroed_writable_and_addressed_from_base(arena: Arena) -> None:
    assert bytes(arena.buffer) == bytes(arena.nbytes)
    arena.buffer[PAGE : PAGE + 5] = b"hello"
    assert ctypes.string_at(arena.base + PAGE, 5) == b"hello"
    arena.words[0] = 0x0102030405060708
    assert bytes(arena.buffer[:8]) == bytes([8, 7, 6, 5, 4, 3, 2, 1])


def test_memory_is_committed_only_when_touched() -> None:
    with Arena.create(1 << 36, 1 << 28) as arena:
        arena.buffer[1 << 35] = 1
        assert 0 < os.fstat(arena.fd).st_blocks * 512 <= 4 << 20


def test_the_size_is_sealed(arena: Arena) -> None:
    for size in (PAGE, 20 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_attach_sees_the_same_bytes_and_owns_its_descriptor(arena: Arena) -> None:
    passed = os.dup(arena.fd)
    with Arena.attach(passed, arena.nbytes, arena.slab_bytes) as other:
        os.close(passed)
        assert other.base != arena.base
        other.buffer[7] = 77
        assert arena.buffer[7] == 77
        assert other.slabs == arena.slabs


def test_another_process_attaches_the_passed_descriptor(arena: Arena) -> None:
    script = (
        "import sys; from ec_p2p.engine.arena import Arena\n"
        "fd, nbytes, slab = map(int, sys.argv[1:])\n"
        "Arena.attach(fd, nbytes, slab).buffer[100:103] = b'ec!'\n"
        "assert 'torch' not in sys.modules\n"
    )
    argv = [sys.executable, "-c", script, str(arena.fd), str(arena.nbytes), str(arena.slab_bytes)]
    subprocess.run(argv, pass_fds=[arena.fd], check=True)
    assert bytes(arena.buffer[100:103]) == b"ec!"


@pytest.mark.parametrize("claimed", [9 * PAGE, 11 * PAGE, 1 << 50])
def test_attach_checks_the_real_size_before_mapping(arena: Arena, claimed: int) -> None:
    with pytest.raises(ValueError, match=f"holds {10 * PAGE} bytes, the owner says {claimed}"):
        Arena.attach(arena.fd, claimed, arena.slab_bytes)


@pytest.mark.parametrize(("nbytes", "slab"), [(0, PAGE), (-PAGE, PAGE), (10 * PAGE, 0), (10 * PAGE, 100), (1, PAGE)])
def test_attach_refuses_impossible_geometry(arena: Arena, nbytes: int, slab: int) -> None:
    with pytest.raises(ValueError, match="cannot attach"):
        Arena.attach(arena.fd, nbytes, slab)


def test_attach_refuses_memory_that_could_shrink() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE)
        with pytest.raises(ValueError, match="could still change"):
            Arena.attach(fd, PAGE, PAGE)
    finally:
        os.close(fd)


def test_attach_refuses_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(PAGE)
        # A disk knows no seals; a tmpfs does, but has none set.
        with pytest.raises(ValueError, match=r"not a memfd|could still change"):
            Arena.attach(file.fileno(), PAGE, PAGE)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "1GiB", 1 << 62])
def test_create_refuses_what_is_no_size(bad: object) -> None:
    with pytest.raises(ValueError, match="nbytes="):
        Arena.create(bad, PAGE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slab_bytes="):
        Arena.create(PAGE, bad)  # type: ignore[arg-type]


def test_close_unmaps_and_closes_the_descriptor_once() -> None:
    arena = Arena.create(PAGE, PAGE)
    fd, base = arena.fd, arena.base
    arena.close()
    gc.collect()
    assert not mapped_at(base)
    with pytest.raises(OSError):
        os.fstat(fd)
    reused = os.open("/dev/null", os.O_RDONLY)
    arena.close()
    os.fstat(reused)
    os.close(reused)
    for attribute in ("buffer", "words"):
        with pytest.raises(ValueError, match="closed"):
            getattr(arena, attribute)


def test_a_view_outlives_close() -> None:
    arena = Arena.create(PAGE, PAGE)
    base = arena.base
    view = arena.buffer[10:20]
    arena.close()
    view[0] = 9
    assert view[0] == 9
    assert mapped_at(base)
    del view
    gc.collect()
    assert not mapped_at(base)
