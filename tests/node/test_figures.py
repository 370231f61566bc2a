"""The names of a node's figures: one list in the code, explained one by one in the documents, and shown by a node."""

from __future__ import annotations

import re
from pathlib import Path

from ec_p2p.node import figures
from ec_p2p.node.figures import DISK_COUNTS, GAUGES, LABELLED_COUNTS, PLAIN_COUNTS
from tests.control.test_exposition import get
from tests.node.conftest import Fleet, until

ROOT = Path(__file__).parents[2]


def explained(text: str, kind: str) -> set[str]:
    """The names in the first column of the tables of that kind."""
    tables = re.findall(rf"^\| {kind} `ec_p2p_node_\.\.\.` \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert tables
    return {
        name for table in tables for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def test_the_documents_explain_each_of_them() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    counts = {f"{name}_total" for name in (*PLAIN_COUNTS, *LABELLED_COUNTS, *DISK_COUNTS)}
    assert explained(text, "counter") == counts
    assert explained(text, "gauge") == set(GAUGES)


def test_what_the_code_counts_has_a_meaning() -> None:
    counted = re.compile(r"(?:counters|tally)\.add\(\s*\"(\w+)\"")
    sources = [*(ROOT / "ec_p2p" / "node").glob("*.py"), *(ROOT / "ec_p2p" / "engine").glob("*.py")]
    names = {name for source in sources for name in counted.findall(source.read_text())}
    assert {"wants", "errors", "disk_writes"} <= names <= set(figures.HELP)


def test_a_node_shows_them_with_their_meanings_and_the_plain_ones_from_the_start(
    zmq_fleet: Fleet, tmp_path: Path
) -> None:
    client = zmq_fleet.client(zmq_fleet.node("a", local_disk=str(tmp_path)))
    port = int(client.inspect().node["metrics_port"])

    def page() -> str:
        return get(port, "/metrics")[2]

    first = page()
    for name in PLAIN_COUNTS:
        assert f"\nec_p2p_node_{name}_total 0.0\n" in first
    client.store(b"1" * 32, b"x" * 12_800)
    client.release(*client.want(b"1" * 32, b"2" * 32))
    until(lambda: "\nec_p2p_node_disk_writes_total 1.0\n" in page(), "the entry to be written to the disk")
    shown = dict(re.findall(r"^# HELP ec_p2p_node_(\w+) ec-p2p node: (.*)$", page(), re.MULTILINE))
    assert {name.removesuffix("_total"): text for name, text in shown.items()}.items() <= figures.HELP.items()
    assert {"saves_total", "wants_total", "disk_writes_total", "disk_bytes", "info"} <= set(shown)
