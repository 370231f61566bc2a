"""Configuration files that are none, and what reading one costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import ec_p2p
from ec_p2p.config import ConfigError
from ec_p2p.config_sources import load_ec_engine_config


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- ec_local_disk: /a\n", "holds a list; accepted: a YAML file with 'name: value'"),
        ("just words", "holds a str; accepted"),
        ("7", "holds a int; accepted"),
        ("a: [1, 2", "is not YAML: .*accepted"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML: .*accepted"),
        ("a: 2024-13-45", "is not YAML: .*accepted"),
        ("\tb: 1", "is not YAML: .*accepted"),
        ("a: 1\n\x00", "is not YAML: .*accepted"),
        ("[" * 3000, "is not YAML: .*accepted"),
    ],
)
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(file, content, complaint):
    path = file(content)
    with pytest.raises(ConfigError, match=rf"(?s)^LMCACHE_CONFIG_FILE='{re.escape(path)}' {complaint}") as caught:
        load_ec_engine_config(environ={"LMCACHE_CONFIG_FILE": path})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [5, "all", [1], True])
def test_the_nested_map_must_be_one(file, value):
    path = file({"ec": value})
    with pytest.raises(ConfigError, match=rf"ec={re.escape(repr(value))}; accepted: a map of settings \(from {path}\)"):
        load_ec_engine_config(config_file=path, environ={})


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"^LMCACHE_CONFIG_FILE='/is/not/there' cannot be read: No such file"):
        load_ec_engine_config(environ={"LMCACHE_CONFIG_FILE": "/is/not/there"})
    with pytest.raises(ConfigError, match=rf"^config_file='{tmp_path}' cannot be read: Is a directory"):
        load_ec_engine_config(config_file=tmp_path, environ={})
    (tmp_path / "latin").write_bytes(b"ec_node_name: \xe9\xff")
    with pytest.raises(ConfigError, match=r"latin' is not YAML: .*utf-8"):
        load_ec_engine_config(config_file=tmp_path / "latin", environ={})


def test_the_loader_is_light_and_reads_yaml_only_with_a_file(file):
    assert ec_p2p.load_ec_engine_config is load_ec_engine_config
    path = file({"ec_transport": "zmq"})
    program = (
        "import sys, ec_p2p; ec_p2p.load_ec_engine_config(); before = 'yaml' in sys.modules;"
        f"ec_p2p.load_ec_engine_config(config_file={path!r});"
        "print(before, *({'yaml', 'torch', 'zmq', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split() == ["False", "yaml"]
