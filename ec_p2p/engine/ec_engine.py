"""The encoder cache as a library: tensors in, tensors out, by the hash of a media item.

Owns the meaning of `contains`, `put` and `get`, and the one copy that each of the latter makes. Must never hand out
memory of the engine, nor know of vLLM, nodes or transports.
"""

from __future__ import annotations

import torch

from ec_p2p.config import Config
from ec_p2p.engine.cpu import OutOfMemory, TooLarge
from ec_p2p.engine.disk import CLOSE_S
from ec_p2p.engine.entry import layout_of
from ec_p2p.engine.storage import StorageManager
from ec_p2p.engine.views import copy_in, copy_out, dtype_name, dtype_of
from ec_p2p.identity import CacheEngineKey, identities_in, stable_u64


class ECCacheEngine:
    """Encoder outputs of one model, each a (tokens, dim) tensor of `encoder_dtype`. Any thread may call.

    Entries live in `storage_manager`, which other engines may share and which its maker closes; without one the engine
    makes its own, as `config` says (`load_ec_engine_config()` reads one; None: the defaults). Engines with equal
    `namespace` see each other's entries; it stands for everything that changes an embedding. Empty: the model's name
    and the dtype.
    """

    def __init__(
        self,
        model_name: str,
        encoder_dtype: torch.dtype,
        *,
        namespace: str = "",
        storage_manager: StorageManager | None = None,
        config: Config | None = None,
    ) -> None:
        self.model_name = model_name
        self.encoder_dtype = encoder_dtype
        self._dtype_name = dtype_name(encoder_dtype)
        self.namespace = namespace or f"{model_name}@{self._dtype_name}"
        self._identity_of = identities_in(self.namespace)
        self._owns_storage = storage_manager is None
        self.storage_manager = StorageManager.of(config or Config()) if storage_manager is None else storage_manager
        self._closed = False

    def key(self, mm_hash: str) -> CacheEngineKey:
        """What people call the entry; it is found by its identity, never by this."""
        return CacheEngineKey(self.model_name, 1, 0, stable_u64(mm_hash), self.encoder_dtype)

    def identity(self, mm_hash: str) -> bytes:
        """What the entry is found by, in every tier."""
        return self._identity_of(mm_hash)

    def contains(self, mm_hash: str) -> bool:
        """Whether a `get` right now would find the entry, in memory or on disk.

        A damaged file is found out by reading it: then `get` says None, and from then on this says False.
        """
        return self._storage().contains(self._identity_of(mm_hash))

    def put(self, mm_hash: str, tensor: torch.Tensor) -> bool:
        """Copy a (tokens, dim) tensor in, from any device, cast to `encoder_dtype` in the same copy.

        True: it is stored, or was before. While a key is in memory its first put wins and further ones copy nothing;
        what only the disk holds any more is copied in again, if there is room. False: no memory, either because what is
        in use leaves too little or because the tensor is larger than any extent; nothing was evicted. When it returns,
        the tensor may be overwritten; it never waits for the disk, to which the entry goes behind it. Raises ValueError
        unless the tensor is 2-D, with less than 2**32 of either.
        """
        shape = tensor.shape
        if len(shape) != 2:
            raise ValueError(f"cannot store {mm_hash!r}: its tensor has shape {tuple(shape)}; accepted: (tokens, dim)")
        storage, identity = self._storage(), self._identity_of(mm_hash)
        cpu = storage.cpu
        entry = cpu.get(identity)
        if entry is not None:
            storage.offer(entry)
            return True
        # What can be done before the copy is: it leaves the processor's caches cold.
        layout = layout_of(*shape, self._dtype_name)
        try:
            extent = cpu.reserve(layout.nbytes)
        except (TooLarge, OutOfMemory):
            return storage.disk is not None and storage.disk.find(identity) is not None
        try:
            copy_in(cpu.arena, extent.offset, tensor, self.encoder_dtype)
        except BaseException:
            cpu.release(extent)
            raise
        cpu.publish_as(extent, identity, layout)
        return True

    def get(self, mm_hash: str, device: str | torch.device = "cpu") -> torch.Tensor | None:
        """A fresh copy of the entry on `device`, or None if there is none. Waits for the disk if it is only there."""
        storage, identity = self._storage(), self._identity_of(mm_hash)
        try:
            pin = storage.borrow(identity)
        except (OutOfMemory, TooLarge):
            return self._get_past_the_arena(identity, device)
        if pin is None:
            return None
        with pin:
            entry = pin.entry
            # Two numbers, since torch takes 4 us to understand a tuple of them.
            tensor = torch.empty(entry.rows, entry.dim, dtype=dtype_of(entry.dtype), device=device)
            copy_out(storage.arena, entry.offset, tensor)
            return tensor

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was put before is on disk. False: not within `timeout_s`. At once without a disk tier."""
        return self._storage().flush(timeout_s)

    def close(self, timeout_s: float | None = CLOSE_S) -> None:
        """Write what waits to be written and free the memory, if that is the engine's own. Idempotent; later calls of
        the rest raise ValueError. Waits for the disk for at most `timeout_s`, as StorageManager.close does."""
        if self._closed:
            return
        self._closed = True
        if self._owns_storage:
            self.storage_manager.close(timeout_s)

    def __enter__(self) -> ECCacheEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _get_past_the_arena(self, identity: bytes, device: str | torch.device) -> torch.Tensor | None:
        """What is on disk, where the arena has no room: what `contains` promised must not depend on others' pins."""
        found = self._storage().read_outside(identity)
        if found is None:
            return None
        filed, payload = found
        tensor = torch.empty((filed.rows, filed.dim), dtype=dtype_of(filed.dtype))
        if payload:
            tensor.view(torch.uint8).view(-1).copy_(torch.frombuffer(payload, dtype=torch.uint8))
        return tensor.to(device)

    def _storage(self) -> StorageManager:
        if self._closed:
            raise ValueError("the engine is closed")
        return self.storage_manager
