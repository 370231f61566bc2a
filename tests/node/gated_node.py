"""A node whose loop stops at a gate and asks before it goes on: so a test reaches one moment of a transfer for certain.

It runs in a process of its own, as every node does. What is wrapped are the places where its loop turns to a peer.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from ec_p2p.config import make_config
from ec_p2p.engine.generation import RECORD_BYTES
from ec_p2p.node.service import Node

UP, CARD, PAYLOADS, PAYLOADS_POSTED, RECORDS, RECORDS_POSTED, STAGE = GATES = (
    "named, not dialled yet",
    "card had, not connected to yet",
    "payloads about to be read",
    "payloads being read",
    "payloads read, records about to be",
    "records being read",
    "about to be asked to stage",
)
"""How far the reader has come with a peer."""


class Gate:
    """The node's end of the pipe. The test arms one gate at a time, for one peer or for whichever comes first (''); the
    loop says that it is there, and waits for a word."""

    def __init__(self, pipe):
        self._pipe = pipe
        self._armed = None

    def at(self, name, peer):
        while self._pipe.poll():
            self._armed = self._pipe.recv()
        if self._armed is not None and self._armed[0] == name and self._armed[1] in ("", peer):
            self._armed = None
            self._pipe.send(name)
            self._pipe.recv()


def put_gates(node, gate):
    transport, peers = node.wiring.transport, node.wiring.peers
    up, connect, read, stage = peers.up, transport.connect, transport.read, peers.stage

    def gated_up(info, now):
        gate.at(UP, info.incarnation.hex())
        up(info, now)

    def gated_connect(peer, card):
        gate.at(CARD, peer)
        connect(peer, card)

    def gated_read(peer, spans):
        of_records = all(span.nbytes == RECORD_BYTES for span in spans)
        gate.at(RECORDS if of_records else PAYLOADS, peer)
        reading = read(peer, spans)
        gate.at(RECORDS_POSTED if of_records else PAYLOADS_POSTED, peer)
        return reading

    def gated_stage(peer, identity):
        gate.at(STAGE, peer.key)
        return stage(peer, identity)

    peers.up, transport.connect, transport.read, peers.stage = gated_up, gated_connect, gated_read, gated_stage


def main(descriptor):
    pipe = Connection(descriptor)
    node = Node(make_config(pipe.recv()))
    put_gates(node, Gate(pipe))
    signal.signal(signal.SIGTERM, lambda *_: node.stop())
    node.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
