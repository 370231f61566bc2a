"""Puts as fast as it can until it is killed. For each line `FOLDER SEED CAP` on its input it forks a process that does
so, and prints its number: forked, because importing torch takes longer than the life of such a process.
"""

from __future__ import annotations

import os
import signal
import sys

from ec_p2p import ECCacheEngine
from ec_p2p.config import Config
from tests.engine.entries import DTYPE, embedding, rows_of

NAMES = 120
"""Entries that a seed stands for: some 25 MB."""


def name_of(seed: int, number: int) -> str:
    return f"{seed} {number}"


def config(folder: str, cap: int) -> Config:
    return Config(max_local_cpu_size=16 << 20, local_disk=folder, max_local_disk_size=cap)


def put_for_ever(folder: str, seed: int, cap: int) -> None:
    engine = ECCacheEngine("m", DTYPE, config=config(folder, cap))
    entries = [(name, embedding(name, rows_of(name))) for name in (name_of(seed, number) for number in range(NAMES))]
    while True:
        for name, entry in entries:
            engine.put(name, entry)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        folder, seed, cap = line.split()
        pid = os.fork()
        if not pid:
            try:
                put_for_ever(folder, int(seed), int(cap))
            finally:
                os._exit(1)
        print(pid, flush=True)
