"""`make demo`: three hosts' worth of real vLLM on this machine share what their encoders compute.

Sends chat requests with images through the proxy, compares every answer with that of a plain vLLM, and tells from the
metrics of the running processes where each embedding came from. Exits 0 only when all of it is as it should be.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_model
from chat import Answer, ask, chat_body, data_uri, picture, served
from fleet import DemoFleet, Fleet, start_demo_fleet
from metrics import Metrics
from processes import Failed, Run, until
from proxy import ENCODE_HEADER, TARGET_HEADER

CONSUMER_1, CONSUMER_2, BOTH = range(3)
_PD_NAMES = ("host2, first consumer", "host2, second consumer", "host3, does both")


@dataclass(frozen=True)
class Step:
    """One request, and where its embeddings must come from."""

    title: str
    body: dict[str, Any]
    target: int
    hop: bool
    """Through an encoder first, which also gives the request its hint; else the target is on its own."""
    encoded: tuple[str, ...] = ()
    """The host on which each new image is encoded."""
    fetched: int = 0
    at_hand: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {TARGET_HEADER: str(self.target), ENCODE_HEADER: "always" if self.hop else "skip"}


def steps(web: str) -> list[Step]:
    a, b, d = (data_uri(picture(seed, *size)) for seed, size in ((1, (400, 300)), (2, (640, 240)), (4, (300, 500))))
    c = web + "c.png"

    def body(text: str, *images: str) -> dict[str, Any]:
        # A salt of its own keeps each request out of vLLM's prefix cache, which would answer instead of us.
        return chat_body(text, images, cache_salt=text)

    return [
        Step("a new image", body("What is this?", a), CONSUMER_1, True, encoded=("host1",), fetched=1),
        Step("the same image on another host, no hint", body("And this?", a), BOTH, False, fetched=1),
        Step(
            "two new images, the second by URL",
            body("Compare these.", b, c),
            CONSUMER_1,
            True,
            encoded=("host1", "host1"),
            fetched=2,
        ),
        Step("an image of the neighbour on the same host", body("Which one?", b), CONSUMER_2, False, at_hand=1),
        Step("a new image, encoded where it is asked for", body("Describe it.", d), BOTH, False, encoded=("host3",)),
        Step("that image on another host, no hint", body("Once more.", d), CONSUMER_2, False, fetched=1),
        Step("text only", body("Hello."), CONSUMER_1, True),
    ]


@dataclass(frozen=True)
class Reading:
    """The metrics of every process of the fleet, or what changed in them."""

    servers: dict[str, Metrics]
    nodes: dict[str, Metrics]

    @classmethod
    def of(cls, fleet: DemoFleet) -> Reading:
        return cls({s.name: s.metrics() for s in fleet.servers}, {h.label: h.metrics() for h in fleet.hosts})

    def __sub__(self, before: Reading) -> Reading:
        return Reading(
            {name: after - before.servers[name] for name, after in self.servers.items()},
            {name: after - before.nodes[name] for name, after in self.nodes.items()},
        )


@dataclass(frozen=True)
class Account:
    """Where embeddings came from: what the vLLM servers counted, and what their nodes counted."""

    answered: int
    encoded: tuple[str, ...]
    """The host, for each; a consumer goes by its own name."""
    fetched: int
    fetched_bytes: int
    at_hand: int
    sources: tuple[str, ...]
    """The host that each node-to-node fetch read from."""
    moved_bytes: int

    @classmethod
    def of(cls, change: Reading, fleet: DemoFleet) -> Account:
        labels = {host.node_name: host.label for host in fleet.hosts}
        encoded: list[str] = []
        sources: list[str] = []
        for server in fleet.servers:
            encoder = server.host.label if server.host and server.role != "ec_consumer" else server.name
            encoded += [encoder] * change.servers[server.name].total("vllm:ec_p2p_local_encodes_total")
        for node in change.nodes.values():
            for peer, count in node.by("peer", "ec_p2p_node_fetches_total", outcome="landed").items():
                sources += [labels.get(peer, peer)] * count

        def answering(name: str, **labels: str) -> int:
            return sum(change.servers[server.name].total(name, **labels) for server in fleet.pds)

        return cls(
            answered=answering("vllm:request_success_total"),
            encoded=tuple(encoded),
            fetched=answering("vllm:ec_p2p_fetches_total", outcome="landed", source="remote"),
            fetched_bytes=answering("vllm:ec_p2p_fetched_bytes_total", source="remote"),
            at_hand=answering("vllm:ec_p2p_fetches_total", outcome="landed", source="local"),
            sources=tuple(sources),
            moved_bytes=sum(node.total("ec_p2p_node_fetched_bytes_total") for node in change.nodes.values()),
        )

    def fits(self, answered: int, encoded: tuple[str, ...], fetched: int, at_hand: int) -> bool:
        """True when the servers and the nodes agree with each other and with what is expected."""
        return (
            (self.answered, self.encoded, self.fetched, self.at_hand) == (answered, encoded, fetched, at_hand)
            and len(self.sources) == fetched
            and self.fetched_bytes == self.moved_bytes
            and (self.moved_bytes > 0) == (fetched > 0)
        )

    def __str__(self) -> str:
        origins = [f"encoded on {host}" for host in self.encoded]
        origins += [f"over NIXL from {host}" for host in self.sources]
        origins += ["already on this host"] * self.at_hand
        return ", ".join(f"{origins.count(origin)} {origin}" for origin in dict.fromkeys(origins)) or "no image"


def settle(fleet: DemoFleet, before: Reading, what: str, **expected: Any) -> tuple[Account, Reading]:
    """Read the metrics until they say what is expected. Raises Failed with what they say instead."""
    latest: Account | None = None

    def reading() -> Reading | None:
        nonlocal latest
        now = Reading.of(fleet)
        latest = Account.of(now - before, fleet)
        return now if latest.fits(**expected) else None

    try:
        after = until(reading, what, timeout_s=10.0)
    except Failed:
        wanted = ", ".join(f"{name} {value}" for name, value in expected.items())
        raise Failed(f"{what}: the metrics should say {wanted}; they say {latest!r}") from None
    assert latest is not None
    return latest, after


def check_transport(fleet: DemoFleet) -> None:
    for host in fleet.hosts:
        transports = host.metrics().by("transport", "ec_p2p_node_info")
        if list(transports) != ["nixl"]:
            raise Failed(
                f"the node of {host.label} moves bytes over {', '.join(transports) or 'nothing'}, not over nixl"
            )


def check_same(step: Step, answer: Answer, reference: Answer) -> None:
    if answer.text != reference.text:
        raise Failed(f"{step.title}: the fleet answers {answer.text!r}, a plain vLLM {reference.text!r}")
    if answer.tokens != reference.tokens:
        raise Failed(f"{step.title}: same tokens, other logprobs: {answer.tokens} against {reference.tokens}")


_ROW = "{:44}  {:23}  {:42}  {:>9}  {:>8}"


def run_steps(fleet: DemoFleet, plan: list[Step], references: list[Answer]) -> Account:
    """Send the requests one after the other, print the table, and return the account of all of them."""
    print(_ROW.format("request", "answered on", "its embeddings", "bytes", "first token"))
    start = before = Reading.of(fleet)
    for step, reference in zip(plan, references, strict=True):
        answer = ask(fleet.proxy.url, step.body, step.headers)
        account, before = settle(
            fleet,
            before,
            step.title,
            answered=1,
            encoded=step.encoded,
            fetched=step.fetched,
            at_hand=step.at_hand,
        )
        check_same(step, answer, reference)
        first_token = f"{answer.first_token_s * 1000:.0f} ms"
        print(
            _ROW.format(step.title, _PD_NAMES[step.target], str(account), account.moved_bytes, first_token), flush=True
        )
    total, _ = settle(
        fleet,
        start,
        "all requests together",
        answered=len(plan),
        encoded=tuple(sorted(host for step in plan for host in step.encoded)),
        fetched=sum(step.fetched for step in plan),
        at_hand=sum(step.at_hand for step in plan),
    )
    return total


def warm_up(fleet: DemoFleet) -> None:
    """The first request of a fresh server takes seconds. These go to every instance and are not counted."""
    for number in range(len(fleet.pds)):
        image = data_uri(picture(100 + number))
        ask(fleet.proxy.url, chat_body(f"warm-up {number}", [image]), {TARGET_HEADER: str(number)})
    ask(fleet.both.url, chat_body("warm-up", [data_uri(picture(200))]))


def demonstrate(folder: Path) -> str:
    """Run the whole demo; returns the last line to print. Raises Failed with the reason when something deviates."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    with Run(folder) as run, served({"c.png": picture(3, 500, 400)}) as web:
        plan = steps(web)
        say("building a tiny random Idefics3")
        tiny_model.build(run.tmp / "model")
        fleet_of = Fleet(run, run.tmp / "model")
        say("a plain vLLM answers first, for comparison")
        plain = fleet_of.server("plain")
        fleet_of.wait_ready([plain])
        references = [ask(plain.url, step.body) for step in plan]
        plain.process.stop()
        say("starting the fleet: host1 an encoder, host2 two consumers, host3 does both, a proxy")
        fleet = start_demo_fleet(fleet_of)
        say("warming up")
        warm_up(fleet)
        check_transport(fleet)
        print()
        total = run_steps(fleet, plan, references)
        consumers = [server for server in fleet.servers if server.role == "ec_consumer"]
        encodes = sum(server.metrics().total("vllm:ec_p2p_local_encodes_total") for server in consumers)
        if encodes:
            raise Failed(f"the consumers encoded {encodes} images themselves, the warm-up included")
        print()
        say("stopping everything")
    return (
        f"DEMO OK: {total.answered} requests, {len(total.sources)} embeddings fetched over NIXL "
        f"({total.moved_bytes} bytes), {encodes} encoded on consumers, tokens identical to a plain vLLM"
    )


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="ec-p2p-demo-"))
    keep_logs = True
    try:
        last_line = demonstrate(folder)
        keep_logs = False
    except Failed as failure:
        print(f"\nDEMO FAILED: {failure}\n(logs: {folder})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        keep_logs = False
        print("\ninterrupted; everything is stopped", file=sys.stderr)
        return 130
    finally:
        if not keep_logs:
            shutil.rmtree(folder)
    print(last_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
