"""What NIXL is given to move bytes with, and what is said of what cannot be had: real agents, each in its process."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import time

import pytest

from ec_p2p.transport import Interconnect, TransportError, nixl_available
from ec_p2p.transport.interconnect import Backends, backends
from ec_p2p.transport.interface import Span, State
from ec_p2p.transport.nixl import NixlTransport, _import_nixl
from tests.transport.ends import ARENA, MIB, SLAB, End, Holder, in_child, stop_process, unique_name, until

pytestmark = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]

UCX_PARAMETERS = {"num_workers", "ucx_devices", "ucx_error_handling_mode"}


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch):
    """By the user, or by an agent of this process, of which the children would have it."""
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def holder(nothing_exported):
    holder = Holder("nixl", slabs=2)
    yield holder
    holder.close()


class Lines(logging.Handler):
    """What is logged in this process, from DEBUG on."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("ec_p2p").addHandler(self)
        logging.getLogger("ec_p2p").setLevel(logging.DEBUG)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def opened(settings):
    """The lines that are logged while such an end is opened, and why it cannot be; empty: it can."""
    logged = Lines()
    try:
        NixlTransport("x", 1 << 40, ARENA, bind_host="127.0.0.1", interconnect=Interconnect(**settings)).close()
    except TransportError as error:
        return logged.lines, str(error)
    return logged.lines, ""


# ------------------------------------------------------------ backends


def all_backends():
    bind = _import_nixl().nixlBind
    return backends(bind.nixlAgent("x", bind.nixlAgentConfig()))


@pytest.fixture(scope="module")
def installed():
    return Backends(*in_child(all_backends))


def test_the_backends_that_are_installed(installed):
    assert "UCX" in installed.between_hosts
    assert not {"POSIX", "OBJ", "GDS"} & {*installed.between_hosts}
    names = list(itertools.chain(*installed))
    assert len(set(names)) == len(names), "each in one of the lists"


def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(installed):
    _, refusal = in_child(opened, {"backend": "NO_SUCH"})
    assert refusal.startswith("nixl_backend='NO_SUCH': the installed NIXL has no plugin of this name; accepted: ")
    accepted = refusal.partition("; accepted: ")[2].partition(" (")[0]
    assert accepted.split(", ") == installed.between_hosts
    assert "no plugin of this name" in in_child(opened, {"backend": "ucx"})[1], "names are as the plugins have them"


def test_a_backend_for_storage_is_refused(installed):
    if not installed.of_storage:
        pytest.skip("this NIXL has none")
    for name in installed.of_storage:
        _, refusal = in_child(opened, {"backend": name})
        assert refusal.startswith(
            f"nixl_backend={name!r}: moves bytes to and from storage, not between hosts; accepted"
        )


def test_a_backend_whose_libraries_are_missing_is_refused(installed):
    if not installed.not_loadable:
        pytest.skip("all of this NIXL's plugins can be loaded")
    name = installed.not_loadable[0]
    _, refusal = in_child(opened, {"backend": name})
    assert refusal.startswith(
        f"nixl_backend={name!r}: is installed, but cannot be loaded (NIXL_LOG_LEVEL=INFO says why"
    )
    assert re.search(rf"accepted: UCX.* \(installed, but not loadable: {', '.join(installed.not_loadable)}\)$", refusal)


# ------------------------------------------------------------ parameters


def epolls_and_landed(params, name, card):
    """How many epoll instances the library has: each UCX worker has its own. And what it reads."""
    end = End("nixl", unique_name(), slabs=2, params=params)
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    epolls = sum(os.path.islink(link) and "eventpoll" in os.readlink(link) for link in links)
    end.transport.connect(name, card)
    landed = end.fetch(name, 1000, 0, SLAB)
    end.close()
    return epolls, landed


def test_the_backend_gets_its_parameters_and_reads_with_them(holder):
    usual, landed = in_child(epolls_and_landed, {}, holder.name, holder.card)
    more, landed_too = in_child(epolls_and_landed, {"num_workers": "4"}, holder.name, holder.card)
    assert more >= usual + 3
    assert landed == landed_too == holder.bytes[1000 : 1000 + SLAB]


def test_a_parameter_that_the_backend_refuses():
    _, refusal = in_child(opened, {"params": {"num_workers": "many"}})
    assert refusal.startswith("cannot make a NIXL agent with backend UCX: ")
    assert "nixl_params={'num_workers': 'many'}" in refusal
    assert {match[1] for match in re.finditer(r"(\w+) \(\w+\)", refusal.partition("UCX lists ")[2])} >= UCX_PARAMETERS


def test_a_parameter_that_the_backend_does_not_list_is_told():
    lines, refusal = in_child(opened, {"params": {"num_wrokers": "2", "num_workers": "2"}})
    assert refusal == ""
    [line] = [line for line in lines if line.startswith("WARNING")]
    assert line.startswith("WARNING nixl_params: UCX does not list num_wrokers, and may ignore it; it lists ")
    assert "num_workers (1)" in line
    assert in_child(opened, {"params": {"num_workers": "2"}}) == ([], "")


# ------------------------------------------------------------ UCX_TLS


def read_from_stopped(settings, name, card, pid):
    """Where a READ from a stopped holder is after a while, and what has landed once it goes on."""
    logged = Lines()
    end = End("nixl", unique_name(), **settings)
    end.transport.connect(name, card)
    end.fetch(name, 0, 0, 64)
    stop_process(pid)
    reading = end.transport.read(name, [Span(1000, 0, MIB)])
    for _ in range(100):
        end.transport.progress()
        if reading.poll() is not State.POSTED:
            break
        time.sleep(0.005)
    while_stopped = reading.poll()
    os.kill(pid, signal.SIGCONT)
    until(lambda: reading.poll() is not State.POSTED, "the READ to end")
    landed = end.memory[:MIB]
    end.close()
    return while_stopped, reading.poll(), landed, os.environ.get("UCX_TLS"), [x for x in logged.lines if "UCX" in x]


def test_over_what_it_reads_is_as_configured(holder):
    """Through shared memory the holder need not do anything; over TCP it must."""
    usual = in_child(read_from_stopped, {}, holder.name, holder.card, holder.pid)
    assert usual == (State.DONE, State.DONE, holder.bytes[1000 : 1000 + MIB], None, [])
    over_tcp = in_child(read_from_stopped, {"ucx_tls": "tcp"}, holder.name, holder.card, holder.pid)
    assert over_tcp == (State.POSTED, State.DONE, holder.bytes[1000 : 1000 + MIB], "tcp", [])


def test_the_configuration_wins_over_the_environment_and_says_so(holder, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "sm,tcp")
    chosen = in_child(read_from_stopped, {"ucx_tls": "tcp"}, holder.name, holder.card, holder.pid)
    assert chosen[:4] == (State.POSTED, State.DONE, holder.bytes[1000 : 1000 + MIB], "tcp")
    assert chosen[4] == ["INFO ucx_tls='tcp' of the configuration replaces UCX_TLS='sm,tcp' of the environment"]
    assert in_child(opened, {"ucx_tls": "sm,tcp"}) == ([], ""), "nothing to say where they agree"


def test_the_environment_holds_where_nothing_is_configured(holder, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    kept = in_child(read_from_stopped, {}, holder.name, holder.card, holder.pid)
    assert kept == (State.POSTED, State.DONE, holder.bytes[1000 : 1000 + MIB], "tcp", [])


def test_transports_that_this_host_does_not_have():
    _, refusal = in_child(opened, {"ucx_tls": "pigeon"})
    assert refusal.startswith("cannot make a NIXL agent with backend UCX: ")
    assert "UCX_TLS='pigeon' in this process" in refusal
    assert "UCX_NET_DEVICES='lo' in this process" in refusal, "which is ours, and may be what is in the way"


def variables_of_tcp(ucx_tls):
    opened({"ucx_tls": ucx_tls})
    return "UCX_TCP_SYN_CNT" in os.environ


@pytest.mark.parametrize(
    ("ucx_tls", "set_"), [("", True), ("tcp", True), ("sm, tcp", True), ("^tcp", False), ("rc,sm", False)]
)
def test_ucx_gets_no_variable_that_it_would_warn_of(ucx_tls, set_):
    assert in_child(variables_of_tcp, ucx_tls) is set_


# ------------------------------------------------------------ what was chosen, in words


def test_only_what_differs_from_the_defaults_is_told():
    assert str(Interconnect()) == ""
    chosen = Interconnect("UCX_MO", {"num_workers": "2"}, "rc,sm")
    assert str(chosen) == "nixl_backend='UCX_MO', nixl_params={'num_workers': '2'}, ucx_tls='rc,sm'"
    assert str(Interconnect(ucx_tls="tcp")) == "ucx_tls='tcp'"
