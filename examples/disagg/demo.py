"""`make demo`: three hosts' worth of real vLLM on this machine share what their encoders compute.

Sends chat requests with images through the proxy, compares every answer with that of a plain vLLM, and tells from the
metrics of the running processes where each embedding came from. Exits 0 only when all of it is as it should be.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_model
from accounts import Account, Reading, check_transport, settle
from chat import Answer, ask, chat_body, data_uri, picture, served
from fleet import DemoFleet, Fleet, start_demo_fleet
from processes import Failed, Run, interruptible, log_folder
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


def check_same(step: Step, answer: Answer, reference: Answer) -> None:
    if answer.text != reference.text:
        raise Failed(f"{step.title}: the fleet answers {answer.text!r}, a plain vLLM {reference.text!r}")
    if answer.tokens != reference.tokens:
        raise Failed(f"{step.title}: same tokens, other logprobs: {answer.tokens} against {reference.tokens}")


_ROW = "{:43}  {:22}  {:50}  {:>6}  {:>11}"


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


def demonstrate(logs: Path) -> str:
    """Run the whole demo; returns the last line to print. Raises Failed with the reason when something deviates."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    with Run(logs) as run, served({"c.png": picture(3, 500, 400)}) as web:
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
    interruptible()
    try:
        with log_folder("ec-p2p-demo-") as logs:
            last_line = demonstrate(logs)
    except Failed as failure:
        print(f"DEMO FAILED: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    print(last_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
