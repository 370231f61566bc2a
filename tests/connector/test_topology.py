"""Which worker is which."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.distributed import parallel_state

from ec_p2p.connector.topology import WorkerRank, instance_of, readers_of, role_of, worker_rank


def config(dp=0, tp=1, pcp=1):
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(engine_id="e"),
        parallel_config=SimpleNamespace(
            data_parallel_index=dp, tensor_parallel_size=tp, prefill_context_parallel_size=pcp
        ),
    )


def test_data_parallel_ranks_are_instances_of_their_own():
    assert instance_of(config(dp=0)) != instance_of(config(dp=1))
    assert readers_of(config(tp=4, pcp=2)) == 8


def test_without_process_groups_the_process_is_the_only_worker():
    assert worker_rank(config()) == WorkerRank(0, True)


@pytest.mark.parametrize(
    ("first_stage", "tp", "pcp", "expected"),
    [
        (True, 0, 0, WorkerRank(0, True)),
        (True, 1, 0, WorkerRank(1, False)),
        (True, 0, 1, WorkerRank(2, False)),
        (True, 1, 1, WorkerRank(3, False)),
        (False, 0, 0, WorkerRank(-1, False)),
    ],
)
def test_readers_are_numbered_within_the_first_stage(monkeypatch, first_stage, tp, pcp, expected):
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(is_first_rank=first_stage))
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(rank_in_group=tp))
    monkeypatch.setattr(parallel_state, "get_pcp_group", lambda: SimpleNamespace(rank_in_group=pcp))
    assert worker_rank(config(tp=2, pcp=2)) == expected


@pytest.mark.parametrize(
    ("ec_role", "role"), [("ec_producer", "producer"), ("ec_consumer", "consumer"), ("ec_both", "both")]
)
def test_an_instance_has_a_role(ec_role, role):
    assert role_of(SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_role=ec_role))) == role
