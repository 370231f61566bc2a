"""Settings, put into one layer or several by their plain names."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from ec_p2p.config_sources import Loaded, explain_ec_engine_config

LAYERS = ("base", "prefixed", "nested", "environment", "lmcache", "plain")
INHERITED = ("max_local_cpu_size", "local_disk", "max_local_disk_size", "cache_policy")


def as_text(value: object) -> str:
    """As one writes it into an environment variable."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return ",".join(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def explain(path: Path, **layers: dict[str, object]) -> Loaded:
    """From settings with plain names, put into the layers that are named."""
    given = {layer: layers.get(layer, {}) for layer in LAYERS}
    # In the file the stronger one stands first: it is not the order that decides.
    content: dict[str, object] = {"ec": given["nested"], **{f"ec_{k}": v for k, v in given["prefixed"].items()}}
    path.write_text(yaml.safe_dump({**content, **given["base"]}, sort_keys=False))
    environ = {f"LMCACHE_EC_{name.upper()}": as_text(value) for name, value in given["environment"].items()}
    own = {**given["plain"], **{f"lmcache.ec_{name}": value for name, value in given["lmcache"].items()}}
    return explain_ec_engine_config(own, environ={**environ, "LMCACHE_CONFIG_FILE": str(path)})


def source_in(layer: str, name: str, path: object) -> str:
    return {
        "base": f"{path}: {name}",
        "prefixed": f"{path}: ec_{name}",
        "nested": f"{path}: ec.{name}",
        "environment": f"environment: LMCACHE_EC_{name.upper()}",
        "lmcache": f"ec_connector_extra_config: lmcache.ec_{name}",
        "plain": f"ec_connector_extra_config: {name}",
    }[layer]
