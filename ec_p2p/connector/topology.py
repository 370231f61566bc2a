"""Where a process stands in its engine: which instance it belongs to, which of its workers saves, which read.

Owns the arithmetic of ranks. All tensor- and context-parallel ranks of the first pipeline stage hold the whole encoder
output; later stages have no encoder cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class WorkerRank(NamedTuple):
    reader: int
    """Position among the workers that copy each entry; -1 on a later pipeline stage, which copies none."""
    saves: bool


def instance_of(vllm_config: Any) -> str:
    """Equal in the scheduler and the workers of one engine, different between data-parallel ranks."""
    return f"{vllm_config.ec_transfer_config.engine_id}/dp{vllm_config.parallel_config.data_parallel_index}"


def role_of(vllm_config: Any) -> str:
    """'producer', 'consumer' or 'both'."""
    return str(vllm_config.ec_transfer_config.ec_role).removeprefix("ec_")


def readers_of(vllm_config: Any) -> int:
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1))


def worker_rank(vllm_config: Any) -> WorkerRank:
    """Of the calling process. Without vLLM's process groups (in tests) the process is the only one."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return WorkerRank(0, True)
    if not parallel_state.get_pp_group().is_first_rank:
        return WorkerRank(-1, False)
    tensor = parallel_state.get_tp_group().rank_in_group
    context = parallel_state.get_pcp_group().rank_in_group if hasattr(parallel_state, "get_pcp_group") else 0
    reader = context * vllm_config.parallel_config.tensor_parallel_size + tensor
    return WorkerRank(reader, reader == 0)
