"""`ec-p2p doctor`: what this machine has, what is wrong with it, and how to mend that."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ec_p2p.cli.doctor.finding import Finding, Level
from ec_p2p.cli.settings import ORIGIN, add_arguments, settings_of
from ec_p2p.config import Config
from ec_p2p.config_sources import explain_ec_engine_config
from ec_p2p.transport import chosen_kind


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="look at this machine and say what is wrong")
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 when there is a problem."""
    logging.basicConfig(level=logging.ERROR, format="ec-p2p doctor: %(message)s", stream=sys.stderr)
    config = explain_ec_engine_config(settings_of(args), origin=ORIGIN).config
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not args.json:
            print(as_text(finding), flush=True)
    bad = any(finding.level is Level.PROBLEM for finding in findings)
    if args.json:
        print(as_json(findings))
    else:
        print(verdict(findings))
    return int(bad)


def examine(config: Config) -> Iterator[Finding]:
    """Every check, with these settings, one after the other."""
    from ec_p2p.cli.doctor import directories, host_node, loopback, machine, network, ports, software, ucx

    rdma = network.rdma()
    host = host_node.look(config)
    bound = ports.bind(config, host)
    yield software.versions()
    yield software.vllm()
    attempt = loopback.attempt(config)
    of_nixl, of_ucx = software.nixl(config), ucx.settings(config, attempt)
    yield from (of_nixl, of_ucx)
    yield network.rdma_devices(config, rdma)
    yield software.gpus()
    yield machine.memory(config, host.arena_held)
    yield machine.memfd()
    yield machine.shared_memory()
    yield machine.locked_memory(config, rdma=bool(rdma) and chosen_kind(config.transport) == "nixl")
    yield machine.open_files()
    yield machine.disk(config)
    yield machine.clock()
    yield software.curve(config)
    yield network.addresses(config)
    yield ports.peer_port(config, host, bound)
    yield ports.metrics_port(config, host, bound)
    yield from directories.directories(config, bound)
    yield host_node.node(config, host)
    yield loopback.read(config, attempt, [of_nixl, of_ucx])


def as_text(finding: Finding) -> str:
    text = f"{finding.level.value:>8}  {finding.thing}: {finding.says}"
    return f"{text}\n{'':>8}  -> {finding.mend}" if finding.mend else text


def as_json(findings: Sequence[Finding]) -> str:
    rows = [{"thing": f.thing, "level": f.level.value, "says": f.says, "mend": f.mend} for f in findings]
    return json.dumps({"findings": rows}, indent=2)


def verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    return f"{counts[Level.PROBLEM]} problems, {counts[Level.NOTE]} notes, {counts[Level.OK]} things in order"
