"""What a directory costs as the fleet grows: heartbeats, publications to everybody, and everything said anew at once.

For each number of instances a fresh directory, so many announcing nodes with 100 entries each, as many subscribers, and
2 replicas. Every node and every subscriber has real sockets and connections of its own, over the loopback, in a few
processes. A subscriber that is no replica reads what it gets and drops it: a thousand real ones would measure this
machine's memory. The directory's figures are of its process, its I/O thread included.

A directory is killed and started again twice: in front of everybody, and, 'alone', without the subscribers. The
difference is what it costs to send everything to everybody; on one machine, with what it costs to receive it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from ec_p2p.cli.bench_fleet import Pipe, Remote, poll_until, serve_directory, serve_nodes, serve_replica
from ec_p2p.config import ConfigError
from ec_p2p.control.messages import TOPIC
from ec_p2p.control.sockets import new_context, open_socket, receive_now
from ec_p2p.descriptors import allow_descriptors

_ENTRIES = 100
_REPLICAS = 2
_IN_ONE_PROCESS = 250
_LOAD_PER_S = 20
_DESCRIPTORS = 3
"""For each instance, at most, in any of the processes: the directory has two of its connections, and the processes of
nodes and of subscribers each have two descriptors for a socket."""

_COLUMNS = {
    "instances": "instances",
    "announced_s": "announced s",
    "idle_percent": "idle cpu %",
    "heartbeat_us": "us/heartbeat",
    "load_percent": "load cpu %",
    "publish_us": "us/publish/sub",
    "rss_mib": "rss MiB",
    "descriptors": "descriptors",
    "restart_s": "restart s",
    "restart_cpu_s": "its cpu s",
    "followed_s": "followed s",
    "restart_alone_s": "alone s",
    "restart_alone_cpu_s": "its cpu s",
}


def run(counts: list[int], seconds: float, *, as_json: bool) -> int:
    """Measure and print, `seconds` for each measurement of CPU time. Returns the exit status."""
    wanted, allowed = 100 + _DESCRIPTORS * max(counts), allow_descriptors()
    if allowed < wanted:
        raise ConfigError(
            f"--instances: {max(counts)} need {wanted} open files; "
            f"accepted: what fits the {allowed} of the hard limit (ulimit -Hn)"
        )
    rows = [measure(count, seconds) for count in counts]
    if as_json:
        print(json.dumps({"entries_each": _ENTRIES, "load_per_s": _LOAD_PER_S, "rows": rows}))
        return 0
    print(f"directory, {_ENTRIES} entries an instance, {_REPLICAS} replicas; load: {_LOAD_PER_S} adverts/s of all")
    print(" ".join(f"{title:>14}" for title in _COLUMNS.values()))
    for row in rows:
        print(" ".join(f"{row[name]:>14}" for name in _COLUMNS))
    return 0


def measure(count: int, seconds: float) -> dict[str, Any]:
    """Figures for so many instances."""
    with ExitStack() as stack:

        def start(main: Callable[..., None], *args: Any) -> Remote:
            remote = Remote(main, *args)
            stack.callback(remote.close)
            return remote

        directory = start(serve_directory)
        endpoint, pub_port = directory.hear()
        empty = directory.ask("stats")["rss"]
        replicas = [start(serve_replica, endpoint) for _ in range(_REPLICAS)]
        groups = [range(count)[at : at + _IN_ONE_PROCESS] for at in range(0, count, _IN_ONE_PROCESS)]
        listeners = [start(serve_listeners, f"tcp://127.0.0.1:{pub_port}", len(group)) for group in groups]
        nodes = [start(serve_nodes, endpoint, list(group)) for group in groups]
        for remote in nodes:
            remote.ask("make", _ENTRIES)
            remote.ask("note")
        started = time.monotonic()
        for remote in nodes:
            remote.tell("send")
        for remote in nodes:
            remote.hear()
        _until_known(directory, count)
        announced = time.monotonic() - started
        poll_until(lambda: sum(remote.ask("heard")[1] for remote in listeners) == count)
        idle = _watch(directory, seconds)
        for remote in nodes:
            remote.tell("pace", _LOAD_PER_S / len(nodes))
        load = _watch(directory, seconds)
        for remote in nodes:
            remote.ask("rest")
        loaded = directory.ask("stats")
        again, everybody = _restart(directory, lambda: start(serve_directory, endpoint, pub_port), replicas, count)
        for remote in listeners:
            remote.close()
        _, alone = _restart(again, lambda: start(serve_directory, endpoint, pub_port), replicas, count)
    busy = load["cpu"] - idle["cpu"]
    return {
        "instances": count,
        "announced_s": round(announced, 2),
        "idle_percent": round(100 * idle["cpu"], 2),
        "heartbeat_us": round(1e6 * idle["cpu"] / count, 1),
        "load_percent": round(100 * load["cpu"], 2),
        "publishes_per_s": round(load["publishes"], 1),
        "publish_us": round(1e6 * busy / load["publishes"] / (count + _REPLICAS), 1),
        "rss_mib": round(loaded["rss"] / (1 << 20), 1),
        "kib_per_instance": round((loaded["rss"] - empty) / count / (1 << 10), 1),
        "descriptors": loaded["descriptors"],
        "slow_subscribers": loaded["slow_subscribers"],
        "restart_s": everybody["known"],
        "restart_cpu_s": everybody["cpu"],
        "followed_s": everybody["followed"],
        "restart_alone_s": alone["known"],
        "restart_alone_cpu_s": alone["cpu"],
    }


def serve_listeners(pipe: Pipe, endpoint: str, count: int) -> None:
    """Subscribers that read and drop. ("heard",) is answered with (messages of all, subscribers that heard any)."""
    context = new_context()
    heard: dict[Any, int] = {}
    poller = zmq.Poller()
    poller.register(pipe.fileno(), zmq.POLLIN)
    for _ in range(count):
        socket = open_socket(context, zmq.SUB, endpoint)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        heard[socket] = 0
    with suppress(EOFError, ConnectionError):
        while True:
            for readable, _ in poller.poll():
                if readable in heard:
                    while receive_now(readable):
                        heard[readable] += 1
                else:
                    pipe.recv()
                    pipe.send((sum(heard.values()), sum(map(bool, heard.values()))))
    for socket in heard:
        socket.close()
    context.term()


def _watch(directory: Remote, seconds: float) -> dict[str, float]:
    """{cpu: seconds of CPU time a second, publishes: a second}. Takes `seconds`, or as much longer as it is until
    anything is published: a heartbeat, at the latest."""
    before, started = directory.ask("stats"), time.monotonic()
    time.sleep(seconds)
    poll_until(lambda: directory.ask("stats")["publishes"] > before["publishes"])
    after, spent = directory.ask("stats"), time.monotonic() - started
    return {
        "cpu": (after["cpu_s"] - before["cpu_s"]) / spent,
        "publishes": (after["publishes"] - before["publishes"]) / spent,
    }


def _restart(
    directory: Remote, start: Callable[[], Remote], replicas: list[Remote], count: int
) -> tuple[Remote, dict[str, float]]:
    """Kill a directory and start one in its place. Seconds until it knows all that there is, until the replicas have
    heard it from there, and of its CPU time until then."""
    directory.kill()
    started = time.monotonic()
    again = start()
    again.hear()
    _until_known(again, count)
    known = time.monotonic() - started

    def followed() -> bool:
        state = (count * _ENTRIES, again.ask("stats")["seq"])
        return all(remote.ask("state")[:2] == state for remote in replicas)

    poll_until(followed)
    figures = {"known": known, "followed": time.monotonic() - started, "cpu": again.ask("stats")["cpu_s"]}
    return again, {name: round(seconds, 2) for name, seconds in figures.items()}


def _until_known(directory: Remote, count: int) -> None:
    def known() -> bool:
        stats = directory.ask("stats")
        return bool(stats["nodes"] == count and stats["entries"] == count * _ENTRIES)

    poll_until(known)
