"""A fleet on one machine: vLLM servers that stand on several "hosts", and a proxy before them.

Owns how each piece is started: command, environment and connector settings. Hosts differ by their `node_name`, so
entries cross between them over the network exactly as between machines. Run by hand it starts the demo's fleet:

    python tiny_model.py /tmp/tiny && python fleet.py /tmp/tiny
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metrics import DIRECT, Metrics
from processes import Failed, Process, Run, free_port, interruptible, log_folder

MODEL_NAME = "tiny"
STOCK_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")

_HERE = Path(__file__).parent
_SERVER_OPTIONS = {
    "--served-model-name": MODEL_NAME,
    "--host": "127.0.0.1",
    "--dtype": "bfloat16",
    "--max-model-len": "2048",
    "--max-num-seqs": "8",
    "--limit-mm-per-prompt": '{"image":4}',
    "--kv-cache-memory-bytes": str(64 << 20),
    "--gpu-memory-utilization": "0.1",  # on a machine with a GPU all servers share it
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # One computing thread each: several servers share few cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "no_proxy": "127.0.0.1,localhost",
}
_NODE_SETTINGS: dict[str, Any] = {
    "max_local_cpu_size": "256MiB",
    "slab_size": "64MiB",
    "window_size": "16MiB",
    "grace_s": 20.0,
}


@dataclass(frozen=True)
class Host:
    """Stands for a machine: its node's name, unique on this one, and where that node shows its metrics."""

    label: str
    node_name: str
    metrics_url: str

    def metrics(self) -> Metrics:
        return Metrics.read(self.metrics_url)


@dataclass(frozen=True)
class Server:
    """A vLLM server, or the proxy, and where it listens."""

    name: str
    url: str
    process: Process
    host: Host | None = None
    role: str | None = None

    def healthy(self) -> bool:
        try:
            with DIRECT.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metrics(self) -> Metrics:
        return Metrics.read(self.url)


@dataclass
class Fleet:
    """Starts pieces inside `run`, which ends them."""

    run: Run
    model: Path
    launcher: Sequence[str] = STOCK_SERVER
    """The command that becomes a vLLM API server."""
    caches: Path | None = None
    """Where vLLM keeps what it learns about models, which makes the next start seconds faster. None: with the run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of ec-p2p, for every connector; `connector` is given those of a single one."""
    ec_port: int = field(default_factory=free_port)
    directory_pub_port: int = field(default_factory=free_port)

    def host(self, label: str) -> Host:
        return Host(label, f"{label}-{self.run.mark}", f"http://127.0.0.1:{free_port()}")

    def connector(self, role: str, host: Host, **settings: Any) -> dict[str, Any]:
        """vLLM's `--ec-transfer-config` for an instance on `host`; `settings` go to ec-p2p, over the fleet's own."""
        return {
            "ec_connector": "ECP2PConnector",
            "ec_role": role,
            "ec_ip": "127.0.0.1",
            "ec_port": self.ec_port,
            "ec_connector_extra_config": {
                **_NODE_SETTINGS,
                "node_name": host.node_name,
                "metrics_port": int(host.metrics_url.rpartition(":")[2]),
                "directory_pub_port": self.directory_pub_port,
                "log_file": str(self.run.folder / f"node-{host.label}.log"),
                **self.settings,
                **settings,
            },
        }

    def server(
        self,
        name: str,
        host: Host | None = None,
        connector: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """Start a vLLM server; it is not ready yet. Without `connector` it is a plain vLLM."""
        port = free_port()
        command = [*self.launcher, "--model", str(self.model), "--port", str(port), "--enforce-eager"]
        for option, value in _SERVER_OPTIONS.items():
            command += [option, value]
        if connector is not None:
            command += ["--ec-transfer-config", json.dumps(connector)]
        command += options
        caches = self.caches or self.run.tmp / "vllm"
        roots = {"VLLM_CACHE_ROOT": str(caches), "VLLM_CONFIG_ROOT": str(caches)}
        process = self.run.start(name, command, {**_ENVIRONMENT, **roots, **(env or {})})
        role = None if connector is None else str(connector["ec_role"])
        return Server(name, f"http://127.0.0.1:{port}", process, host, role)

    def proxy(self, encoders: Sequence[Server], pds: Sequence[Server], options: Sequence[str] = ()) -> Server:
        port = free_port()
        command = [sys.executable, str(_HERE / "proxy.py"), "--port", str(port)]
        for flag, servers in (("--encoder", encoders), ("--pd", pds)):
            for server in servers:
                command += [flag, server.url]
        return Server("proxy", f"http://127.0.0.1:{port}", self.run.start("proxy", [*command, *options], _ENVIRONMENT))

    def wait_ready(self, servers: Sequence[Server], timeout_s: float = 300.0) -> None:
        """Raises Failed, with the end of the log, for the first one that does not come up."""
        deadline = time.monotonic() + timeout_s
        for server in servers:
            server.process.wait_ready(server.healthy, max(1.0, deadline - time.monotonic()))


@dataclass(frozen=True)
class DemoFleet:
    """Three hosts: an encoder; two prefill/decode instances that share a node; one instance that does both."""

    producer: Server
    consumers: tuple[Server, Server]
    both: Server
    proxy: Server

    @property
    def servers(self) -> tuple[Server, ...]:
        return (self.producer, *self.pds)

    @property
    def pds(self) -> tuple[Server, ...]:
        """As the proxy counts them."""
        return (*self.consumers, self.both)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(dict.fromkeys(server.host for server in self.servers if server.host))


def start_demo_fleet(fleet: Fleet) -> DemoFleet:
    """Start all pieces at once and wait until all of them answer."""
    host1, host2, host3 = (fleet.host(label) for label in ("host1", "host2", "host3"))
    producer = fleet.server("producer", host1, fleet.connector("ec_producer", host1))
    first, second = (fleet.server(f"consumer{n}", host2, fleet.connector("ec_consumer", host2)) for n in (1, 2))
    both = fleet.server("both", host3, fleet.connector("ec_both", host3))
    proxy = fleet.proxy(encoders=[producer], pds=[first, second, both])
    fleet.wait_ready([producer, first, second, both, proxy])
    return DemoFleet(producer, (first, second), both, proxy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that tiny_model.py has written")
    args = parser.parse_args()
    interruptible()
    try:
        with log_folder("ec-p2p-fleet-") as logs, Run(logs) as run:
            print(f"starting; logs in {logs}", flush=True)
            fleet = start_demo_fleet(Fleet(run, args.model.absolute()))
            for server in (fleet.proxy, *fleet.servers):
                print(f"{server.name:10} {server.url}   pid {server.process.pid}")
            for host in fleet.hosts:
                print(f"node {host.label:5} {host.metrics_url}/metrics   {host.node_name}")
            print("ctrl-c ends it", flush=True)
            signal.pause()
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("everything is stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
