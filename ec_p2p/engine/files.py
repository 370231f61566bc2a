"""The disk tier's calls to the operating system: one place, that tests replace to make a disk slow or sick.

Must never decide anything. Every call lets go of the interpreter lock while it waits, so that a hung disk stops one
thread and not the process; that is why directories are listed by name and not by `os.scandir`, whose entries ask for
their state with the lock held.
"""

from __future__ import annotations

import fcntl
import os


class Files:
    """The operations as `os` has them, errors included."""

    access = staticmethod(os.access)
    open = staticmethod(os.open)
    close = staticmethod(os.close)
    dup = staticmethod(os.dup)
    fstat = staticmethod(os.fstat)
    lstat = staticmethod(os.lstat)
    listdir = staticmethod(os.listdir)
    mkdir = staticmethod(os.mkdir)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    utime = staticmethod(os.utime)
    fsync = staticmethod(os.fsync)
    flock = staticmethod(fcntl.flock)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
