"""How vLLM finds the connector."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from ec_p2p.connector import ECP2PConnector, plugin


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(ECConnectorFactory, "_registry", dict(ECConnectorFactory._registry))
    ECConnectorFactory._registry.pop(plugin.NAME, None)
    return ECConnectorFactory._registry


def test_registering_twice_is_no_error(registry):
    plugin.register()
    plugin.register()
    assert registry[plugin.NAME]() is ECP2PConnector


def test_by_name(registry):
    plugin.register()
    config = SimpleNamespace(ec_connector="ECP2PConnector", ec_connector_module_path=None)
    assert ECConnectorFactory.get_connector_class(config) is ECP2PConnector


@pytest.mark.parametrize("path", ["ec_p2p.connector", "ec_p2p.connector.connector"])
def test_by_module_path(registry, path):
    config = SimpleNamespace(ec_connector="ECP2PConnector", ec_connector_module_path=path)
    assert ECConnectorFactory.get_connector_class(config) is ECP2PConnector


def test_the_entry_point_is_installed():
    [point] = [p for p in entry_points(group="vllm.general_plugins") if p.name == "ec_p2p"]
    assert point.load() is plugin.register


def test_the_plugin_imports_nothing_heavy():
    heavy = "{'torch', 'vllm', 'nixl', 'nixl_cu12', 'zmq'}"
    code = f"import sys, ec_p2p.connector.plugin; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_the_connector_class_loads_no_nixl_and_starts_nothing():
    code = (
        "import sys, threading, ec_p2p.connector as c; c.ECP2PConnector; "
        "print(sorted(m for m in sys.modules if 'nixl' in m.partition('.')[0]), "
        "[t.name for t in threading.enumerate() if 'ec-p2p' in t.name])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] []"


def test_an_unknown_name_is_an_attribute_error():
    import ec_p2p.connector

    with pytest.raises(AttributeError, match="Nope"):
        ec_p2p.connector.Nope  # noqa: B018
