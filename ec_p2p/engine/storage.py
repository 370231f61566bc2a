"""The tiers of one engine room, and the memory under them.

Owns the arena and the backend in it; closing it ends both. Must never know of tensors or identifiers: tiers speak
identities and bytes. Torch-free.
"""

from __future__ import annotations

from ec_p2p.engine.arena import Arena
from ec_p2p.engine.cpu import Listener, LocalCPUBackend
from ec_p2p.engine.extents import OnSlab
from ec_p2p.engine.policy import EvictionPolicy

GIB = 1 << 30
SLAB_BYTES = 256 << 20


class StorageManager:
    """One CPU tier of `max_local_cpu_size` bytes; several engines may share it.

    The listeners and `on_slab` are those of LocalCPUBackend.
    """

    def __init__(
        self,
        max_local_cpu_size: int = GIB,
        *,
        slab_size: int = SLAB_BYTES,
        policy: EvictionPolicy | None = None,
        on_slab: OnSlab | None = None,
        on_stored: Listener | None = None,
        on_evicted: Listener | None = None,
    ) -> None:
        self.arena = Arena.create(max_local_cpu_size, slab_size)
        try:
            self.cpu = LocalCPUBackend(
                self.arena, policy=policy, on_slab=on_slab, on_stored=on_stored, on_evicted=on_evicted
            )
        except BaseException:
            self.arena.close()
            raise

    def close(self) -> None:
        """Let go of the memory; what still views it keeps it alive. Idempotent."""
        self.arena.close()

    def __enter__(self) -> StorageManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
