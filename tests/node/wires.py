"""Two hosts of one machine, and the wires between them, which can be cut: network namespaces, which need root."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess

from .conftest import until

HERE, THERE = 0, 1
_numbers = itertools.count()

LINK_DOWN = "the link goes down"
HOLDER_LOST_ROUTE = "the holder loses its route"
HOLDER_DROPS = "the holder's host drops what is for the reader"
READER_DROPS = "the reader's host drops what is for the holder"
EVERYTHING = "the holder's host is cut off, from the directory, too"


def why_no_wires():
    """Why network namespaces cannot be had here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("ss") is None:
        return "network namespaces need iproute2"
    probe = f"ec-p2p-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    pair = ("link", "add", "data", "type", "veth", "peer", "name", "atad")
    paired = subprocess.run(["ip", "-n", probe, *pair], capture_output=True, text=True)
    _run("ip", "netns", "del", probe)
    return f"there are no veth pairs here: {paired.stderr.strip()}" if paired.returncode else ""


def _link(wire, state):
    return "link", "set", wire, state


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Wires:
    """Hosts HERE and THERE. What entries travel by goes over the wire `data`; the directory is reached by `control`."""

    addresses = "10.213.0.1", "10.213.0.2"
    directory = "10.213.1.1"
    """HERE's address on the wire `control`."""

    def __init__(self):
        tag = f"ec-p2p-{os.getpid()}-{next(_numbers)}"
        self._names = (f"{tag}-here", f"{tag}-there")
        with contextlib.ExitStack() as made:
            for name in self._names:
                _run("ip", "netns", "add", name)
                made.callback(_run, "ip", "netns", "del", name)
            self._connect()
            self._made = made.pop_all()

    def _connect(self):
        for net, wire in enumerate(("data", "control")):
            here, there = self._names
            _run("ip", "link", "add", wire, "netns", here, "type", "veth", "peer", "name", wire, "netns", there)
            for host in (HERE, THERE):
                self._ip(host, "link", "set", "lo", "up")
                self._ip(host, "address", "add", f"10.213.{net}.{host + 1}/24", "dev", wire)
                self._ip(host, "link", "set", wire, "up")
        for host, wire in itertools.product((HERE, THERE), ("data", "control")):
            until(lambda h=host, w=wire: "state UP" in self._ip(h, "link", "show", w), f"the wire {wire}")

    def _cut_and_mend(self, how):
        """On which host, by which orders, and by which it is mended."""
        return {
            LINK_DOWN: (THERE, [_link("data", "down")], [_link("data", "up")]),
            EVERYTHING: (THERE, *([_link("data", do), _link("control", do)] for do in ("down", "up"))),
            HOLDER_LOST_ROUTE: (
                THERE,
                [("route", "del", "10.213.0.0/24", "dev", "data")],
                [("route", "add", "10.213.0.0/24", "dev", "data", "src", self.addresses[THERE])],
            ),
            HOLDER_DROPS: (THERE, *([("route", do, "blackhole", self.addresses[HERE])] for do in ("add", "del"))),
            READER_DROPS: (HERE, *([("route", do, "blackhole", self.addresses[THERE])] for do in ("add", "del"))),
        }[how]

    def _ip(self, host, *words):
        return _run("ip", "-n", self._names[host], *words)

    def on(self, host):
        """What a command begins with that is to run on that host."""
        return ["ip", "netns", "exec", self._names[host]]

    @contextlib.contextmanager
    def cut(self, how):
        """Meanwhile a wire is cut in one of the ways above: packets get lost, and nobody is told."""
        host, cut, mend = self._cut_and_mend(how)
        for words in cut:
            self._ip(host, *words)
        try:
            yield
        finally:
            for words in mend:
                self._ip(host, *words)

    def doubted(self):
        """Connections over the wire `data` of which one end waits to hear something, and will give them up if it does
        not. (UCX watches those that it has made, not those that it has accepted.)"""
        found = []
        for host in (HERE, THERE):
            lines = _run(*self.on(host), "ss", "-Htno", "state", "established").splitlines()
            found += [line for line in lines if "timer:" in line and all(each in line for each in self.addresses)]
        return found

    def close(self):
        self._made.close()
