"""Where the keys of a process come from: the setting `security`, which holds them or names the file that does.

Owns the key file: what stands in it, and how one is made. Must never show a secret.
"""

from __future__ import annotations

import logging
import os

import zmq

from ec_p2p.config import Config, ConfigError
from ec_p2p.config_kinds import KeyRing, Keys, shown
from ec_p2p.wire.curve import Security, key_of, key_text, new_pair, public_of
from ec_p2p.yaml_files import read_map

logger = logging.getLogger(__name__)

_ACCEPTED = "a key file as `ec-p2p keygen` makes it: 'public' and 'secret', each 40 characters of Z85 in quotes"


def load_security(config: Config) -> Security | None:
    """The keys of a process with this configuration; None for none. Raises ConfigError."""
    return security_of(config.security, "security")


def security_of(setting: str | KeyRing, named_by: str) -> Security | None:
    """The keys in this setting, or in the file that it names; None where it is empty. Raises ConfigError."""
    if not setting:
        return None
    require_curve()
    ring = setting if isinstance(setting, KeyRing) else _read(setting, named_by)
    public, secret = _key(ring.public, f"{named_by}: public"), _key(ring.secret, f"{named_by}: secret")
    if public_of(secret) != public:
        raise ConfigError(f"{named_by}: public={ring.public!r} is not of the secret's pair; accepted: both of one")
    return Security(
        public,
        secret,
        frozenset([public, *(_key(text, f"{named_by}: allow") for text in ring.allow)]),
        _key(ring.directory, f"{named_by}: directory") if ring.directory else public,
    )


def require_curve() -> None:
    """Raises ConfigError where this libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} was built without CURVE and cannot use keys; accepted: a pyzmq whose libzmq "
            "has it, as those of its wheels do (python -c 'import zmq; print(zmq.has(\"curve\"))')"
        )


def new_key_file() -> tuple[str, str]:
    """(public key, the text of a key file with a new pair)."""
    require_curve()
    public, secret = map(key_text, new_pair())
    return public, (
        "# Keys of ec-p2p. Whoever has read this file is a member of the fleet.\n"
        f'public: "{public}"\n'
        f'secret: "{secret}"\n'
        "# With a pair for each process: the public keys of all members, and the one of the directories.\n"
        '# allow: ["...", "..."]\n'
        '# directory: "..."\n'
    )


def _read(path: str, named_by: str) -> KeyRing:
    content = read_map(path, named_by, _ACCEPTED)
    try:
        ring = Keys().check(content)
    except ValueError:
        raise ConfigError(f"{named_by}={path!r} holds {shown(content)}; accepted: {_ACCEPTED}") from None
    assert isinstance(ring, KeyRing)
    if os.stat(path).st_mode & 0o007:
        logger.warning("every user of this host can read the keys in %s; mode 0600 is enough", path)
    return ring


def _key(text: str, named_by: str) -> bytes:
    try:
        return key_of(text)
    except ValueError:
        raise ConfigError(f"{named_by} is not a key; accepted: 40 characters of Z85 from `ec-p2p keygen`") from None
