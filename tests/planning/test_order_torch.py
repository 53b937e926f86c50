"""The order that is costed is the order that PyTorch runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supernode.planning.order import rank_order


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "interleave", "micro_batches"), [(2, 2, 4), (4, 2, 8), (3, 3, 6)])
def test_interleaved_order_is_that_of_torch(pipeline: int, interleave: int, micro_batches: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for rank in range(pipeline):
        torch_rank = SimpleNamespace(
            n_local_stages=interleave,
            microbatches_per_round=pipeline,
            pp_group_size=pipeline,
            _n_microbatches=micro_batches,
        )
        theirs = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(torch_rank, rank)

        ours = rank_order(
            "interleaved", rank=rank, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches
        )
        kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
        passes = [(a.stage_index, kinds[a.computation_type.name], a.microbatch_index) for a in theirs if a]
        assert [(a.stage, a.kind, a.micro_batch) for a in ours] == passes
