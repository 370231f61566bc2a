"""What makes every hook total.

Owns the rule that no error inside the connector reaches vLLM, where any exception ends the engine and all its work.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from ec_p2p.connector.counts import Counts

logger = logging.getLogger("vllm.ec_p2p")

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Counting(Protocol):
    counts: Counts
    hook_failures: set[tuple[str, type[Exception]]]
    """The kinds that have been logged already: a hook that fails on every step logs once."""


def total(safe: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """Decorator: an exception in the hook is counted, logged once per kind, answered by `safe(self, *arguments)`."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: Counting, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                note_failure(self, hook.__name__, error)
                return safe(self, *args, **kwargs)

        return cast(Hook, guarded)

    return decorate


def note_failure(owner: Counting, hook: str, error: Exception) -> None:
    owner.counts.add("hook_errors", hook)
    kind = (hook, type(error))
    if kind not in owner.hook_failures:
        owner.hook_failures.add(kind)
        logger.error("%s failed; the engine goes on (more of this kind are only counted)", hook, exc_info=error)


def nothing(_self: Any, *_args: Any, **_kwargs: Any) -> None:
    """The safe answer of hooks that have none."""
