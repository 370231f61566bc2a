"""Whose trouble an error of the operating system is: one path's, or that of the folder of all and its device.

Owns that question. Must never act on the answer.

What is no kind of error that a single path gives (EIO, ENOSPC, EROFS, EMFILE, ...) concerns all. What is, concerns all
when the folder of all answers no better: when it cannot be entered, or, where a path was refused, is closed to us too.
"""

from __future__ import annotations

import errno
import os

from ec_p2p.engine.files import Files

DELETED = frozenset({errno.ENOENT, errno.ESTALE})
"""There is no such file, which is no error. The latter is how NFS says that another host has deleted it."""
ABSENT = DELETED | {errno.ENOTDIR, errno.ELOOP}
"""There is no such file; it may be that something that is not ours is in its way."""

_REFUSED = frozenset({errno.EACCES, errno.EPERM})
_ONE_PATHS = ABSENT | _REFUSED | {errno.EISDIR, errno.EBUSY, errno.EFBIG}

TO_READ = os.R_OK | os.X_OK
TO_WRITE = os.W_OK | os.X_OK


class Unreadable(OSError):
    """One path's file cannot be read; those of others can."""


def is_one_paths(files: Files, root: str, error: OSError, purpose: int) -> bool:
    """Whether `error` concerns the path only at which it was met, `purpose` being TO_READ or TO_WRITE.

    Raises the OSError that `root` itself answers with.
    """
    if error.errno not in _ONE_PATHS:
        return False
    files.lstat(f"{root}/.")
    return error.errno not in _REFUSED or files.access(root, purpose)
