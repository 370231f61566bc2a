"""What is played where the real thing cannot be brought into a state on demand: the other end of a wire, and a disk.

The arena, the index, the records and the threads are real.
"""

from __future__ import annotations

import select
import threading

from ec_p2p.control.messages import Advert, NodeInfo
from ec_p2p.engine.filed import Filed
from ec_p2p.engine.generation import RECORD_BYTES, Record, pack
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.tally import Tally
from ec_p2p.node.fetch import Fetches
from ec_p2p.node.fetch_policy import EncodeTimes, FetchPolicy
from ec_p2p.node.leases import Leases
from ec_p2p.node.mailbox import Mailbox
from ec_p2p.node.memory import Memory
from ec_p2p.node.peers import PeerState
from ec_p2p.node.rates import Rates
from ec_p2p.node.staging import Staging
from ec_p2p.node.wants import Wants
from ec_p2p.transport.interface import State, TransportError

from .conftest import until

A, B, C, D, E = (bytes([number]) * 32 for number in range(1, 6))
MIB = 1 << 20
PAYLOAD = 4096
"""Where every payload is at its holder; records are below."""


def advert(identity=A, rows=1, dim=64, dtype="bfloat16", nbytes=None, generation=7, state=1):
    nbytes = rows * dim * 2 if nbytes is None else nbytes
    return Advert(identity, state, nbytes, rows, dim, dtype, PAYLOAD, 0, generation)


def holder(number, what):
    return NodeInfo(number.to_bytes(16, "big"), f"node{number}", "tcp://127.0.0.1:1"), what


class Reading:
    peer = error = ""
    unposted = 0

    def __init__(self, state):
        self.state = state
        self.let_go = True

    def poll(self):
        return self.state

    def release(self):
        return self.let_go


class Wire:
    """A transport and its peers. `record` is what every holder's record says, but for `records`, by their places."""

    kind = "played"

    def __init__(self, arena, record):
        self.arena = arena
        self.record = record
        self.records = {}
        self.state = State.DONE
        self.peer_state = PeerState.READY
        self.takes_requests = True
        self.reads = []
        """(peer, spans) of every READ."""
        self.readings = []
        self.asked = []

    def read(self, peer, spans):
        if self.state is None:
            raise TransportError("refused")
        self.reads.append((peer, list(spans)))
        for span in spans:
            if span.remote < PAYLOAD:
                places = range(span.remote, span.remote + span.nbytes, RECORD_BYTES)
                records = b"".join(self.records.get(place, self.record) for place in places)
                self.arena.buffer[span.local : span.local + span.nbytes] = records
        self.readings.append(Reading(self.state))
        return self.readings[-1]


class Peers:
    def __init__(self, wire):
        self.wire = wire

    def get(self, incarnation):
        return None if self.wire.peer_state is None else Peer(self.wire, incarnation)

    def ask(self, peer, now):
        pass

    def stage(self, peer, identity):
        if self.wire.takes_requests:
            self.wire.asked.append((peer.info.name, identity))
        return self.wire.takes_requests


class Peer:
    def __init__(self, wire, incarnation):
        self.state = wire.peer_state
        self.info, _ = holder(int.from_bytes(incarnation, "big"), None)

    def covers(self, advert):
        return True


class Disk:
    """Holds every entry there is, of `nbytes` bytes. Reads and looks end when they are let."""

    def __init__(self):
        self.nbytes = 128
        self.there = True
        """Whether an entry is found by those who ask what is known."""
        self.right = True
        """Whether it is found by those who read it."""
        self.dtype = "bfloat16"
        self.begun = []
        self._passed = 0
        self._let = threading.Condition()

    def find(self, identity):
        return Filed(identity, self.nbytes, 1, self.nbytes // 2, self.dtype) if self.there else None

    find_readable = find

    def look(self, identity):
        self._wait(identity)

    def read(self, identity, into):
        self._wait(identity)
        into[:] = b"\x05" * len(into)
        return Filed(identity, len(into), 1, len(into) // 2, self.dtype) if self.right else None

    def let(self, count=1000):
        """Let so many of the reads and looks end, in the order in which they began, those to come included."""
        with self._let:
            self._passed += count
            self._let.notify_all()

    def _wait(self, identity):
        with self._let:
            self.begun.append(identity)
            number = len(self.begun)
            self._let.wait_for(lambda: number <= self._passed)


class Rig:
    """A node's fetches and stagings over one arena of one slab, with nobody else in it. Time is what it is told."""

    def __init__(self, record=None, nbytes=MIB, slab=MIB, **listeners):
        self.storage = StorageManager(nbytes, slab_size=slab, **listeners)
        self.disk = self.storage.disk = Disk()
        self.arena, self.backend = self.storage.arena, self.storage.cpu
        self.memory = Memory(self.backend)
        self.mailbox = Mailbox()
        self.counters = Tally()
        self.now = 0.0
        self.rates = Rates(lambda: self.now)
        self.wire = Wire(self.arena, record or pack(Record(7, A, 128, 1, 64, "bfloat16")))
        self.heard, self.landed, self.failed = [], [], []
        self.unwanted = set()
        self.fetches = Fetches(
            self.memory,
            self.arena.buffer,
            self.wire,
            Peers(self.wire),
            self.rates,
            self.counters,
            2.0,
            self.on_landed,
            self.on_failed,
            self.still_wanted,
        )
        self.staging = Staging(
            self.storage,
            self.memory,
            self.mailbox,
            self.counters,
            2.0,
            self.on_staged,
            self.on_not_staged,
            self.on_looked,
            self.still_wanted,
        )

    def on_landed(self, landed):
        self.landed += [entry for entry, _ in landed]

    def on_failed(self, identity, reason):
        self.failed.append((identity, reason))

    def on_staged(self, entry, started_at):
        self.heard.append(("staged", entry.identity))

    def on_not_staged(self, identity, reason):
        self.heard.append((reason, identity))

    def on_looked(self, identity):
        self.heard.append(("looked", identity))

    def still_wanted(self, identity):
        return identity not in self.unwanted

    def start(self, *holders, identity=A, now=0.0, until=10.0):
        """Have an entry fetched, as far as that goes at once."""
        self.fetches.start({identity: list(holders)}, now, until)
        self.fetches.turn(now)

    def bring(self, *identities, now=10.0, until=100.0):
        """Have entries staged, as far as that goes at once."""
        for identity in identities:
            assert self.staging.bring(identity, now, until)
        self.staging.turn(now)

    def turn(self, now):
        """What the node's loop does at a turn with a tick."""
        if select.select([self.mailbox.fd], [], [], 0)[0]:
            self.mailbox.run()
        self.fetches.progress(now)
        self.staging.progress(now)
        self.fetches.turn(now)
        self.staging.turn(now)
        self.memory.progress(now)

    def until(self, condition, now=11.0):
        def turned():
            self.turn(now)
            return condition()

        until(turned)

    def begun(self, count):
        """Wait until so many jobs are on threads; returns what they are for."""
        until(lambda: len(self.disk.begun) == count)
        return self.disk.begun

    def everything(self):
        """All the memory there is."""
        return self.memory.reserve(self.backend.largest_entry)

    def close(self):
        self.disk.let()
        self.fetches.close()
        self.staging.close()
        self.storage.disk = None
        self.mailbox.close()
        self.storage.close()


class WantingRig(Rig):
    """A rig whose fetches and stagings are for the wants of clients, wired as a node's are. Nothing is on its disk."""

    def __init__(self):
        super().__init__()
        self.disk.there = False
        self.leases = Leases()
        self.encode_times = EncodeTimes()
        self.holders_of = {}
        self.encoders_of = {}
        self.encoding = set()

    def serve(self, device_reads, send, policy="always"):
        """`send(session, message)` gets what clients are told."""
        self.wants = Wants(
            self.backend,
            self.staging,
            self.fetches,
            device_reads,
            self.leases,
            self,
            FetchPolicy(policy, self.rates, self.encode_times),
            self.counters,
            lambda entry: None,
            send,
            lambda session, readers: True,
        )

    # what is known of the fleet

    def holders(self, identity):
        return self.holders_of.get(identity, [])

    def encoded_here(self, identity, instance):
        return identity in self.encoding

    def encoders(self, identity):
        return self.encoders_of.get(identity, [])

    def in_vain(self, holder):
        return self.rates.silent_lately(holder[0].incarnation)

    # what the parts hear of each other

    def on_landed(self, landed):
        self.wants.landed(landed, "remote")

    def on_failed(self, identity, reason):
        self.wants.failed(identity, reason, self.now)

    def on_staged(self, entry, started_at):
        self.wants.landed([(entry, started_at)], "disk")

    def on_not_staged(self, identity, reason):
        self.wants.not_staged(identity, reason, self.now)

    def on_looked(self, identity):
        self.wants.changed(identity, self.now)

    def still_wanted(self, identity):
        return self.wants.wanted(identity)
