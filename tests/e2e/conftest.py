"""Fleets for the end-to-end tests.

`fleet` and `plain` live as long as the tests of this folder, and no longer, to leave the machine to the others: use
images of your own (`fresh_image`), and compare metrics before and after. A test that kills or configures servers takes
`own`, an empty fleet that ends with the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat import data_uri, picture
from fleet import DemoFleet, Fleet, Server, start_demo_fleet
from processes import Run

from tests.e2e.rig import FORKED_SERVER, PATIENCE_S, build_model

_HERE = Path(__file__).parent
UNHURRIED = dict.fromkeys(("fetch_timeout_s", "read_timeout_s", "expect_s", "node_timeout_s"), PATIENCE_S / 2)
"""What comes late on a busy machine is waited for, and nobody who lives is doubted."""
_seeds = itertools.count(1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def lasting_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with Run(tmp_path_factory.mktemp("fleet")) as run:
        yield run


@pytest.fixture(scope="package")
def model(lasting_run: Run) -> Path:
    """The tiny Idefics3: 128 wide, 64 rows a tile."""
    return build_model(lasting_run.tmp / "model")


@pytest.fixture(scope="package")
def lasting_fleet(lasting_run: Run, model: Path) -> Fleet:
    """Starts further pieces that live as long as it."""
    return Fleet(lasting_run, model, FORKED_SERVER, caches=lasting_run.tmp / "vllm", settings=UNHURRIED)


@pytest.fixture(scope="package")
def plain(lasting_fleet: Fleet) -> Server:
    """A vLLM without a connector, to compare with."""
    server = lasting_fleet.server("plain")
    lasting_fleet.wait_ready([server])
    return server


@pytest.fixture(scope="package")
def fleet(lasting_fleet: Fleet, plain: Server) -> DemoFleet:
    """The demo's fleet. After `plain`, which fills the caches that make its servers start faster."""
    return start_demo_fleet(lasting_fleet)


@pytest.fixture
def own(tmp_path: Path, model: Path, lasting_fleet: Fleet, plain: Server) -> Iterator[Fleet]:
    """A fleet of the test's own, still empty."""
    with Run(tmp_path / "fleet") as run:
        yield Fleet(run, model, FORKED_SERVER, caches=lasting_fleet.caches, settings=UNHURRIED)


@pytest.fixture
def fresh_image() -> Callable[..., str]:
    """Makes data URIs of images that no test has used before: `fresh_image(width=400, height=300)`."""
    return lambda width=400, height=300: data_uri(picture(next(_seeds), width, height))
