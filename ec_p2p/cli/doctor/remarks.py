"""What parts of this project would have written to the log, as material for a finding."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def remarks(name: str) -> Iterator[list[str]]:
    """The warnings and errors of the logger `name` and of those below it, which go nowhere else meanwhile."""
    logger = logging.getLogger(name)
    collector = _Collector()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.propagate = propagate


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
