"""The directories, each followed for a moment as a node follows it."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

import msgspec

from ec_p2p.cli.doctor.finding import Finding, note, ok, problem
from ec_p2p.cli.doctor.ports import Bound, publications_port, who_has
from ec_p2p.cli.doctor.remarks import remarks
from ec_p2p.cli.following import Following, NoDirectory
from ec_p2p.config import Config, ConfigError
from ec_p2p.control.directories import is_zmq
from ec_p2p.keys import load_security
from ec_p2p.wire.notation import without_password

_CONNECT_S = 1.0
_ANSWER_S = 3.0
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.ENODEV)
"""What ZMQ says of an address that this host has not, and of a name for one."""


def directories(config: Config, bound: Bound) -> list[Finding]:
    """Whether each of them answers, or can be hosted here."""
    return [_directory(config, endpoint, bound) for endpoint in config.directories]


def _directory(config: Config, endpoint: str, bound: Bound) -> Finding:
    thing = f"directory {without_password(endpoint)}"
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_S):
            pass
    except OSError as error:
        return _unreached(config, endpoint, thing, bound, error.strerror or str(error))
    try:
        load_security(config)
    except ConfigError:
        return note(thing, "somebody listens there, but cannot be asked with these keys (see encryption)")
    return _asked(config, endpoint, thing)


def _asked(config: Config, endpoint: str, thing: str) -> Finding:
    """Of one where somebody listens."""
    with remarks("ec_p2p.control") as said:
        try:
            with Following(msgspec.structs.replace(config, directory=(endpoint,))) as following:
                following.catch_up(_ANSWER_S)
                (replica,) = following.view.replicas
                return ok(thing, f"answers; nodes: {len(replica.nodes())}, entries: {len(replica)}")
        except ConfigError as error:
            return problem(thing, str(error), "a node with these settings does not start")
        except NoDirectory as error:
            why = "; ".join([str(error), *said])
    says = f"somebody listens there, but does not answer as a directory: {why}"
    if not is_zmq(endpoint):
        return problem(thing, says, "look at that server, and at the user, password and options in `directory`")
    keys = "has other keys" if config.security else "wants keys (security)"
    mend = f"it is stopped or hangs, {keys}, or is something else: look at its log; correct ec_ip, ec_port or directory"
    return problem(thing, says, mend)


def _unreached(config: Config, endpoint: str, thing: str, bound: Bound, why: str) -> Finding:
    start = "start `ec-p2p directory` there" if is_zmq(endpoint) else "start that server"
    mend = f"{start}, open the port in the firewall, or correct ec_ip, ec_port or directory"
    elsewhere = bound.directory is not None and bound.directory.errno in _NOT_OURS
    if config.directory or not config.embedded_directory or elsewhere:
        return problem(thing, f"cannot be reached ({why})", mend)
    nobody = "nobody listens there"
    if bound.directory is not None:
        why = f"{nobody} ({why}), and no node here can host it: {config.ec_ip}:{config.ec_port} cannot be bound"
        return problem(thing, f"{why} ({bound.directory.strerror})", f"choose another ec_port; or {mend}")
    if bound.publications is not None:
        port = publications_port(config)
        why = f"{nobody}, and no node here can host it: {port}, on which it would publish the changes, cannot be bound"
        mend = f"{who_has(port)}; choose another ec_port, or set directory_pub_port"
        return problem(thing, f"{why} ({bound.publications.strerror})", mend)
    return ok(thing, f"{nobody} yet: the first node on this host will host it")
