"""What has to end before the interpreter does.

Owns no more than the wish. The interpreter ends its daemon threads where they are: one that is within a library then
takes the process down, with a core dump.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable


def close_at_exit(close: Callable[[], object]) -> Callable[[], object]:
    """Have `close` called when the interpreter of this process ends; not of a child that it forks, which has neither
    its threads nor its connections. Returns what calls that off."""
    process = os.getpid()

    def close_here() -> None:
        if os.getpid() == process:
            close()

    atexit.register(close_here)
    return lambda: atexit.unregister(close_here)
