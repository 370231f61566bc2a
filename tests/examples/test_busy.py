"""The measurement of a busy node beside an engine, without the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import busy
import pytest
from fleet import Fleet
from processes import Run, until

from ec_p2p.node.client import NodeClient
from ec_p2p.transport import nixl_available


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
def test_the_load_keeps_the_node_busy_until_it_is_stopped(tmp_path: Path) -> None:
    with Run(tmp_path / "logs") as run:
        fleet = Fleet(run, tmp_path / "model")
        far, near = fleet.host("far"), fleet.host("near")
        nodes = [busy.start_node(fleet, host, arena) for host, arena in ((far, 1024), (near, 256))]
        try:
            busy.fill(busy._config(far.node_name, fleet.ec_port), 1 << 20)
            # Where an engine was there before the load, as in the measurement, its node was, too.
            with NodeClient(busy._config(near.node_name, fleet.ec_port), "tool", "tests") as client:
                assert client.attach(timeout_s=60)
            load = busy.start_load(fleet, near, argparse.Namespace(fetches_per_s=200.0))
            # More than are different: what was fetched before is fetched again.
            until(lambda: busy.fetched(near) > busy._ENTRIES, "every entry to be fetched", timeout_s=300)
            assert busy.cpu_s(near) > 0
            load.stop()
            assert set(near.metrics().by("outcome", "ec_p2p_node_fetches_total")) == {"landed"}
        finally:
            for node in nodes:
                node.stop()
