"""The arrows between the rooms, read from the imports; and what the torch-free ones really load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    **{name: ROOT / "ec_p2p" / name for name in ("wire", "engine", "node", "connector", "router", "cli")},
    "control": ROOT / "control",
    "transport": ROOT / "transport",
}
MAY_IMPORT = {
    "wire": set(),
    "control": {"wire"},
    "transport": {"wire"},
    "engine": set(),
    "node": {"engine", "control", "transport", "wire"},
    "connector": {"node", "engine", "control", "transport"},
    "router": {"node", "engine", "control", "transport", "wire"},
    "cli": {"node", "engine", "control", "transport", "wire"},
}
KNOW_NO_SETTINGS = {"wire", "control", "transport"}
"""They are told what they need; so they import none of the modules beside the rooms."""


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every imported name below a folder, with its file: those inside functions and `if TYPE_CHECKING` too."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: between modules import absolutely"
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("room", FOLDERS)
def test_arrows_go_one_way(room: str) -> None:
    for path, name in imports(FOLDERS[room]):
        package, _, rest = name.partition(".")
        assert package not in ("control", "transport"), f"{path} imports {name}: it is installed as ec_p2p.{name}"
        other = rest.partition(".")[0]
        if package == "ec_p2p" and other in FOLDERS and other != room:
            assert other in MAY_IMPORT[room], f"{path}: {room} must not know {name}"
        elif package == "ec_p2p" and (ROOT / "ec_p2p" / f"{other}.py").exists():
            assert room not in KNOW_NO_SETTINGS, f"{path}: {room} must not know {name}"


def test_only_the_connector_imports_vllm() -> None:
    found = {path for room in FOLDERS.values() for path, name in imports(room) if name.partition(".")[0] == "vllm"}
    assert found
    assert all(path.is_relative_to(FOLDERS["connector"]) for path in found), found


def test_only_the_transport_knows_the_packages_of_nixl() -> None:
    """By an import statement, or by name: which one is imported depends on what is installed."""
    package = re.compile(r"nixl_cu\d+.*|nixl\..+")
    found = {path for room in FOLDERS.values() for path, name in imports(room) if package.fullmatch(name)}
    for path in (path for room in FOLDERS.values() for path in room.rglob("*.py")):
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        if any(isinstance(text, str) and package.fullmatch(text) for text in texts):
            found.add(path)
    assert found
    assert all(path.is_relative_to(FOLDERS["transport"]) for path in found), found


@pytest.mark.parametrize(
    "module",
    [
        "ec_p2p",
        "ec_p2p.node.service",
        "ec_p2p.node.client",
        "ec_p2p.config",
        "ec_p2p.control.directory",
        "ec_p2p.transport.nixl",
        "ec_p2p.connector.plugin",
        "ec_p2p.cli",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    program = (
        f"import sys, {module}; print(*sorted({{'torch', 'vllm', 'nixl', 'nixl_cu12', 'numpy'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
