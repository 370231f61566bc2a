"""Reading a YAML file that holds a map.

Owns what is said of a file that does not. Must never quote what stands in it: that may be a secret key, and a key that
was written without quotes is most often what is wrong with the file.
"""

from __future__ import annotations

import re

from ec_p2p.config import ConfigError

_LONG_QUOTE = re.compile(r"'[^'\s]{8,}'")


def read_map(file: str, named_by: str, accepted: str) -> dict[str, object]:
    """What the file holds. Raises ConfigError naming it, `named_by` (what it was given as) and what is accepted."""
    import yaml

    try:
        with open(file, encoding="utf-8") as stream:
            content = yaml.safe_load(stream)
    except OSError as error:
        raise ConfigError(f"{named_by}={file!r} cannot be read: {error.strerror}; accepted: {accepted}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{named_by}={file!r} is not YAML: {_said(error)}; accepted: {accepted}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{named_by}={file!r} holds a {type(content).__name__}; accepted: {accepted}")
    return {str(key): value for key, value in content.items()}


def _said(error: Exception) -> str:
    """What is wrong, and where, in one line; without the piece of the file that the parser would show."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) if mark else str(error)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return _LONG_QUOTE.sub("'...'", " ".join(str(problem or "it cannot be parsed").split())) + where
