"""A rank's stages in PyTorch's pipeline runtime: which schedule runs them, and what flows between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from supernode.parallel.assemble import DTYPES, Parts
from supernode.parallel.mesh import Place
from supernode.passes.pace import PassClock
from supernode.schema.order import rank_order
from supernode.schema.plan import Plan, Stage


class ZeroBubble(_PipelineScheduleRuntime):
    """Runs `schema.order`'s zero_bubble, one stage a rank, in torch's runtime, which takes any order of passes."""

    KINDS: ClassVar = {
        "forward": _ComputationType.FORWARD,
        "backward": _ComputationType.BACKWARD_INPUT,
        "weights": _ComputationType.BACKWARD_WEIGHT,
    }

    def __init__(self, stage: PipelineStage, n_microbatches: int, **settings: Any) -> None:
        super().__init__([stage], n_microbatches, **settings)
        pipeline = stage.num_stages
        for rank in range(pipeline):
            order = rank_order(
                "zero_bubble", rank=rank, pipeline=pipeline, interleave=1, micro_batches=n_microbatches
            )  # fmt: skip
            self.pipeline_order[rank] = [_Action(a.stage, self.KINDS[a.kind], a.micro_batch) for a in order]
        self._prepare_schedule_with_comms(self.pipeline_order)


SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B, "zero_bubble": ZeroBubble,
}  # fmt: skip


class _Stage(PipelineStage):
    """A stage whose trial run leaves no trace in its buffers, and whose put-off weights' gradients are seen by hooks.

    Where inputs and outputs are not given, torch 2.13 sends the first micro-batch of each launch through the module
    once more, and batch norms would count it twice.
    """

    passes: PassClock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.passes():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.passes():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.passes():
            return super().backward_weight_one_chunk(*args, **kwargs)

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        kept = [(buffer, buffer.clone()) for buffer in self.submod.buffers()]
        flow = super()._forward_metadata_inference(*args, **kwargs)
        for buffer, before in kept:
            buffer.data.copy_(before)  # Past autograd, which still wants the trial's graph.
        return flow

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kw)
        # torch writes these gradients past autograd, so that no hook would start their way to the other copies.
        groups, bwd_kwargs["param_groups"] = bwd_kwargs["param_groups"], []
        done = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kw)
        # Several uses of one parameter may walk over each other's nodes, which must not be freed until then.
        for group in sorted(groups, key=lambda group: -len(group["intermediates"])):
            _backward_weights(group)
        return done


def _backward_weights(group: dict[str, Any]) -> None:
    """Finish the backward of parameters from the nodes at which torch's backward for inputs turned off.

    Args:
        group: torch's `params` (nodes that accumulate), `intermediates` (nodes) and `grads` (what reached these).
    """
    reached: list[tuple[Node, tuple[Tensor | None, ...]]] = [
        (node, grads)
        for node, grads in zip(group["intermediates"], group.get("grads") or [], strict=False)
        if grads is not None
    ]
    edges = {GradientEdge(node, i): grad for node, grads in reached for i, grad in enumerate(grads) if grad is not None}
    if not edges:
        return
    several = len(reached) > 1
    # What comes to a node from another one of the group is counted in its own gradient already.
    clamps = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in reached if several]
    try:
        parameters = [node.variable for node in group["params"]]
        torch.autograd.backward(list(edges), list(edges.values()), retain_graph=several, inputs=parameters)
    finally:
        for clamp in clamps:
            clamp.remove()


def build_schedule(
    plan: Plan, place: Place, parts: Parts, loss: Callable[[Tensor, Tensor], Tensor], passes: PassClock
) -> Any:
    """Return the schedule that runs this rank's stages; losses are summed, gradients are left unscaled."""
    group = place.group("pipeline")
    stages = [
        _Stage(
            module,
            stage.index,
            len(plan.stages),
            torch.device("cpu"),
            group=group,
            **_flow(plan, place, parts, stage),
        )
        for stage, module in parts.stages
    ]
    for stage in stages:
        stage.passes = passes
    kind = SCHEDULES[plan.layout.schedule]
    given = stages if plan.layout.schedule == "interleaved" else stages[0]
    return kind(given, n_microbatches=plan.share(place.data), loss_fn=loss, scale_grads=False)


def _flow(plan: Plan, place: Place, parts: Parts, stage: Stage) -> dict[str, Any]:
    """Return example inputs and outputs of a stage, so that nothing has to be tried out at the start.

    Of a sequence of the user's nothing is known; torch finds out by a trial run.
    """
    shape = plan.job.shape
    if parts.divided is not None:
        piece = parts.divided.pieces[stage.index]
        return {
            "input_args": piece.inputs,
            "output_args": piece.outputs,
            "input_grads": _grads(piece.inputs, comes=stage.index > 0),
            "output_grads": _grads(piece.outputs, comes=stage.index < len(plan.stages) - 1),
        }
    if shape is None:
        return {}
    dtype, tokens = DTYPES[plan.job.activations], plan.job.data.sequence // place.layout.context
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


def _grads(flow: tuple[Tensor, ...], *, comes: bool) -> tuple[Tensor | None, ...]:
    """Return examples of the gradients that travel against a flow: none for what needs none, such as a mask."""
    return tuple(value.detach() if comes and value.requires_grad else None for value in flow)
