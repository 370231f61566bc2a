"""Where embeddings came from, by the account of the running processes: nothing here believes what a script has sent.

The vLLM servers and the nodes count independently of each other; an account is good only when both sides agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet import DemoFleet
from metrics import Metrics
from processes import Failed, TooLate, until

_PATIENCE_S = 10.0


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
        hosts = {host.node_name: host.label for host in fleet.hosts}
        encoded: list[str] = []
        sources: list[str] = []
        for server in fleet.servers:
            encoder = server.host.label if server.host and server.role != "ec_consumer" else server.name
            encoded += [encoder] * change.servers[server.name].total("vllm:ec_p2p_local_encodes_total")
        for node in change.nodes.values():
            for peer, count in node.by("peer", "ec_p2p_node_fetches_total", outcome="landed").items():
                sources += [hosts.get(peer, peer)] * count

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
        origins += [f"fetched over NIXL from {host}" for host in self.sources]
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
        after = until(reading, what, timeout_s=_PATIENCE_S)
    except TooLate:
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
