"""What users install: built from the tree, without a network, and used from where it was installed to."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str | Path], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files, so that nothing of the working tree can slip in or be left in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", out, source])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target]
    run([*pip, wheel])
    return target


def test_only_the_package_reaches_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"ec_p2p", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}
    assert "ec_p2p/py.typed" in names
    assert {"ec_p2p/control/messages.py", "ec_p2p/transport/interface.py"} <= set(names)


def test_every_module_of_the_tree_is_in_the_wheel(wheel: Path) -> None:
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    tree = {
        f"ec_p2p/{path.relative_to(ROOT)}" for room in ("control", "transport") for path in (ROOT / room).rglob("*.py")
    }
    tree |= {str(path.relative_to(ROOT)) for path in (ROOT / "ec_p2p").rglob("*.py")}
    assert packaged == tree


def test_the_installed_package_names_its_entry_points(installed: Path) -> None:
    (entry_points,) = installed.glob("ec_p2p-*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "ec-p2p = ec_p2p.cli:main" in text
    assert "[vllm.general_plugins]\nec_p2p = ec_p2p.connector.plugin:register" in text


def test_the_installed_package_is_the_one_that_is_imported(installed: Path, tmp_path: Path) -> None:
    program = """
import ec_p2p, ec_p2p.control.messages, ec_p2p.transport.interface, ec_p2p.node.client
for module in (ec_p2p, ec_p2p.control.messages, ec_p2p.transport.interface, ec_p2p.node.client):
    print(module.__file__)
from ec_p2p import CacheEngineKey, ECCacheEngine, MemoryFormat, StorageManager, stable_u64
"""
    path = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"}
    files = run([sys.executable, "-c", program], cwd=tmp_path, env=path).splitlines()
    assert len(files) == 4
    assert all(Path(file).is_relative_to(installed) for file in files)
