"""The kinds of values that settings have.

Owns what each kind accepts and how text (an environment variable) is read as it; both raise a plain ValueError, to
which whoever knows the setting's name adds name and value. Knows no setting, and looks at nothing outside: a folder or
an address that is well formed need not exist.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ec_p2p.wire.notation import ENDPOINT_ACCEPTED, KEY, is_endpoint, without_password

KIB, GIB = 1 << 10, 1 << 30

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_HIDDEN = "..."
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_LONGEST_S = 10**9
"""Decades, and still far from what timers can count."""
_LONGEST_VALUE = 4096
"""Bytes of one parameter, or of any other text."""


class Kind(Protocol):
    """What a setting accepts, in words and as a check."""

    @property
    def accepted(self) -> str: ...

    def check(self, value: object) -> Any:
        """`value` as the configuration holds it. Raises ValueError if it is not accepted."""
        ...

    def read(self, text: str) -> object:
        """The value that `text` stands for, not checked yet. Raises ValueError if it stands for none."""
        ...


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Keys as an operator writes them. An empty `allow` or `directory` stands for the public key itself."""

    public: str
    secret: str = field(repr=False)
    allow: tuple[str, ...] = ()
    directory: str = ""


class _Textual(msgspec.Struct, frozen=True):
    """The kinds whose values are, or may be, text."""

    def read(self, text: str) -> object:
        return text


class Switch(msgspec.Struct, frozen=True):
    @property
    def accepted(self) -> str:
        return "true or false"

    def check(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    def read(self, text: str) -> object:
        word = text.strip().casefold()
        if word not in _WORDS:
            raise ValueError
        return _WORDS[word]


class Size(_Textual, frozen=True):
    """Bytes."""

    bare_unit: int = 1
    """What a number without a unit counts: bytes, or GiB as in LMCache."""
    least: int = 1

    @property
    def accepted(self) -> str:
        bare = "GiB" if self.bare_unit == GIB else "bytes"
        least = f", at least {readable_size(self.least)}" if self.least > 1 else ""
        return f"a positive number of {bare}, or text like '512MiB'{least}"

    def check(self, value: object) -> int:
        if isinstance(value, str):
            match = _SIZE.fullmatch(value)
            unit = match and match[2].upper()
            if not match or (unit and unit not in _UNITS):
                raise ValueError
            number = float(match[1]) if "." in match[1] else int(match[1])  # whole ones stay exact
            nbytes = number * (_UNITS[unit] if unit else self.bare_unit)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            nbytes = value * self.bare_unit
        else:
            raise ValueError
        if not self.least <= nbytes < 1 << 60:
            raise ValueError
        return int(nbytes)


class Seconds(msgspec.Struct, frozen=True):
    or_zero: bool = False

    @property
    def accepted(self) -> str:
        return f"a number of seconds {'from 0' if self.or_zero else 'above 0'} up to {_LONGEST_S}"

    def check(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
            raise ValueError
        if not value and not self.or_zero:
            raise ValueError
        return float(value)

    def read(self, text: str) -> object:
        return float(text)


class Port(msgspec.Struct, frozen=True):
    least: int = 0

    @property
    def accepted(self) -> str:
        return f"a port number from {self.least} to 65535"

    def check(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value < 65536:
            raise ValueError
        return value

    def read(self, text: str) -> object:
        return int(text)


class Word(_Textual, frozen=True):
    """One of a few words, in upper or lower case."""

    choices: tuple[str, ...]

    @property
    def accepted(self) -> str:
        return ", ".join(self.choices)

    def check(self, value: object) -> str:
        for choice in self.choices:
            if isinstance(value, str) and value.casefold() == choice.casefold():
                return choice
        raise ValueError


class Text(_Textual, frozen=True):
    longest: int = _LONGEST_VALUE

    @property
    def accepted(self) -> str:
        return f"text of at most {self.longest} bytes"

    def check(self, value: object) -> str:
        if not isinstance(value, str) or len(value.encode()) > self.longest or "\0" in value:
            raise ValueError
        return value


class Name(_Textual, frozen=True):
    """What others have named, and we do not know."""

    @property
    def accepted(self) -> str:
        return "a name: a letter, then letters, digits, '_', '.' or '-', at most 64 in all"

    def check(self, value: object) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ValueError
        return value


class Parameters(msgspec.Struct, frozen=True):
    """Names and values for a library that wants both as text; numbers and switches become it."""

    @property
    def accepted(self) -> str:
        return "a map of names to text, numbers, true or false, such as {'num_workers': '2'}"

    def check(self, value: object) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise ValueError
        return {_parameter_name(name): _parameter_value(item) for name, item in value.items()}

    def read(self, text: str) -> object:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError from None


def _parameter_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError
    return name


def _parameter_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float) or "\0" in (text := str(value)) or len(text.encode()) > _LONGEST_VALUE:
        raise ValueError
    return text


class Folder(_Textual, frozen=True):
    """The absolute path of a folder, or '' for none."""

    @property
    def accepted(self) -> str:
        return "the absolute path of one folder, such as '/var/cache/ec', '~/ec' or 'file:///var/cache/ec'"

    def check(self, value: object) -> str:
        # A comma separates several folders in LMCache, of which there is one here.
        if not isinstance(value, str) or "," in value or "\0" in value:
            raise ValueError
        path = os.path.expanduser(value.removeprefix("file://"))
        if value and not os.path.isabs(path):
            raise ValueError
        return path


class Endpoints(_Textual, frozen=True):
    """Endpoints of directories: a list, or text with commas between."""

    @property
    def accepted(self) -> str:
        return f"{ENDPOINT_ACCEPTED}, one or several"

    def check(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [endpoint.strip() for endpoint in value.split(",")]
        if not isinstance(value, list | tuple):
            raise ValueError
        for endpoint in value:
            if not isinstance(endpoint, str) or not is_endpoint(endpoint):
                raise ValueError
        return tuple(value)


class Keys(msgspec.Struct, frozen=True):
    """The keys of this process, or the path of a file with them, or '' for none."""

    @property
    def accepted(self) -> str:
        return (
            "the absolute path of a key file as `ec-p2p keygen` makes it, or what stands in one: 'public', 'secret' "
            "and where wanted 'allow' (a list) and 'directory', each key 40 characters of Z85 in quotes"
        )

    def check(self, value: object) -> str | KeyRing:
        if isinstance(value, Mapping):
            return _key_ring(value)
        if not isinstance(value, str) or "\0" in value:
            raise ValueError
        path = os.path.expanduser(value)
        if value and not os.path.isabs(path):
            raise ValueError
        return path

    def read(self, text: str) -> object:
        if not text.lstrip().startswith("{"):
            return text
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError from None


def _key_ring(value: Mapping[object, object]) -> KeyRing:
    fields = {"public": "", "secret": "", "allow": (), "directory": "", **value}
    if len(fields) > 4:
        raise ValueError
    public, secret, allow, directory = fields["public"], fields["secret"], fields["allow"], fields["directory"]
    if isinstance(allow, str):
        allow = (allow,)
    if not isinstance(allow, list | tuple):
        raise ValueError
    for key in (public, secret, *allow, *([directory] if directory else [])):
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise ValueError
    return KeyRing(str(public), str(secret), tuple(allow), str(directory or ""))


def shown(value: object) -> str:
    """`value` as errors quote it: its repr, without what may be a secret key."""
    return repr(_without_secrets(value))


def _without_secrets(value: object, depth: int = 8) -> object:
    if isinstance(value, str):
        return _HIDDEN if KEY.fullmatch(value) or ("{" in value and "secret" in value) else without_password(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not depth:
        return _HIDDEN
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if "secret" in str(key).lower() else _without_secrets(item, depth - 1)
            for key, item in value.items()
        }
    return [_without_secrets(item, depth - 1) for item in value]


def readable_size(nbytes: int) -> str:
    """Exactly `nbytes`, in the largest unit that divides them: text that `Size` reads again."""
    unit = max((unit for unit in _UNITS if nbytes % _UNITS[unit] == 0), key=_UNITS.__getitem__)
    return f"{nbytes // _UNITS[unit]}{unit.replace('I', 'i')}"
