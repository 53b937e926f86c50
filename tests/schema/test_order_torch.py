"""The order that is costed is the order that PyTorch runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from supernode.schema.order import rank_order


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


def passes(actions: list[Any]) -> list[tuple[int, str, int]]:
    kinds = {
        "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weights",
    }  # fmt: skip
    return [
        (a.stage_index, kinds[a.computation_type.name], a.microbatch_index)
        for a in actions
        if a and a.computation_type.name in kinds
    ]


class Recorder:
    """A stage that computes and sends nothing, and remembers what it was told to do."""

    is_last = False

    def __init__(self, index: int) -> None:
        self.stage_index, self.told = index, list[tuple[int, str, int]]()

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.told.append((self.stage_index, "forward", micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.told.append((self.stage_index, "backward", micro_batch))

    def perform_reduce_grad(self, _: int) -> None: ...

    def _nothing(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 7)])
def test_plain_orders_are_those_that_torch_runs(kind: str, pipeline: int, micro_batches: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    run = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[kind]._step_microbatches
    for rank in range(pipeline):
        stage = Recorder(rank)
        torch_rank = SimpleNamespace(
            _stage=stage, _num_stages=pipeline, _n_microbatches=micro_batches, scale_grads=False,
            _check_inputs=lambda *_: ([()] * micro_batches, [{}] * micro_batches), _initialize_stage=lambda *_: None,
            _maybe_compute_loss=lambda *_: None, _maybe_get_loss=lambda *_: None, _update_losses=lambda *_: None,
        )  # fmt: skip
        run(torch_rank)

        ours = rank_order(kind, rank=rank, pipeline=pipeline, interleave=1, micro_batches=micro_batches)
        assert [(a.stage, a.kind, a.micro_batch) for a in ours] == stage.told


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 9), (8, 8)])
def test_torch_runs_our_zero_bubble_without_a_rank_that_waits_for_ever(pipeline: int, micro_batches: int) -> None:
    pipelining = pytest.importorskip("supernode.passes.pipeline")
    stage = SimpleNamespace(num_stages=pipeline, group_size=pipeline, group_rank=0, stage_index_to_group_rank=None)
    schedule = pipelining.ZeroBubble(stage, micro_batches, scale_grads=False)

    for rank in range(pipeline):
        ours = rank_order("zero_bubble", rank=rank, pipeline=pipeline, interleave=1, micro_batches=micro_batches)
        run = schedule.pipeline_order_with_comms[rank]
        assert [(a.stage, a.kind, a.micro_batch) for a in ours] == passes(run)
        # Whatever one rank sends, its neighbour awaits in the same order, so no message meets the wrong buffer.
        for sent, got, to in (("SEND_F", "RECV_F", rank + 1), ("SEND_B", "RECV_B", rank - 1)):
            if 0 <= to < pipeline:
                there = schedule.pipeline_order_with_comms[to]
                sends, receives = (
                    [a.microbatch_index for a in order if a.computation_type.name == kind]
                    for order, kind in ((run, sent), (there, got))
                )
                assert sends == receives == list(range(micro_batches))
