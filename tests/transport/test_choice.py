"""Which transport is opened, and what is imported for it."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys

import pytest
import zmq

from ec_p2p import transport
from ec_p2p.transport import Interconnect, TransportError, nixl, open_transport


def test_a_kind_that_does_not_exist():
    with pytest.raises(TransportError, match="transport='pigeon'; accepted: auto, nixl, zmq"):
        open_transport("pigeon", "x", 4096, 4096, context=zmq.Context.instance(), bind_host="", advertise_host="")


def test_auto_is_zmq_where_nixl_is_not_installed(monkeypatch):
    monkeypatch.setattr(transport, "NIXL_PACKAGES", ("a_package_that_is_not_there",))
    context = zmq.Context()
    memory = bytearray(4096)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = open_transport("auto", "x", base, 4096, context=context, bind_host="127.0.0.1", advertise_host="127.0.0.1")
    assert end.kind == "zmq"
    end.close()
    context.term()


def test_asking_imports_neither_nixl_nor_torch():
    program = """
import sys
import ec_p2p.transport
ec_p2p.transport.nixl_available()
import ec_p2p.transport.zmq, ec_p2p.transport.nixl
assert not {name.partition(".")[0] for name in sys.modules} & {"nixl", "nixl_cu12", "nixl_cu13", "torch", "numpy"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_nixl_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setattr(nixl, "NIXL_PACKAGES", ("a_package_that_is_not_there",))
    with pytest.raises(TransportError, match=r"NIXL cannot be imported .*a_package_that_is_not_there"):
        nixl.NixlTransport("x", 4096, 4096)


def test_what_zmq_makes_no_use_of_is_told(caplog):
    caplog.set_level(logging.DEBUG)
    context = zmq.Context()
    memory = bytearray(4096)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for interconnect in (Interconnect(), Interconnect(params={"num_workers": "2"}, ucx_tls="rc,sm")):
        open_transport(
            "zmq",
            "x",
            base,
            4096,
            context=context,
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
            interconnect=interconnect,
        ).close()
    context.term()
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert line == "nixl_params={'num_workers': '2'}, ucx_tls='rc,sm': no effect, since the transport is zmq"
