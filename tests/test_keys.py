"""The setting `security`: what is accepted, what is said of what is not, and that no secret is said with it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from ec_p2p.config import ConfigError, as_settings, make_config
from ec_p2p.config_kinds import KeyRing, shown
from ec_p2p.config_sources import load_ec_engine_config
from ec_p2p.keys import load_security, new_key_file, security_of
from ec_p2p.wire.curve import key_of, key_text, new_pair

PUBLIC, SECRET = map(key_text, new_pair())
OTHER, OTHERS_SECRET = map(key_text, new_pair())
DIRECTORY, _ = map(key_text, new_pair())
PAIR = {"public": PUBLIC, "secret": SECRET}


def loaded(security):
    return load_security(make_config({"security": security}))


def key_file(folder: Path, text: str) -> str:
    path = folder / "fleet.key"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_no_keys_unless_asked_for():
    assert load_security(make_config({})) is None
    assert loaded("") is None


def test_one_pair_allows_itself_and_is_the_directory():
    security = loaded(PAIR)
    public = key_of(PUBLIC)
    assert (security.public, security.secret) == (public, key_of(SECRET))
    assert (security.allow, security.directory) == ({public}, public)


@pytest.mark.parametrize("allow", [[OTHER], [OTHER, PUBLIC], (OTHER,), OTHER])
def test_a_pair_of_its_own_allows_itself_and_the_others(allow):
    security = loaded({**PAIR, "allow": allow, "directory": DIRECTORY})
    assert security.allow == {key_of(PUBLIC), key_of(OTHER)}
    assert security.directory == key_of(DIRECTORY)


def test_a_key_file_as_keygen_makes_it_and_as_it_is_filled_in(tmp_path, caplog):
    public, text = new_key_file()
    path = key_file(tmp_path, text)
    assert loaded(path).public == key_of(public)
    filled = text.replace('# allow: ["...", "..."]', f'allow: ["{OTHER}"]').replace("# directory", "directory")
    path = key_file(tmp_path, filled.replace('"..."', f'"{DIRECTORY}"'))
    assert loaded(path).allow == {key_of(public), key_of(OTHER)}
    assert loaded(path).directory == key_of(DIRECTORY)
    assert caplog.records == []


def test_a_key_file_that_everybody_can_read_is_said_to_be_one(tmp_path, caplog):
    path = key_file(tmp_path, json.dumps(PAIR))
    os.chmod(path, 0o644)
    assert loaded(path).public == key_of(PUBLIC)
    assert [path in record.getMessage() for record in caplog.records] == [True]


def test_from_every_source(tmp_path):
    path = key_file(tmp_path, json.dumps(PAIR))
    file = tmp_path / "lmcache.yaml"
    for content in (f"ec_security: {path}", f"ec: {{security: {path}}}", f"ec_security: {json.dumps(PAIR)}"):
        file.write_text(content)
        assert load_security(load_ec_engine_config(config_file=file, environ={})).public == key_of(PUBLIC)
    for text in (path, json.dumps(PAIR)):
        config = load_ec_engine_config(environ={"LMCACHE_EC_SECURITY": text})
        assert load_security(config).public == key_of(PUBLIC)
    assert load_ec_engine_config(environ={"LMCACHE_EC_SECURITY": "none"}).security == ""


BAD = {
    "relative": "fleet.key",
    "the secret itself": SECRET,
    "a number": 7,
    "a list": [PAIR],
    "no secret": {"public": PUBLIC},
    "no public": {"secret": SECRET},
    "short": {"public": PUBLIC, "secret": SECRET[:-1]},
    "not text": {"public": PUBLIC, "secret": key_of(SECRET)},
    "another name": {**PAIR, "secrets": SECRET},
    "a typing error": {"public": PUBLIC, "scret": SECRET},
    "bad allow": {**PAIR, "allow": [1]},
    "allow of a pair": {**PAIR, "allow": [{"secret": SECRET}]},
    "bad directory": {**PAIR, "directory": "tcp://10.0.0.1:14579"},
}


@pytest.mark.parametrize("security", BAD.values(), ids=BAD)
def test_what_is_no_setting_is_one_error_without_the_secret(security):
    with pytest.raises(ConfigError, match=r"^security=.*; accepted: the absolute path of a key file") as caught:
        make_config({"security": security})
    assert SECRET[:20] not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"public: {PUBLIC!r}\nsecret: [{SECRET}", "is not YAML"),
        (f"public: !{SECRET}", "is not YAML"),
        (f"secret: *{SECRET.translate(str.maketrans(dict.fromkeys('.:+=^!/*?&<>()[]{}@%$#', 'x')))}", "is not YAML"),
        (f"secret: %{SECRET}", "is not YAML"),
        (SECRET.replace(":", "x"), "fleet.key"),
        (json.dumps({"public": PUBLIC}), "holds {'public'"),
        (json.dumps({**PAIR, "comment": "mine"}), "accepted: a key file"),
        (json.dumps({"public": OTHER, "secret": SECRET}), "is not of the secret's pair"),
        (json.dumps({"public": "#" * 40, "secret": SECRET}), "security: public is not a key"),
        (json.dumps({"public": PUBLIC, "secret": "#" * 40}), "security: secret is not a key"),
        (json.dumps({**PAIR, "allow": ["#" * 40]}), "security: allow is not a key"),
        ("", "holds {}"),
        ("\0", "is not YAML"),
    ],
)
def test_a_bad_key_file_is_one_error_without_the_secret(tmp_path, content, said):
    path = key_file(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        loaded(path)
    message = str(caught.value)
    assert said in message
    assert "accepted: " in message
    assert "\n" not in message
    for start in range(len(SECRET) - 10):
        assert SECRET[start : start + 10] not in message


def test_a_key_file_that_is_not_there():
    with pytest.raises(
        ConfigError, match=r"^security='/is/not/there' cannot be read: No such file.*accepted: a key file"
    ):
        loaded("/is/not/there")


def test_a_libzmq_without_curve_is_one_error(monkeypatch):
    """As it is where libzmq was built without libsodium."""
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match=r"^libzmq [\d.]+ was built without CURVE"):
        loaded(PAIR)
    assert load_security(make_config({})) is None


def test_encryption_may_be_required():
    with pytest.raises(ConfigError, match=r"^require_encryption=True without security; accepted: both") as caught:
        make_config({"require_encryption": True})
    assert caught.value.names == ("require_encryption", "security")
    assert make_config({"require_encryption": True, "security": PAIR}).require_encryption


def test_no_secret_is_shown_but_where_a_node_is_started(tmp_path):
    config = make_config({"security": {**PAIR, "allow": [OTHER]}})
    assert isinstance(config.security, KeyRing)
    for text in (repr(config), str(config), repr(load_security(config)), shown({"security": PAIR, "x": [[SECRET]]})):
        assert SECRET not in text
        assert repr(key_of(SECRET)) not in text
    assert make_config(json.loads(json.dumps(as_settings(config)))) == config
    with pytest.raises(ConfigError) as caught:
        make_config({"securty": PAIR})
    assert SECRET not in str(caught.value)
    assert shown({"node_name": "a", "x": [1, "b"]}) == "{'node_name': 'a', 'x': [1, 'b']}"
    endless: list[object] = []
    endless.append(endless)
    assert "..." in shown(endless)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ec_p2p.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=60)


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"]])
def test_the_command_that_shows_the_settings_hides_the_secret(arguments):
    done = run(*arguments, LMCACHE_EC_SECURITY=json.dumps({**PAIR, "allow": [OTHER]}))
    assert done.returncode == 0
    assert PUBLIC in done.stdout
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "--set", f"security={SECRET}"],
        ["config", "--settings", json.dumps({"security": PAIR})[:-2]],
        ["config", "--settings", json.dumps([{"security": PAIR}])],
        ["node", "--set", f'security={{"public": "{PUBLIC}", "secrt": "{SECRET}"}}'],
        ["node", "--set", f'security={{"public": "{OTHER}", "secret": "{SECRET}"}}'],
        ["node", "--spawned", "--set", "security=/is/not/there"],
        ["node", "--set", "require_encryption=true"],
        ["directory", "--security", "/is/not/there"],
    ],
)
def test_bad_keys_on_a_command_line_end_in_one_line_and_status_2(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("ec-p2p: ")
    assert "accepted: " in line
    assert SECRET[:20] not in line


def test_keygen_prints_a_key_file(tmp_path):
    done = run("keygen")
    assert done.returncode == 0
    path = key_file(tmp_path, done.stdout)
    assert security_of(path, "security").public in loaded(path).allow
    assert "ec-p2p directory --security" in done.stderr


def test_keygen_writes_a_key_file_that_only_its_owner_can_read_and_never_over_another(tmp_path):
    path = tmp_path / "new.key"
    done = run("keygen", "--out", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    security = loaded(str(path))
    assert key_text(security.public) in done.stdout
    assert key_text(security.secret) not in done.stdout
    before = path.read_text()
    again = run("keygen", "--out", str(path))
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(f"ec-p2p: --out='{path}': File exists; accepted: ")
    assert path.read_text() == before
    nowhere = run("keygen", "--out", str(tmp_path / "no" / "folder"))
    assert "No such file or directory" in nowhere.stderr
