"""The worker's side: encoder outputs into the node, promised ones out of it.

Owns the worker's client of the node, the threads that keep it attached and tell it what a device has copied, and the
leases of loads until their copies are over. It must never let a tensor of vLLM's encoder cache alias the arena, nor
release a lease while a device may still read. A promised load that cannot be done is the one error that leaves here:
vLLM has no way back.

    promised -> copy enqueued, in encoder_cache -> its mark has passed -> lease released
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ec_p2p.connector.metadata import ECP2PMetadata
from ec_p2p.connector.settler import Settler
from ec_p2p.connector.topology import WorkerRank
from ec_p2p.node.client import NodeClient
from ec_p2p.node.device import PASSED, Device, Mark, device_for
from ec_p2p.node.lander import Lander
from ec_p2p.node.messages import SaveSkipped
from ec_p2p.node.tensors import Loader, Place, Saver

logger = logging.getLogger("vllm.ec_p2p")

KEEP_S = 1.0
"""How often an idle worker looks whether its node is still there, and attaches to the next one if not."""
CLOSE_S = 10.0
"""A device that is not done with its copies by then never will be."""

_POLL_S = 0.001

EncoderCache = dict[str, torch.Tensor]


class WorkerSide:
    """Worker hooks of one rank of the first pipeline stage, of an instance that shares.

    The node's client belongs to one thread at a time: to the one that holds the lock.
    """

    def __init__(
        self,
        client: NodeClient,
        saver: Saver,
        loader: Loader,
        rank: WorkerRank,
        *,
        fetches: bool,
        on_error: Callable[[str, Exception], None],
        device: Callable[[], torch.device | str],
        make_lander: Callable[[Device], Lander] | None = None,
    ) -> None:
        """`make_lander`: for the setting `landing: device`."""
        self._client = client
        self._saver = saver
        self._loader = loader
        self._rank = rank
        self._fetches = fetches
        self._on_error = on_error
        self._device = device
        self._make_lander = make_lander
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._settler = Settler(self._settle_all, lambda error: on_error("settler", error))
        self._reading: list[tuple[Place, Mark]] = []
        """What a device may still read of the arena."""
        with self._lock:
            # A node that has to be started comes up while the model loads.
            client.attach()

    def start(self, timeout_s: float) -> None:
        """Wait for the node, at most `timeout_s`, and stay attached from now on."""
        with self._lock:
            if not self._client.attach(timeout_s):
                logger.warning("no node after %.0f s: going on without sharing, trying further", timeout_s)
            self._prepare()
            self._land_on_device()
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_attached, name="ec-p2p-keeper", daemon=True)
            self._keeper.start()

    def before_model(self, encoder_cache: EncoderCache, step: ECP2PMetadata) -> None:
        """Do this step's loads, then publish what is resident. Raises RuntimeError if a load cannot be done."""
        if not (step.loads or step.saves_resident or step.encodes or self._reading):
            return
        with self._lock, _sync_allowed():
            try:
                self._prepare()
            except Exception as error:
                # Only a lost load may end the engine.
                self._on_error("prepare", error)
            self._load(encoder_cache, step.loads)
            if self._rank.saves:
                for identifier, identity in step.saves_resident.items():
                    tensor = encoder_cache.get(identifier)
                    if tensor is not None:
                        self._save(identity, tensor)

    def save(self, encoder_cache: EncoderCache, identifier: str, step: ECP2PMetadata) -> None:
        """Publish one encoder output. When this returns, vLLM may drop it."""
        identity = step.encodes.get(identifier)
        if identity is None or not self._rank.saves:
            return
        with self._lock, _sync_allowed():
            outcome = self._save(identity, encoder_cache[identifier])
        if outcome != "saved":
            logger.debug("the encoder output of %.64r is not shared: %s", identifier, outcome)

    def close(self) -> None:
        """Let everything that a device still copies end well, then leave the node. Idempotent."""
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            done = self._saver.close(CLOSE_S)
            while self._release_read() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            # To the node, a client that leaves has no copies under way: the link then ends with the process.
            if done and not self._reading:
                self._end_landing()
                self._client.close()
            else:
                logger.warning("a device is not done with its copies after %.0f s: not waiting for it", CLOSE_S)
        self._settler.close()

    # -------------------------------------------------------- inside

    def _land_on_device(self) -> None:
        """Once the device is known. Without a lander, what is fetched lands in the node's arena."""
        if self._make_lander is None or self._loader.lander is not None:
            return
        try:
            self._loader.lander = self._make_lander(device_for(self._device()))
        except Exception as error:
            self._on_error("lander", error)

    def _end_landing(self) -> None:
        try:
            if self._loader.lander is not None:
                self._loader.lander.close()
        except Exception as error:
            self._on_error("lander", error)

    def _prepare(self) -> None:
        self._release_read()
        if self._rank.saves:
            self._saver.prepare()
        else:
            self._client.attach()
            self._client.poll()

    def _save(self, identity: bytes, tensor: torch.Tensor) -> str:
        try:
            outcome = self._saver.save(identity, tensor)
            if self._saver.copying is not None:
                self._settler.wake()
            return outcome
        except Exception as error:
            # Told to the node, which tells the scheduler: a worker's own counts do not reach vLLM's metrics.
            self._client.send(SaveSkipped("error", identity))
            self._on_error("save", error)
            return "error"

    def _load(self, encoder_cache: EncoderCache, loads: Iterable[tuple[str, Place]]) -> None:
        failed: list[str] = []
        for identifier, place in loads:
            read = PASSED
            try:
                if identifier not in encoder_cache:
                    encoder_cache[identifier], read = self._loader.load(place, self._device())
            except Exception as error:
                self._on_error("load", error)
                failed.append(f"{identifier!r:.64}: {error}")
            self._reading.append((place, read))
        self._release_read()
        if failed and self._fetches:
            raise RuntimeError(f"promised embeddings cannot be loaded: {'; '.join(failed)}")

    def _release_read(self) -> bool:
        """Release the leases of copies that are over. Never waits. True: some are not."""
        reading = []
        for place, mark in self._reading:
            try:
                if not mark.passed():
                    reading.append((place, mark))
                    continue
            except RuntimeError as error:
                # It may never read again, or it may: the lease ends with this worker.
                self._on_error("release", error)
                continue
            # Leases are numbers of one node's life: to the next node this one would mean something else.
            if place.incarnation == self._client.incarnation:
                self._client.release(place.lease, self._rank.reader)
        self._reading = reading
        return bool(reading)

    def _settle_all(self) -> Mark | None:
        with self._lock:
            self._release_read()
            self._saver.settle()
            return self._saver.copying

    def _keep_attached(self) -> None:
        """Model Runner V1 calls no hook while an engine is idle or waits for embeddings only: without this, an engine
        that gets nothing but placeholders would never meet its next node."""
        while not self._stop.wait(KEEP_S):
            try:
                with self._lock:
                    self._prepare()
            except Exception as error:
                self._on_error("keeper", error)


def current_device() -> torch.device | str:
    """Where vLLM's model runner keeps its encoder cache in this process."""
    from vllm.platforms import current_platform

    kind: str = current_platform.device_type
    return f"{kind}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else kind


def _sync_allowed() -> AbstractContextManager[Any]:
    """vLLM can be told to object to copies that wait for the device; ours have to."""
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ImportError:
        return nullcontext()
    allowed: AbstractContextManager[Any] = gpu_sync_allowed()
    return allowed
