"""A rank's stages in PyTorch's pipeline runtime: which schedule runs them, and what flows between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from supernode.parallel.assemble import DTYPES, Parts
from supernode.parallel.mesh import Place
from supernode.schema.plan import Plan, Stage

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}


class _Stage(PipelineStage):
    """A stage whose trial run, by which torch learns what flows, leaves no trace in its buffers.

    Where inputs and outputs are not given, torch 2.13 sends the first micro-batch of each launch through the module
    once more, and batch norms would count it twice.
    """

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        kept = [(buffer, buffer.clone()) for buffer in self.submod.buffers()]
        flow = super()._forward_metadata_inference(*args, **kwargs)
        for buffer, before in kept:
            buffer.data.copy_(before)  # Past autograd, which still wants the trial's graph.
        return flow


def build_schedule(plan: Plan, place: Place, parts: Parts, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return the schedule that runs this rank's stages; losses are summed, gradients are left unscaled."""
    group = place.group("pipeline")
    stages = [
        _Stage(module, stage.index, len(plan.stages), torch.device("cpu"), group=group, **_flow(plan, place, stage))
        for stage, module in parts.stages
    ]
    kind = SCHEDULES[plan.layout.schedule]
    given = stages if plan.layout.schedule == "interleaved" else stages[0]
    return kind(given, n_microbatches=plan.micro_batches, loss_fn=loss, scale_grads=False)


def _flow(plan: Plan, place: Place, stage: Stage) -> dict[str, Any]:
    """Return example inputs and outputs of a decoder's stage, so that nothing has to be tried out at the start."""
    shape = plan.job.shape
    if shape is None:
        return {}
    dtype, tokens = DTYPES[plan.job.precision], plan.job.data.sequence // place.layout.context
    apart = tokens // (place.layout.tensor if place.layout.sequence else 1)
    stream = torch.empty(plan.micro_batch, apart, shape.width, dtype=dtype, device="meta", requires_grad=True)
    numbers = torch.empty(plan.micro_batch, tokens, dtype=torch.int64, device="meta")
    part = -(-plan.vocabulary // place.layout.tensor)  # as `torch.chunk` cuts it
    width = max(0, min(part, plan.vocabulary - place.tensor * part))
    logits = torch.empty(plan.micro_batch, tokens, width, dtype=dtype, device="meta", requires_grad=True)
    inputs, outputs = (numbers if stage.embeds else stream), (logits if stage.heads else stream)
    return {
        "input_args": inputs,
        "output_args": outputs,
        "input_grads": None if stage.embeds else stream.detach(),
        "output_grads": None if stage.heads else stream.detach(),
    }
