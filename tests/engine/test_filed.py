from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ec_p2p.engine import generation
from ec_p2p.engine.filed import (
    CHUNK,
    HEADER_BYTES,
    Abandoned,
    Damaged,
    Filed,
    NotAFile,
    folder_of,
    identity_in,
    is_temp,
    open_file,
    pack_header,
    path_of,
    read_header,
    read_whole,
    sweep,
    unpack_header,
    write_file,
)
from ec_p2p.engine.files import Files
from ec_p2p.engine.generation import itemsize
from tests.engine.disks import Sick, content, identity, os_error

DTYPES = list(generation._DTYPES)
FILES = Files()
DIGEST = "f" * 32


def never() -> bool:
    return False


def entry(rows: int = 4, dim: int = 256, dtype: str = "float16", number: int = 7) -> Filed:
    return Filed(identity(number), rows * dim * itemsize(dtype), rows, dim, dtype)


def write(root: Path, filed: Filed, payload: bytes, files: Files = FILES, fsync: bool = False) -> Path:
    write_file(files, str(root), filed, memoryview(payload), fsync=fsync, abandoned=never)
    return Path(path_of(str(root), filed.identity))


@contextmanager
def opened(files: Files, path: str) -> Iterator[tuple[int, os.stat_result]]:
    fd, status = open_file(files, path)
    try:
        yield fd, status
    finally:
        files.close(fd)


def read(path: Path, number: int = 7, files: Files = FILES) -> tuple[Filed, bytes]:
    """The entry and its verified payload. What one knows of it before makes no difference."""
    with opened(files, str(path)) as (fd, status):
        into = memoryview(bytearray(max(0, status.st_size - HEADER_BYTES)))
        try:
            filed, _ = read_header(files, fd, identity(number), status.st_size)
        except Damaged as damage:
            for known in (None, entry(number=number)):
                with pytest.raises(Damaged, match=re.escape(str(damage))):
                    read_whole(files, fd, identity(number), into, known, never)
            raise
        for known in (filed, entry(3, 5, "uint8", number), None):
            assert read_whole(files, fd, identity(number), into, known, never) == filed
    return filed, bytes(into)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- the format


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(3, 5), (1, 1), (0, 5), (3, 0), (0, 0)])
def test_the_safetensors_library_opens_every_file(tmp_path: Path, dtype: str, rows: int, dim: int) -> None:
    torch_dtype = getattr(torch, dtype)
    raw = torch.randint(0, 2, (rows, dim * torch_dtype.itemsize), dtype=torch.uint8)
    tensor = raw.flatten().view(torch_dtype).view(rows, dim)
    payload = raw.numpy().tobytes()
    path = write(tmp_path, entry(rows, dim, dtype), payload)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["embedding"]
        found = file.get_tensor("embedding")
        assert file.metadata() == {
            "format": "ec-p2p/1",
            "identity": identity(7).hex(),
            "rows": str(rows),
            "dim": str(dim),
            "dtype": dtype,
            "xxh3_128": xxhash.xxh3_128_hexdigest(payload),
        }
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert read(path) == (entry(rows, dim, dtype), payload)


def test_the_payload_starts_on_a_page(tmp_path: Path) -> None:
    data = write(tmp_path, entry(), content(1, 2048)).read_bytes()
    assert data[HEADER_BYTES:] == content(1, 2048)
    assert len(data) == entry().file_bytes
    assert HEADER_BYTES % 4096 == 0


@pytest.mark.parametrize("nbytes", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_a_payload_of_several_chunks(tmp_path: Path, nbytes: int) -> None:
    filed = entry(1, nbytes, "uint8")
    assert read(write(tmp_path, filed, content(1, nbytes), fsync=True)) == (filed, content(1, nbytes))


def test_a_disk_that_moves_a_few_bytes_at_a_time(tmp_path: Path) -> None:
    class Trickle(Files):
        @staticmethod
        def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            return os.preadv(fd, [buffers[0][:100]], offset)

        @staticmethod
        def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            return os.pwritev(fd, [buffers[0][:100]], offset)

    path = write(tmp_path, entry(), content(1, 2048), Trickle())
    assert path.read_bytes() == write(tmp_path, entry(), content(1, 2048)).read_bytes()
    assert read(path, files=Trickle()) == (entry(), content(1, 2048))


def test_names() -> None:
    path = path_of("/tier", identity(7))
    assert path == f"/tier/07/{identity(7).hex()}.safetensors"
    assert identity_in(os.path.basename(path)) == identity(7)
    for name in ("x.safetensors", "A" * 64 + ".safetensors", "a" * 64, "a" * 65 + ".safetensors", "damaged"):
        assert identity_in(name) is None
    assert is_temp(f".{'a' * 64}.0123.tmp")
    assert not is_temp(f"{'a' * 64}.0123.tmp")


# ---------------------------------------------------------------- damage


def test_each_byte_of_the_header_counts() -> None:
    good = pack_header(entry(), DIGEST)
    assert unpack_header(good, identity(7), entry().file_bytes) == (entry(), DIGEST)
    for at in range(HEADER_BYTES):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(Damaged):
            unpack_header(bytes(bad), identity(7), entry().file_bytes)
    other = good.replace(DIGEST.encode(), b"0" * 32)
    assert unpack_header(other, identity(7), entry().file_bytes) == (entry(), "0" * 32)


def test_a_header_that_is_not_right_is_none_though_one_knows_the_entry(tmp_path: Path) -> None:
    path = write(tmp_path, entry(), content(1, 2048))
    good = path.read_bytes()
    for at in (*range(0, 400, 7), *range(400, HEADER_BYTES, 400), HEADER_BYTES - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(Damaged):
            read(path)


def test_each_byte_of_the_payload_counts(tmp_path: Path) -> None:
    filed = entry(1, 16, "uint8")
    path = write(tmp_path, filed, content(1, 16))
    good = path.read_bytes()
    for at in range(HEADER_BYTES, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :])
        with pytest.raises(Damaged):
            read(path)


@pytest.mark.parametrize(
    "kept", [0, 7, 8, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2047, HEADER_BYTES + 2049]
)
def test_a_file_of_another_length(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, entry(), content(1, 2048))
    path.write_bytes((path.read_bytes() + b"x")[:kept])
    with pytest.raises(Damaged):
        read(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, entry(), content(1, 2048))
    with opened(FILES, str(path)) as (fd, status):
        filed, _ = read_header(FILES, fd, identity(7), status.st_size)
        for nbytes in (HEADER_BYTES + 100, HEADER_BYTES, 100, 0):
            os.truncate(path, nbytes)
            with pytest.raises(Damaged, match="ends"):
                read_whole(FILES, fd, identity(7), memoryview(bytearray(filed.nbytes)), filed, never)


def header_with(text: bytes) -> bytes:
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def changed(**metadata: object) -> bytes:
    table = json.loads(pack_header(entry(), DIGEST)[8:])
    table["__metadata__"].update(metadata)
    return header_with(json.dumps(table, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "header",
    [
        (4 << 30).to_bytes(8, "little") + pack_header(entry(), DIGEST)[8:],
        b"\xff" * HEADER_BYTES,
        header_with(b"[" * (HEADER_BYTES - 8)),
        header_with(b'{"__metadata__":' + b'{"a":' * 800),
        header_with(b'{"a":' + b"[" * 1500 + b"]" * 1500 + b"}"),
        header_with(b"{}"),
        header_with(b"null"),
        header_with(b'{"__metadata__":{"format":"\xff"}}'),
        header_with(b'{"__metadata__":{"format":"\\ud800"}}'),
        changed(rows="9" * 2000),
        changed(rows="-4"),
        changed(rows=" 4"),
        changed(rows="٤"),
        changed(rows="1_0"),
        changed(rows=4),
        changed(rows="8"),
        changed(dtype="float15"),
        changed(dtype="bfloat16"),
        changed(format="ec-p2p/2"),
        changed(xxh3_128=None),
        changed(identity=identity(8).hex()),
        changed(more="x"),
    ],
    ids=range(22),
)
def test_a_header_that_nobody_here_wrote(header: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_header(header, identity(7), entry().file_bytes)


@given(st.binary(max_size=200).map(header_with) | st.binary(max_size=HEADER_BYTES), st.integers(0, 1 << 62))
def test_junk_is_damage_and_nothing_else(header: bytes, file_bytes: int) -> None:
    with pytest.raises(Damaged):
        unpack_header(header, identity(7), file_bytes)


def test_the_wrong_entry_under_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, entry(number=7), content(1, 2048))
    with pytest.raises(Damaged):
        read(path, number=8)


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("make", [Path.mkdir, make_link, os.mkfifo], ids=["folder", "link", "pipe"])
def test_what_is_no_file_is_told_apart(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "thing")
    before = descriptors()
    with pytest.raises(NotAFile):
        open_file(FILES, str(tmp_path / "thing"))
    assert descriptors() == before


# ---------------------------------------------------------------- whole or not at all


def test_whatever_fails_there_is_a_whole_file_or_none(tmp_path: Path) -> None:
    """Each operation of a write fails in turn: no temporary file and no descriptor stays."""
    operations: list[str] = []
    spy = Sick(lambda name, args: operations.append(name))
    write(tmp_path, entry(number=100), content(1, 2048), spy, fsync=True)
    assert set(operations) >= {"mkdir", "open", "flock", "pwritev", "fsync", "rename", "close"}
    # A failure that is told only when the file is closed comes before it can be found.
    assert operations.index("dup") < operations.index("close") < operations.index("rename")
    for number in (errno.ENOSPC, errno.EIO, errno.EACCES):
        for failing in range(len(operations)):
            filed = entry(number=failing)
            calls = iter(range(len(operations) + 10))

            def fail(name: str, args: Any, failing: int = failing, number: int = number, calls: Any = calls) -> None:
                if next(calls) == failing:
                    raise os_error(number)

            before = descriptors()
            path = Path(path_of(str(tmp_path), filed.identity))
            if "rename" in operations[:failing]:
                assert operations[failing:] == ["close"]  # which can tell of nothing any more
                write(tmp_path, filed, content(failing, 2048), Sick(fail), fsync=True)
                assert read(path, failing) == (filed, content(failing, 2048))
            else:
                with pytest.raises(OSError):
                    write(tmp_path, filed, content(failing, 2048), Sick(fail), fsync=True)
                assert not path.exists()
            assert descriptors() == before
            assert not list(Path(folder_of(str(tmp_path), filed.identity)).glob(".*.tmp"))
            assert read(write(tmp_path, filed, content(failing, 2048)), failing)
            path.unlink()


def test_a_write_abandoned_between_chunks(tmp_path: Path) -> None:
    asked = iter([False, True])
    filed = entry(1, 2 * CHUNK, "uint8")
    with pytest.raises(Abandoned):
        write_file(
            FILES, str(tmp_path), filed, memoryview(bytes(2 * CHUNK)), fsync=False, abandoned=lambda: next(asked)
        )
    assert os.listdir(folder_of(str(tmp_path), filed.identity)) == []


def test_a_read_abandoned_between_chunks(tmp_path: Path) -> None:
    asked = iter([False, True])
    filed = entry(1, 2 * CHUNK, "uint8")
    into = bytearray(2 * CHUNK)
    with opened(FILES, str(write(tmp_path, filed, b"x" * 2 * CHUNK))) as (fd, _), pytest.raises(Abandoned):
        read_whole(FILES, fd, identity(7), memoryview(into), filed, lambda: next(asked))
    assert into == b"x" * CHUNK + bytes(CHUNK)


def test_a_read_abandoned_while_the_last_chunk_hangs_finds_nothing(tmp_path: Path) -> None:
    asked = iter([False, True])
    path = write(tmp_path, entry(), content(1, 2048))
    with opened(FILES, str(path)) as (fd, _), pytest.raises(Abandoned):
        read_whole(FILES, fd, identity(7), memoryview(bytearray(2048)), entry(), lambda: next(asked))


def test_the_root_is_never_made_anew(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "gone", entry(), content(1, 2048))
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- leftovers


def temp_in(folder: Path) -> Path:
    return folder / f".{identity(7).hex()}.0123456789abcdef.tmp"


def test_a_leftover_goes_but_not_while_its_writer_lives(tmp_path: Path) -> None:
    temp = temp_in(tmp_path)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert not sweep(FILES, str(temp))
    assert temp.exists()
    os.close(fd)
    assert sweep(FILES, str(temp))
    assert not temp.exists()
    assert not sweep(FILES, str(temp))


def test_what_is_being_written_is_not_swept(tmp_path: Path) -> None:
    outcomes: list[bool] = []

    def sweep_all(name: str, args: Any) -> None:
        if name in ("pwritev", "rename"):
            for temp in (tmp_path / "07").glob(".*.tmp"):
                outcomes.append(sweep(FILES, str(temp)))

    assert read(write(tmp_path, entry(), content(1, 2048), Sick(sweep_all))) == (entry(), content(1, 2048))
    assert outcomes == [False] * 3


def test_swept_before_it_could_be_locked_a_write_begins_again(tmp_path: Path) -> None:
    swept: list[bool] = []

    def sweep_first(name: str, args: Any) -> None:
        if name == "flock" and not swept:
            [temp] = (tmp_path / "07").glob(".*.tmp")
            swept.append(sweep(FILES, str(temp)))

    assert read(write(tmp_path, entry(), content(1, 2048), Sick(sweep_first))) == (entry(), content(1, 2048))
    assert swept == [True]
    assert len(list((tmp_path / "07").iterdir())) == 1


def test_locked_by_who_sweeps_a_write_begins_again(tmp_path: Path) -> None:
    held: list[int] = []

    def lock_first(name: str, args: Any) -> None:
        if name == "flock" and not held:
            [temp] = (tmp_path / "07").glob(".*.tmp")
            held.append(os.open(temp, os.O_RDWR))
            fcntl.flock(held[0], fcntl.LOCK_EX)
            temp.unlink()

    path = write(tmp_path, entry(), content(1, 2048), Sick(lock_first))
    os.close(held[0])
    assert read(path) == (entry(), content(1, 2048))


def test_finished_while_it_is_swept_a_file_stays(tmp_path: Path) -> None:
    temp = temp_in(tmp_path)
    temp.write_bytes(b"whole")
    finished = tmp_path / "finished"
    assert not sweep(Sick(lambda name, args: name == "flock" and temp.rename(finished)), str(temp))
    assert finished.read_bytes() == b"whole"


def test_without_locks_files_are_written_and_leftovers_left(tmp_path: Path) -> None:
    def no_locks(name: str, args: Any) -> None:
        if name == "flock":
            raise os_error(errno.ENOLCK)

    files = Sick(no_locks)
    assert read(write(tmp_path, entry(), content(1, 2048), files)) == (entry(), content(1, 2048))
    temp = temp_in(tmp_path)
    temp.touch()
    assert not sweep(files, str(temp))
    assert temp.exists()


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    temp_in(tmp_path).mkdir()
    with pytest.raises(IsADirectoryError):
        sweep(FILES, str(temp_in(tmp_path)))
    assert temp_in(tmp_path).exists()
