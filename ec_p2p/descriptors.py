"""How many files, sockets among them, this process may have open.

Whoever has a connection for each node of a fleet needs more than the usual soft limit of 1024, which is that low for
the sake of programs that use select(). None here does.
"""

from __future__ import annotations

import resource


def allow_descriptors() -> float:
    """Raise the soft limit to the hard one, for this process and those it starts from now on. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return float("inf") if hard == resource.RLIM_INFINITY else hard
