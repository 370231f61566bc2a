"""Where settings come from: one configuration out of all sources, with the source of each value.

Owns the order of the sources, the names that settings have in each of them, and what is said of names that mean nothing
here; never what a value may be. The sources, each stronger than those before it:

1. the defaults;
2. what LMCache's configuration file says of LMCache's own caches, as far as it means something here;
3. `ec_<name>` in that file;
4. the map `ec:` in that file;
5. the environment, `LMCACHE_EC_<NAME>`;
6. what the process was given itself, as `ec_connector_extra_config` or on a command line: plain names, or
   `lmcache.ec_<name>`, which a plain one beside it overrides.

In the prefixed names upper and lower case are the same, and `ec_ip` and `ec_port` need no second `ec_`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ec_p2p.config import (
    DEFAULTS,
    KINDS,
    Config,
    ConfigError,
    check_value,
    combine,
    nearest,
    read_value,
    unknown_setting,
)
from ec_p2p.config_kinds import shown
from ec_p2p.yaml_files import read_map

logger = logging.getLogger(__name__)

_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_ACCEPTED = "a YAML file with 'name: value' on its first level"
_INHERITED = ("local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size", "cache_policy")
_LMCACHE_POLICIES = ("LFU", "FIFO", "MRU")
_LMCACHES_OWN = re.compile(
    r"""(blend|chunk_statistics|controller|gds|internal_api_server|lazy_memory|lmcache|lookup|maru|nixl|p2p|pd|pin)_.*
    | enable_(async_loading|blending|chunk_statistics|controller|hidden_state_cache|kv_events|lazy_memory_allocator)
    | enable_(nixl_storage|p2p|pd|scheduler_bypass_lookup|xpyd)
    | hidden_states?_.* | use_(gds|gpu_connector_v3|layerwise)
    | external_(backends|lookup_client) | (runtime_)?plugin_locations | (remote_)?storage_plugins
    | app_id | audit_actual_remote_url | blocking_timeout_secs | chunk_size | extra_config | hit_miss_ratio
    | local_cpu_use_hugepages | local_disk_path_sharding | max_hidden_state_cpu_size | min_retrieve_tokens | mp_host
    | mp_port | numa_mode | pre_caching_hash_algorithm | priority_limit | py_enable_gc | remote_(config_url|serde|url)
    | reserve_local_cpu_size | retrieve_locations | run_script_api_enabled | save_(decode_cache|unfull_chunk)
    | script_allowed_imports | store_location | transfer_channel""",
    re.VERBOSE,
)
"""LMCache's settings without a meaning here, by name or family of names."""


class Loaded(msgspec.Struct, frozen=True):
    """A configuration, and where each value comes from."""

    config: Config
    sources: dict[str, str]
    """Of every setting, in the order of Config's fields."""
    config_file: str
    """The file that was read. Empty: none."""


class _Given(NamedTuple):
    name: str
    value: object
    """Not checked yet. None: back to the default."""
    key: str
    """What the setting is called in its source."""
    where: str

    @property
    def source(self) -> str:
        return f"{self.where}: {self.key}"


def load_ec_engine_config(
    extra_config: Mapping[str, Any] | None = None,
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration out of all sources.

    `extra_config` is what the process was given itself, such as vLLM's `ec_connector_extra_config`. `config_file` is
    read instead of the one that LMCACHE_CONFIG_FILE names, `environ` instead of the environment.

    Raises ConfigError, which names the source besides key, value and what is accepted, for any value that cannot be
    used, for an unknown plain name in `extra_config`, and for a file that cannot be read. A prefixed name that means
    nothing here is logged once per process and left out.
    """
    return explain_ec_engine_config(extra_config, config_file=config_file, environ=environ).config


def explain_ec_engine_config(
    extra_config: Mapping[str, Any] | None = None,
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    origin: str = "ec_connector_extra_config",
) -> Loaded:
    """As `load_ec_engine_config`, with the source of each value. `origin` is what to call that of `extra_config`."""
    if environ is None:
        environ = os.environ
    file = str(config_file or environ.get(_FILE_VARIABLE, ""))
    content = read_map(file, "config_file" if config_file else _FILE_VARIABLE, _ACCEPTED) if file else {}
    chosen = [
        *_prefixed(content, file),
        *_nested(content, file),
        *_environment(environ),
        *_own(extra_config or {}, origin),
    ]
    inherited = _inherited(content, file, without={given.name for given in chosen})

    values: dict[str, Any] = {}
    sources = dict.fromkeys(KINDS, "default")
    for given in (*inherited, *chosen):
        with _named(given.source):
            value = getattr(DEFAULTS, given.name) if given.value is None else check_value(given.name, given.value)
        if given.name == "local_cpu" and not value:
            _say(logging.INFO, f"{given.source} is off, but the first tier is always on")
            continue
        values[given.name] = value
        sources[given.name] = given.source
    try:
        return Loaded(combine(values), sources, file)
    except ConfigError as error:
        origins = ", ".join(f"{name} from {sources[name]}" for name in error.names)
        raise ConfigError(f"{error} ({origins})") from None


# ------------------------------------------------------------ the sources


def _inherited(content: Mapping[str, object], file: str, without: set[str]) -> Iterator[_Given]:
    """LMCache's settings, in LMCache's terms: what it takes for unset is unset. Overridden ones may be anything."""
    for name in _INHERITED:
        value = content.get(name)
        if name in without or value is None:
            continue
        given = _Given(name, value, name, file)
        if isinstance(value, str):
            given = _from_text(given, value)
        if name == "cache_policy" and str(value).upper() in _LMCACHE_POLICIES:
            _say(logging.INFO, f"{given.source}: {value} is a policy of LMCache's; here it is {DEFAULTS.cache_policy}")
        elif name == "local_cpu" and given.value is False:
            pass  # LMCache's own tier may be off; this cache needs one
        elif not (name.endswith("_size") and value in (0, "0")):
            yield given


def _prefixed(content: Mapping[str, object], file: str) -> Iterator[_Given]:
    entries = ((key, key[len("ec_") :], value) for key, value in content.items() if key.lower().startswith("ec_"))
    return _known(entries, file, "ec_{}".format)


def _nested(content: Mapping[str, object], file: str) -> Iterator[_Given]:
    for key, settings in content.items():
        if key.lower() != "ec" or settings is None:
            continue
        if not isinstance(settings, dict):
            raise ConfigError(f"{key}={shown(settings)}; accepted: a map of settings (from {file})")
        entries = ((f"{key}.{name}", str(name), value) for name, value in settings.items())
        yield from _known(entries, file, "ec.{}".format)


def _environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    prefix = "LMCACHE_EC_"
    # Of two spellings the last one wins: the one in upper case.
    keys = sorted((key for key in environ if key.upper().startswith(prefix)), reverse=True)
    entries = ((key, key[len(prefix) :], environ[key]) for key in keys)
    for given in _known(entries, "environment", lambda name: prefix + name.upper()):
        yield _from_text(given, str(given.value))


def _own(settings: Mapping[str, object], origin: str) -> Iterator[_Given]:
    """The prefixed names come first: a plain one beside them names the same setting, and wins."""
    plain, prefixed = [], []
    spell = "lmcache.ec_{}".format
    for key, value in settings.items():
        lower = str(key).lower()
        if lower.startswith("lmcache.ec_"):
            prefixed.append((key, lower.removeprefix("lmcache.ec_"), value))
        elif lower.startswith("lmcache."):
            _leave_out(key, lower.removeprefix("lmcache."), origin, spell)
        elif key in KINDS:
            plain.append(_Given(key, value, key, origin))
        else:
            with _named(origin):
                raise unknown_setting(key, value)
    for given in _known(prefixed, origin, spell):
        if given.name in settings:
            _say(logging.INFO, f"{given.source} is not used: {given.name!r} beside it names the same setting")
        yield given
    yield from plain


# ------------------------------------------------------------ reading


def _from_text(given: _Given, text: str) -> _Given:
    """With the value that `text` stands for. No text, 'none' and 'null' clear a setting that is empty by default."""
    if text.strip().lower() in ("", "none", "null") and getattr(DEFAULTS, given.name) in ("", (), {}):
        return given._replace(value=None)
    with _named(given.source):
        return given._replace(value=read_value(given.name, text))


def _known(entries: Iterable[tuple[str, str, object]], where: str, spell: Callable[[str], str]) -> Iterator[_Given]:
    """What (key, name, value) set, for the names that mean something. `spell` makes the key of a name."""
    for key, name, value in entries:
        name = name.lower()
        if name in KINDS:
            yield _Given(name, value, key, where)
        elif f"ec_{name}" in KINDS:
            yield _Given(f"ec_{name}", value, key, where)
        else:
            _leave_out(key, name, where, spell)


# ------------------------------------------------------------ what is said


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Adds the source to what is wrong with a value."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} (from {source})") from None


def _leave_out(key: str, name: str, where: str, spell: Callable[[str], str]) -> None:
    if _LMCACHES_OWN.fullmatch(name):
        _say(logging.INFO, f"{where}: {key} is LMCache's and has no meaning here")
    else:
        near = spell(nearest(name).removeprefix("ec_"))
        _say(logging.WARNING, f"{where}: {key} is unknown and left out; the nearest known one is {near}")


_said: set[str] = set()


def _say(level: int, text: str) -> None:
    """Once in a process: every connector and every command reads the same sources."""
    if text not in _said:
        _said.add(text)
        logger.log(level, "%s", text)
