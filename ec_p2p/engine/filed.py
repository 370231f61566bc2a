"""What one file of the disk tier is: a safetensors file of one tensor, with all that proves it in its metadata.

Owns the format, the names, and how a file comes into being (whole, by rename, or not at all) and is read back
(verified, or not at all). Must never know which files there are or ought to be.

The header fills the first 4096 bytes, so that the payload starts on a page. There is one right header for a tensor: a
file with any other is damaged, which makes each byte of it count, padding included.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress

import msgspec
import xxhash

from ec_p2p.engine.files import Files
from ec_p2p.engine.generation import check

FORMAT = "ec-p2p/1"
HEADER_BYTES = 4096
CHUNK = 1 << 20
"""Bytes that are read or written at a time, and hashed while they are hot in the cache."""

# What the safetensors library calls the storable dtypes.
_SAFETENSORS = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}
_LENGTH = (HEADER_BYTES - 8).to_bytes(8, "little").decode("latin-1")
_OWN_NAMES = {name: name for name in _SAFETENSORS}

_SUFFIX = ".safetensors"
_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
_METADATA = re.compile(
    rb'\{"__metadata__":\{"format":"ec-p2p/1","identity":"[0-9a-f]{64}",'
    rb'"rows":"(\d{1,10})","dim":"(\d{1,10})","dtype":"(\w{1,20})","xxh3_128":"([0-9a-f]{32})"\}'
)
_TEMP = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]+\.tmp")

# A pipe must not block us either.
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Of a file system without locks: who writes a temporary file there cannot be known.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class Filed(msgspec.Struct, frozen=True, gc=False):
    """An entry that lies on disk: a tensor of `rows` x `dim` elements of `dtype`, `nbytes` of payload."""

    identity: bytes
    nbytes: int
    rows: int
    dim: int
    dtype: str

    @property
    def file_bytes(self) -> int:
        """Size of its file."""
        return HEADER_BYTES + self.nbytes


class Damaged(Exception):
    """What lies under an entry's name is not that entry, whole and unchanged; the text says why."""


class NotAFile(Exception):
    """Under an entry's name lies a folder, a link or another thing that nobody here has made."""


class Abandoned(Exception):
    """Who wanted the work done does not any more: its memory must not be touched again."""


# ---------------------------------------------------------------- names


def folder_of(root: str, identity: bytes) -> str:
    return f"{root}/{identity[:1].hex()}"


def path_of(root: str, identity: bytes) -> str:
    name = identity.hex()
    return f"{root}/{name[:2]}/{name}{_SUFFIX}"


def identity_in(name: str) -> bytes | None:
    """The identity that a file's name stands for; None if it is not the name of an entry's file."""
    match = _FILE.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def is_temp(name: str) -> bool:
    """Whether this is the name of a file that somebody writes, or died writing."""
    return _TEMP.fullmatch(name) is not None


# ---------------------------------------------------------------- the header


def pack_header(filed: Filed, digest: str) -> bytes:
    """The first 4096 bytes of the file. `digest`: xxh3-128 of the payload, in hex."""
    # Nothing in it needs escaping, and a serializer would take longer than reading the file's first megabyte.
    text = (
        f'{_LENGTH}{{"__metadata__":{{"format":"{FORMAT}","identity":"{filed.identity.hex()}",'
        f'"rows":"{filed.rows}","dim":"{filed.dim}","dtype":"{filed.dtype}","xxh3_128":"{digest}"}},'
        f'"embedding":{{"dtype":"{_SAFETENSORS[filed.dtype]}","shape":[{filed.rows},{filed.dim}],'
        f'"data_offsets":[0,{filed.nbytes}]}}}}'
    )
    return text.encode("latin-1").ljust(HEADER_BYTES)


def unpack_header(data: bytes, identity: bytes, file_bytes: int) -> tuple[Filed, str]:
    """The entry and its digest, from the first 4096 bytes of a file of `file_bytes`. Raises Damaged unless they are
    exactly what `pack_header` makes for `identity`."""
    if len(data) < HEADER_BYTES:
        raise Damaged(f"it ends after {len(data)} bytes, within its header")
    found = _METADATA.match(data, 8)
    if not found:
        raise Damaged("its header is none of this format")
    rows, dim, dtype, digest = (group.decode() for group in found.groups())
    try:
        filed = Filed(identity, file_bytes - HEADER_BYTES, int(rows), int(dim), _OWN_NAMES.get(dtype, dtype))
        check(identity, filed.nbytes, filed.rows, filed.dim, filed.dtype)
    except ValueError as error:
        raise Damaged(f"its header does not describe it: {error}") from None
    if data != pack_header(filed, digest):
        raise Damaged("its header is not the one this entry has")
    return filed, digest


# ---------------------------------------------------------------- reading


def open_file(files: Files, path: str) -> tuple[int, os.stat_result]:
    """A descriptor to read `path` by, the caller's to close, and what it is of. Raises NotAFile, FileNotFoundError or
    another OSError."""
    try:
        fd = files.open(path, _TO_READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAFile(path) from None
        raise
    try:
        status = files.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFile(path)
    except BaseException:
        files.close(fd)
        raise
    return fd, status


def read_header(files: Files, fd: int, identity: bytes, file_bytes: int) -> tuple[Filed, str]:
    """The entry in an open file of `file_bytes`, and the digest its payload must have. Raises Damaged or OSError."""
    header = bytearray(HEADER_BYTES)
    got = _read(files, fd, 0, memoryview(header))
    return unpack_header(bytes(header[:got]), identity, file_bytes)


def read_whole(
    files: Files, fd: int, identity: bytes, into: memoryview, known: Filed | None, abandoned: Callable[[], bool]
) -> Filed:
    """The entry in an open file that has as many bytes of payload as `into`, which is filled with them; verified.

    `known` is the entry that is expected, if one is: a header that is just that entry's need not be taken apart.
    Raises Damaged, Abandoned (asked for before each chunk and after the last), or OSError.
    """
    if abandoned():
        raise Abandoned
    # With the first chunk, since a call takes longer than the header does.
    header, chunk = bytearray(HEADER_BYTES), into[:CHUNK]
    wanted = HEADER_BYTES + len(chunk)
    if files.preadv(fd, [header, chunk], 0) < wanted:  # not at once, at least
        got = _read(files, fd, 0, memoryview(header), chunk)
        if got < wanted:
            unpack_header(bytes(header[:got]), identity, HEADER_BYTES + len(into))
            raise Damaged("it ends before its payload does")
    payload = xxhash.xxh3_128(chunk)
    for at in range(CHUNK, len(into), CHUNK):
        if abandoned():
            raise Abandoned
        chunk = into[at : at + CHUNK]
        if _read(files, fd, HEADER_BYTES + at, chunk) < len(chunk):
            raise Damaged("it ends before its payload does")
        payload.update(chunk)
    if abandoned():
        raise Abandoned
    digest = payload.hexdigest()
    if known is not None and header == pack_header(known, digest):
        return known
    filed, right = unpack_header(bytes(header), identity, HEADER_BYTES + len(into))
    if digest != right:
        raise Damaged("its payload is not what was written")
    return filed


def _read(files: Files, fd: int, offset: int, *buffers: memoryview) -> int:
    """Fill the buffers one after the other; returns how many bytes there were, fewer only where the file ends."""
    left, done = list(buffers), 0
    while left and (got := files.preadv(fd, left, offset + done)):
        done += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if left:
            left[0] = left[0][got:]
    return done


# ---------------------------------------------------------------- writing


def write_file(
    files: Files, root: str, filed: Filed, payload: memoryview, *, fsync: bool, abandoned: Callable[[], bool]
) -> None:
    """Put an entry's file in its place, in one step, over whatever file is there.

    Raises Abandoned or OSError with no trace left behind, except for what the operating system refuses to remove.
    `fsync`: its bytes outlive a power failure; its name does so after `fsync_folder`.
    """
    folder = folder_of(root, filed.identity)
    # Only this folder, never its parents: a root that has vanished must not be made anew beneath its mount point.
    with suppress(FileExistsError):
        files.mkdir(folder)
    temp, fd = _create_temp(files, folder, filed.identity)
    try:
        try:
            digest = xxhash.xxh3_128()
            for at in range(0, len(payload), CHUNK):
                if abandoned():
                    raise Abandoned
                chunk = payload[at : at + CHUNK]
                digest.update(chunk)
                _write(files, fd, chunk, HEADER_BYTES + at)
            _write(files, fd, memoryview(pack_header(filed, digest.hexdigest())), 0)
            if fsync:
                files.fsync(fd)
            # NFS tells of a write that failed when a descriptor is closed; the lock stays with the other one.
            files.close(files.dup(fd))
            files.rename(temp, path_of(root, filed.identity))
        except BaseException:
            with suppress(FileNotFoundError):
                files.unlink(temp)
            raise
    finally:
        with suppress(OSError):  # where the file stands, all that a close can tell was told before
            files.close(fd)


def fsync_folder(files: Files, root: str, identity: bytes) -> None:
    """Have the name of an entry's file outlive a power failure. On OSError the file stands, until there is one."""
    fd = files.open(folder_of(root, identity), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.fsync(fd)
    finally:
        files.close(fd)


def _create_temp(files: Files, folder: str, identity: bytes) -> tuple[str, int]:
    """A new, empty file that is locked for as long as its descriptor is open: so one sees that its writer lives."""
    while True:
        temp = f"{folder}/.{identity.hex()}.{secrets.token_hex(8)}.tmp"
        fd = files.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Between the two calls somebody who sweeps may have found it unlocked: then it is gone, or about to go.
            if _lock(files, fd) is not False and files.fstat(fd).st_nlink:
                return temp, fd
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                files.unlink(temp)
            files.close(fd)
            raise
        files.close(fd)


def sweep(files: Files, temp: str) -> bool:
    """Remove a temporary file whose writer is dead. False: its writer lives, or nobody can tell. Raises OSError."""
    try:
        # For writing: NFS gives an exclusive lock for nothing less.
        fd = files.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not stat.S_ISREG(files.fstat(fd).st_mode) or not _lock(files, fd):
            return False
        files.unlink(temp)
    except FileNotFoundError:
        return False  # it was finished, and renamed, in between
    finally:
        files.close(fd)
    return True


def _lock(files: Files, fd: int) -> bool | None:
    """True: ours now. False: another's. None: there are no locks here."""
    try:
        files.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _write(files: Files, fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += files.pwritev(fd, [data[done:]], offset + done)
