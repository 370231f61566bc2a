"""The kernel's side: memory, limits, files, the clock. Looks only; changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import time
from pathlib import Path

from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.cli.free_memory import machine_memory, memory_left
from ec_p2p.cli.words import size
from ec_p2p.config import Config
from ec_p2p.engine.disk import LAYOUT

_SHM_OF_VLLM = 512 << 20
"""UCX takes about 4 MB for each node where there is room, and does without where there is none."""
_FILES_LEAST = 4096
_COUNTING_S = 3.0
_TIME_ERROR = 5
"""What adjtimex returns while nothing keeps the clock right."""


def memory(config: Config, held: int, root: Path = Path("/")) -> Finding:
    """Whether what the arena may yet take fits what this process may use. `held`: bytes that the arena of the node
    which runs here has taken already."""
    arena = config.max_local_cpu_size
    free = machine_memory(root)
    limit = memory_left(root)
    left, who = (
        (limit, "this container's or unit's memory limit leaves")
        if limit is not None and limit < free
        else (free, "the machine has")
    )
    taken = f", of which it has {size(held)} already" if held else ""
    says = f"the arena may grow to {size(arena)}{taken}; {who} {size(left)} free"
    if arena - held > left:
        return problem("memory", says, "lower max_local_cpu_size, or give the host, container or unit more memory")
    return ok("memory", says)


def memfd() -> Finding:
    """Whether the arena can be made at all: some sandboxes forbid it."""
    try:
        fd = os.memfd_create("ec-p2p-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return problem("memfd", f"memfd_create is refused ({error})", "allow memfd_create in the seccomp profile")
    os.close(fd)
    return ok("memfd", "shared memory for the arena can be made")


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """vLLM's workers and UCX use it; the arena does not."""
    try:
        space = os.statvfs(path)
    except OSError as error:
        return problem("/dev/shm", f"cannot be used ({error.strerror})", "mount a tmpfs there")
    free = space.f_bavail * space.f_frsize
    says = f"{size(space.f_blocks * space.f_frsize)}, {size(free)} of it free"
    if free < _SHM_OF_VLLM:
        mend = "it does for the node, which goes without where it must; vLLM with several GPUs may want more: "
        return note("/dev/shm", says, f"{mend}--shm-size=2g or --ipc=host (containers)")
    return ok("/dev/shm", says)


def locked_memory(config: Config, *, rdma: bool) -> Finding:
    """`rdma`: NIXL is to go over it, which pins what is registered: the whole arena in the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    says = f"at most {size(soft)} may be locked"
    if not rdma:
        return ok(
            "memlock", f"{says}; the node locks nothing unless NIXL has an RDMA device; CUDA pins the arena for workers"
        )
    if soft < config.max_local_cpu_size:
        mend = "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (containers), or ulimit -l unlimited"
        if hard != resource.RLIM_INFINITY:
            mend += f", which cannot go beyond the hard limit, {size(hard)}"
        return problem("memlock", f"{says}, and an RDMA device will have to lock the arena", mend)
    return ok("memlock", says)


def open_files() -> Finding:
    """The hard limit counts: a node raises its soft one to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok("open files", "unlimited")
    says = f"at most {hard}: the hard limit, to which a node raises the soft one ({soft})"
    if hard < _FILES_LEAST:
        mend = f"raise the hard limit to {_FILES_LEAST}: LimitNOFILE={_FILES_LEAST} (systemd), --ulimit "
        mend += f"nofile={_FILES_LEAST} (containers), limits.conf; a node holds a few for each peer and client"
        return note("open files", says, mend)
    return ok("open files", says)


def disk(config: Config) -> Finding:
    """The folder of the second tier, which the node makes where it is missing."""
    if not config.local_disk:
        return ok("disk tier", "none: local_disk is not set")
    folder = Path(config.local_disk)
    try:
        there = next(path for path in (folder / LAYOUT, folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission, or mounted read-only")
        space = os.statvfs(there)
    except OSError as error:
        mend = f"make {folder} a folder that this user may write to, or set local_disk to another"
        return problem("disk tier", f"{folder} cannot be written to ({error.strerror})", mend)
    free = space.f_bavail * space.f_frsize
    made = "" if folder.exists() else " (not there yet: the node makes it)"
    says = f"{folder}{made}: {size(free)} free, may hold {size(config.max_local_disk_size)}"
    if free < config.max_local_disk_size:
        held = _bytes_below(folder / LAYOUT)
        says += f", holds {size(held)}"
        if free + held < config.max_local_disk_size:
            return note(
                "disk tier", says, "lower max_local_disk_size, or make room: it does not fit this disk as it is"
            )
    return ok("disk tier", says)


def clock() -> Finding:
    """For people only: `ec-p2p ls` shows ages, logs show times. The protocol uses no wall clock."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        state = -1
    if state == _TIME_ERROR:
        return note(
            "clock",
            "nothing keeps it right; the protocol does not mind, ages in `ec-p2p ls` and logs do",
            "run chrony or ntpd",
        )
    return ok("clock", "kept right" if state >= 0 else "cannot be asked; the protocol does not need it")


def _bytes_below(folder: Path) -> int:
    """Of all files; of some, where there are so many that counting them takes long."""
    until = time.monotonic() + _COUNTING_S
    nbytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                nbytes += os.lstat(os.path.join(parent, name)).st_size
        if time.monotonic() > until:
            break
    return nbytes
