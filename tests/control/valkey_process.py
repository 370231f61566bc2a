"""A real Valkey or Redis server, in a process and a folder of its own, and what a test asks it behind the back of those
who announce and follow."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from processes import free_port

BINARY = shutil.which("valkey-server") or shutil.which("redis-server") or ""
needs_server = pytest.mark.skipif(not BINARY, reason="neither valkey-server nor redis-server is installed")

PREFIX = "fleet-1"
_PATIENCE_S = 60.0


class ValkeyProcess:
    """Runs from construction on, keeping nothing on disk; `options` are words for its command line."""

    def __init__(self, endpoint: str = "", *options: str, query: str = "") -> None:
        self.port = int(endpoint.rpartition(":")[2].partition("/")[0]) if endpoint else free_port()
        self.endpoint = f"valkey://127.0.0.1:{self.port}/{PREFIX}{query}"
        self.folder = Path(tempfile.mkdtemp(prefix="ec-p2p-valkey-"))
        self._command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self._command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *options]
        self.start()

    def start(self) -> None:
        """Again, too, with what is in its folder."""
        self._log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            log = (self.folder / "log").read_text()
            assert self.process.poll() is None, f"{BINARY} did not start: {log}"
            assert time.monotonic() < deadline, f"{BINARY} does not listen: {log}"
            time.sleep(0.01)

    def client(self, **options: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, protocol=2, **options)

    def key(self, name: str) -> str:
        return f"{{{PREFIX}}}:{name}"

    def stands(self) -> tuple[bytes, int]:
        """Epoch and number of the last change."""
        with self.client() as client:
            epoch, seq = client.hmget(self.key("about"), ["epoch", "seq"])
        return epoch or b"", int(seq or 0)

    def entries(self) -> int:
        """Adverts of all nodes."""
        with self.client() as client:
            nodes = client.scan_iter(self.key("n:*"))
            return sum(len(name) == 32 for node in nodes for name in client.hkeys(node))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
