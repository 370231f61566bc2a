"""`ec-p2p config` and the settings of `ec-p2p node`, run as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ec_p2p.cli import build_parser
from ec_p2p.cli.node import read_settings
from ec_p2p.config import KINDS, Config, make_config
from ec_p2p.node.spawn import node_command
from tests.cli.commands import run


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "lmcache.yaml"
    path.write_text("max_local_cpu_size: 5\nec_local_disk: /mnt/ec\nec: {disk_fsync: true}\n")
    return str(path)


def test_every_setting_is_printed_with_its_value_and_its_source(file):
    done = run("config", "--set", "slab_size=64MiB", LMCACHE_CONFIG_FILE=file, LMCACHE_EC_EXPECT_S="3")
    assert (done.returncode, done.stderr) == (0, "")
    first, empty, *rows = done.stdout.splitlines()
    assert (first, empty) == (f"configuration file: {file}", "")
    assert [row.split()[0] for row in rows] == list(KINDS)
    printed = {row.split()[0]: row.split(maxsplit=2)[1:] for row in rows}
    assert printed["max_local_cpu_size"] == ["5GiB", f"{file}: max_local_cpu_size"]
    assert printed["local_disk"] == ["/mnt/ec", f"{file}: ec_local_disk"]
    assert printed["disk_fsync"] == ["true", f"{file}: ec.disk_fsync"]
    assert printed["expect_s"] == ["3.0", "environment: LMCACHE_EC_EXPECT_S"]
    assert printed["slab_size"] == ["64MiB", "command line: slab_size"]
    assert printed["directory"] == printed["nixl_params"] == ["-", "default"]
    assert len({row.index(printed[row.split()[0]][1]) for row in rows}) == 1, "the sources stand below each other"


def test_directories_may_be_named_as_for_other_commands():
    done = run("config", "--directory", "tcp://a:1", "--directory", "tcp://b:2")
    [row] = [row for row in done.stdout.splitlines() if row.startswith("directory ")]
    assert row.split(maxsplit=2) == ["directory", "tcp://a:1,tcp://b:2", "command line: directory"]


def test_as_json_for_programs(file):
    done = run("config", "--json", "--settings", '{"directory": ["tcp://a:1"]}', LMCACHE_CONFIG_FILE=file)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert printed["config_file"] == file
    assert [row["name"] for row in printed["settings"]] == list(KINDS)
    rows = {row["name"]: (row["value"], row["source"]) for row in printed["settings"]}
    assert rows["max_local_cpu_size"] == (5 << 30, f"{file}: max_local_cpu_size")
    assert rows["directory"] == (["tcp://a:1"], "command line: directory")
    assert rows["local_cpu"] == (True, "default")
    assert rows["nixl_params"] == ({}, "default")
    assert json.loads(run("config", "--json").stdout)["config_file"] is None


def test_no_password_of_a_directory_is_printed():
    endpoint = "valkey://me:hunter2@host:6379/fleet"
    for form in ([], ["--json"]):
        done = run("config", *form, "--set", f"directory={endpoint}")
        assert (done.returncode, done.stderr) == (0, "")
        assert "valkey://...@host:6379/fleet" in done.stdout
        assert "hunter2" not in done.stdout


def test_a_node_can_be_given_its_directories_as_options():
    words = ["node", "--exactly", "--directory", "tcp://a:1", "--directory", "valkey://b:2/x"]
    assert read_settings(build_parser().parse_args(words)).directories == ("tcp://a:1", "valkey://b:2/x")
    assert read_settings(build_parser().parse_args(["node", "--exactly"])).directory == ()


def test_what_is_left_out_is_said_on_stderr():
    done = run("config", "--json", LMCACHE_EC_SLABSIZE="1", LMCACHE_EC_CHUNK_SIZE="256")
    assert done.returncode == 0
    assert json.loads(done.stdout)["settings"]
    assert sorted(done.stderr.splitlines()) == [
        "ec-p2p config: environment: LMCACHE_EC_CHUNK_SIZE is LMCache's and has no meaning here",
        "ec-p2p config: environment: LMCACHE_EC_SLABSIZE is unknown and left out; the nearest known one is "
        "LMCACHE_EC_SLAB_SIZE",
    ]


@pytest.mark.parametrize("command", ["config", "node"])
@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--set", "transport=rdma"], {}, "accepted: auto, nixl, zmq (from command line: transport)"),
        (["--set", "chunk_size=1"], {}, "unknown setting 'chunk_size'"),
        (
            [],
            {"LMCACHE_EC_TRANSPORT": "rdma"},
            "transport='rdma'; accepted: auto, nixl, zmq (from environment: LMCACHE_EC",
        ),
        ([], {"LMCACHE_CONFIG_FILE": "/is/not/there"}, "LMCACHE_CONFIG_FILE='/is/not/there' cannot be read"),
    ],
)
def test_a_bad_setting_ends_in_one_line_and_status_2(command, arguments, environ, said):
    done = run(command, *arguments, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("ec-p2p: ")
    assert said in done.stderr


def settings_of_node(*arguments: str) -> Config:
    return read_settings(build_parser().parse_args(["node", *arguments]))


def test_a_node_reads_all_sources(monkeypatch, file):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", file)
    monkeypatch.setenv("LMCACHE_EC_EXPECT_S", "3")
    config = settings_of_node("--settings", '{"lmcache.ec_grace_s": 4}', "--set", "read_timeout_s=5", "--name", "n")
    assert (config.max_local_cpu_size, config.local_disk, config.disk_fsync) == (5 << 30, "/mnt/ec", True)
    assert (config.expect_s, config.grace_s, config.read_timeout_s, config.node_name) == (3.0, 4.0, 5.0, "n")


@pytest.mark.parametrize("flag", ["--spawned", "--exactly"])
def test_a_node_that_was_started_by_a_client_takes_only_what_it_was_given(monkeypatch, file, flag):
    """What its starter leaves out is at its default there, whatever the file and the environment say by now."""
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", file)
    monkeypatch.setenv("LMCACHE_EC_EXPECT_S", "soon")
    assert settings_of_node(flag, "--set", "grace_s=4") == make_config({"grace_s": 4})


def test_the_command_that_starts_a_node_gives_it_the_whole_configuration(monkeypatch, file):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", file)
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", "/not/this")
    config = make_config({"node_name": "n", "local_disk": "", "max_local_cpu_size": "1GiB", "grace_s": 4})
    command = node_command(config)
    assert settings_of_node(*command[command.index("node") + 1 :]) == config
