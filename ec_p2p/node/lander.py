"""Landing entries straight in the memory of one worker's device, as the node says.

Owns the device's landing memory, a NIXL agent that reads into it, and the thread that does so, with a link to the node
of its own. It must never choose what to read, nor touch what a worker may still copy: that is between the node, which
gives the leases, and their readers.

    ReadEntry --room for it--> READING --arrived, same generation and identity--> LANDED --DropEntry--> (free)
    ReadEntry --no room--> (told)
    READING --failed, late, changed--> (told, free)
    READING --DropEntry, the node is gone--> UNWANTED --ended--> (free)
    LANDED --the node is gone--> ORPHANED --a minute after attaching to the next--> (free)

What a node has promised can be loaded when it is gone, too; so what has landed is kept for a while. Without a next node
nobody needs its room.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

import msgspec
import torch

from ec_p2p.config import Config
from ec_p2p.engine.extents import Extent
from ec_p2p.engine.generation import proves
from ec_p2p.engine.tally import Tally
from ec_p2p.node.at_exit import close_at_exit
from ec_p2p.node.client import OLD_ARENA_S, Detached, NodeClient
from ec_p2p.node.device import Device
from ec_p2p.node.device_pool import DevicePool
from ec_p2p.node.messages import DropEntry, FromNode, PeerCard, PeerGone, Quarantined, ReadEnded, ReadEntry
from ec_p2p.node.network import hosts, interconnect_of
from ec_p2p.node.pacing import TICK_S, nap_s
from ec_p2p.node.rates import Rates
from ec_p2p.node.transfers import STUCK, Leg, Transfers
from ec_p2p.transport.interface import TransportError
from ec_p2p.transport.nixl import NixlTransport

logger = logging.getLogger(__name__)

_QUARANTINE_SHARE = 4
_JOIN_S = 10.0

_NEVER = float("inf")


def _landing_memory(config: Config, device: Device) -> DevicePool:
    if not device.kind:
        raise RuntimeError("landing=device: NIXL has no word for the memory of this worker's device")
    try:
        return DevicePool(device, config.landing_size)
    except RuntimeError as error:
        raise RuntimeError(f"landing_size={config.landing_size}: the device has no room for it: {error}") from error


def _transport(config: Config, device: Device, pool: DevicePool) -> NixlTransport:
    """It takes the pool's table for its arena, and the device's memory for what lies beyond."""
    _, bind_host = hosts(config)
    transport = NixlTransport(
        f"lander-{os.urandom(8).hex()}",
        pool.table_address,
        pool.table_bytes,
        bind_host=bind_host,
        interconnect=interconnect_of(config),
    )
    try:
        transport.register(0, pool.table_bytes)
        transport.register_beyond(pool.memory.data_ptr(), pool.memory.nbytes, device.kind, device.index)
    except TransportError:
        transport.close()
        raise
    return transport


class Stage(Enum):
    READING = "being read"
    LANDED = "landed"
    ORPHANED = "landed, of a node that is gone"
    UNWANTED = "being read for nobody"


class Landing:
    """One entry in the pool, or on its way there."""

    __slots__ = ("entry", "extent", "key", "stage", "until")

    def __init__(self, incarnation: bytes, entry: ReadEntry, extent: Extent) -> None:
        self.key = (incarnation, entry.read)
        self.entry = entry
        self.extent = extent
        self.stage = Stage.READING
        self.until = _NEVER


class Lander:
    """Of one reader of one instance, on `device`, of whose memory `landing_size` is taken at once.

    The constructor raises RuntimeError when the device has no such memory, or none that NIXL knows, and TransportError
    where there is no NIXL. `view` may be called from any thread."""

    def __init__(
        self,
        config: Config,
        instance: str,
        reader: int,
        device: Device,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self._device = device
        self._pool = _landing_memory(config, device)
        device.mark().wait()
        self._transport = _transport(config, device, self._pool)
        self._client = NodeClient(msgspec.structs.replace(config, spawn_node=False), "lander", instance, reader)
        self._on_error = on_error
        self._counters = Tally()
        self._transfers: Transfers[Landing] = Transfers(
            self._transport,
            self._pool.release,
            Rates(),
            self._counters,
            config.read_timeout_s,
            lambda: config.landing_size // _QUARANTINE_SHARE,
            self._arrived,
            self._broken,
        )
        self._landings: dict[tuple[bytes, int], Landing] = {}
        self._peers: set[bytes] = set()
        self._unusable: dict[bytes, bytes] = {}
        """Cards, by peer, that were of no use: a node tells them again."""
        self._told_bytes = self._told_entries = 0
        """In quarantine now, and put there so far, as far as nodes know."""
        self._next_tick = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ec-p2p-lander", daemon=True)
        self._thread.start()
        self._call_off_exit = close_at_exit(self.close)

    def view(self, incarnation: bytes, read: int) -> torch.Tensor:
        """A (rows, dim) tensor that aliases what has landed: copy it before the lease is released. LookupError where
        nothing has."""
        landing = self._landings.get((incarnation, read))
        if landing is None or landing.stage not in (Stage.LANDED, Stage.ORPHANED):
            raise LookupError(f"READ {read} of node incarnation {incarnation.hex()[:8]} has not landed here")
        return self._pool.view(landing.extent, landing.entry.rows, landing.entry.dim, landing.entry.dtype)

    @property
    def free_bytes(self) -> int:
        """Of the device's landing memory."""
        return self._pool.free_bytes

    def close(self) -> None:
        """Nothing is read any more. Views must not be used after this. Idempotent."""
        self._call_off_exit()
        self._stop.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning("the library is still busy after %.0f s: what it may write to stays as it is", _JOIN_S)
            return
        self._client.close()
        self._transfers.close()
        self._transport.close()

    # -------------------------------------------------------- the thread

    def _run(self) -> None:
        self._device.use()
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception as error:
                self._on_error("lander", error)
                self._stop.wait(TICK_S)

    def _turn(self) -> None:
        """Sleep until the node says something, or what is in flight may have ended, and see to it."""
        if not self._client.attach():
            self._stop.wait(TICK_S)
        since = self._transfers.newest_posted_at
        if since:
            time.sleep(nap_s(time.monotonic() - since))
        messages = self._client.poll(0.0 if since else TICK_S)
        # What the next node says comes before the end of the one before it.
        for message in sorted(messages, key=lambda message: not isinstance(message, Detached)):
            try:
                self._hear(message)
            except Exception as error:  # of this one: nobody will say the others again
                self._on_error("lander", error)
                if isinstance(message, ReadEntry):
                    self._answer(message, "error")
        now = time.monotonic()
        self._transfers.turn(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)

    def _tick(self, now: float) -> None:
        self._transport.progress()
        self._transfers.settle()
        self._tell_quarantine()
        for key, landing in list(self._landings.items()):
            if now >= landing.until:
                self._free(key)
            elif landing.stage is Stage.ORPHANED and landing.until == _NEVER and self._client.incarnation:
                landing.until = now + OLD_ARENA_S

    # -------------------------------------------------------- what the node says

    def _hear(self, message: FromNode | Detached) -> None:
        match message:
            case PeerCard():
                self._meet(message)
            case PeerGone():
                self._transport.forget(message.peer.hex())
                self._peers.discard(message.peer)
                self._unusable.pop(message.peer, None)
            case ReadEntry():
                self._read(message)
            case DropEntry():
                self._drop((self._client.incarnation, message.read))
            case Detached():
                self._orphan(message.incarnation)

    def _meet(self, card: PeerCard) -> None:
        try:
            self._transport.connect(card.peer.hex(), card.blob)
            self._peers.add(card.peer)
            self._unusable.pop(card.peer, None)
        except TransportError as error:
            level = logging.DEBUG if self._unusable.get(card.peer) == card.blob else logging.WARNING
            logger.log(level, "nothing of node incarnation %s lands on the device: %s", card.peer.hex()[:8], error)
            self._unusable[card.peer] = card.blob

    def _read(self, entry: ReadEntry) -> None:
        if self._transfers.stuck(entry.peer):
            self._answer(entry, STUCK)
            return
        extent = self._pool.reserve(entry.nbytes)
        if extent is None:
            self._answer(entry, "no_memory")
            return
        landing = Landing(self._client.incarnation, entry, extent)
        self._landings[landing.key] = landing
        self._transfers.add(entry.peer, Leg(landing, extent, entry.offset, entry.record, entry.nbytes))

    def _drop(self, key: tuple[bytes, int]) -> None:
        landing = self._landings.get(key)
        if landing is None:
            return
        if landing.stage is Stage.READING:
            landing.stage = Stage.UNWANTED
            del self._landings[key]
        else:
            self._free(key)

    def _orphan(self, incarnation: bytes) -> None:
        for key in [key for key in self._landings if key[0] == incarnation]:
            landing = self._landings[key]
            if landing.stage is Stage.READING:
                self._drop(key)
            else:
                landing.stage = Stage.ORPHANED
        for peer in self._peers:
            self._transport.forget(peer.hex())
        self._peers.clear()
        self._unusable.clear()
        self._told_bytes = 0

    # -------------------------------------------------------- what became of a READ

    def _arrived(self, legs: deque[Leg[Landing]], now: float) -> None:
        while legs:
            leg = legs.popleft()
            landing, extent = leg.owner, leg.extent
            entry = landing.entry
            if landing.stage is Stage.UNWANTED:
                self._pool.release(extent)
            elif not proves(self._pool.landed_record(extent), entry.generation, entry.identity, entry):
                self._broken(landing, "changed", extent, now)
            else:
                landing.stage = Stage.LANDED
                self._answer(entry, "")

    def _broken(self, landing: Landing, why: str, extent: Extent | None, now: float) -> None:
        """`extent` is None while it is in quarantine."""
        if extent is not None:
            self._pool.release(extent)
        if landing.stage is not Stage.UNWANTED:
            del self._landings[landing.key]
            self._answer(landing.entry, why)

    def _answer(self, entry: ReadEntry, reason: str) -> None:
        self._client.send(ReadEnded(entry.read, reason))

    def _tell_quarantine(self) -> None:
        nbytes, entries = self._transfers.quarantined_bytes, int(self._counters.get("quarantined"))
        if (nbytes, entries) == (self._told_bytes, self._told_entries):
            return
        if self._client.send(Quarantined(nbytes, entries - self._told_entries)):
            self._told_bytes, self._told_entries = nbytes, entries

    def _free(self, key: tuple[bytes, int]) -> None:
        self._pool.release(self._landings.pop(key).extent)
