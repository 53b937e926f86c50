"""How do weights lie that each copy holds a part of? Sharded by FSDP2 over the ranks that would hold them whole."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from supernode.errors import ModelError
from supernode.models.experts import Experts
from supernode.parallel.mesh import Place
from supernode.schema.plan import Layout


def shard(units: list[nn.Module], place: Place | None) -> None:
    """Shard modules over the ranks that hold the same, if the layout says so; what is inside goes first.

    Raises:
        ModelError: a matrix cannot be cut so.
    """
    if place is None or place.layout.copies == 1 or place.layout.sharding != "fsdp":
        return
    # Weights' gradients that are put off are written to whole weights, which must last from forward to then.
    lasts = place.layout.schedule == "zero_bubble" and place.layout.pipeline > 1
    apart = place.expert_copies  # of the ranks that hold the same experts
    for unit in units:
        experts = [part for part in unit.modules() if isinstance(part, Experts)] if apart is not None else []
        is_alone = apart is not None and apart.size() == 1
        if experts == [unit] and is_alone:
            continue
        for parameter in unit.parameters():
            if not parameter.is_contiguous():  # `channels_last`, a transposed matrix: FSDP2 takes none.
                parameter.data = parameter.data.contiguous()
        fully_shard(
            unit, mesh=apart if apart is not None and experts == [unit] else place.copies,
            reshard_after_forward=False if lasts else None, shard_placement_fn=partial(_shard_dim, copies=place.copies),
            ignored_params={p for part in experts for p in part.parameters()} if is_alone else None,
        )  # fmt: skip
        assert isinstance(unit, FSDPModule)
        # Sums everywhere; the step divides once, by the tokens that count.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _shard_dim(parameter: nn.Parameter, *, copies: DeviceMesh) -> Shard | None:
    """Return the dim along which fsdp shards a parameter; None for the first.

    Where the tensor axis cuts the first dim unevenly, torch 2.13 loses count of where a shard of a shard begins, and
    checkpoints would overlap.
    """
    if not isinstance(parameter, DTensor):
        return None
    cuts = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    if all(not placement.is_shard(0) or parameter.shape[0] % size == 0 for size, placement in cuts):
        return None
    if parameter.ndim == 1 or parameter.shape[1] % copies.size():
        raise ModelError(
            f"a matrix of {list(parameter.shape)} is cut unevenly by tensor {parameter.device_mesh.size()}, and its "
            f"other dim does not divide by the {copies.size()} copies over which fsdp shards",
            hint="set `parallelism.sharding` to replicas, or `model.hidden` and `model.vocabulary` to multiples of "
            "`parallelism.tensor`.",
        )
    return Shard(1)


def check_shardable(module: nn.Module, place: Place) -> None:
    """Check that a user's module has nothing that fsdp cannot cut.

    Raises:
        ModelError: it has.
    """
    scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars and place.layout.data > 1 and place.layout.sharding == "fsdp":
        raise ModelError(
            f"`{scalars[0]}` of the model is a single number without dims, which fsdp cannot shard",
            hint="give it the shape (1,), or set `parallelism.sharding` to replicas.",
        )


def check_hooks(module: nn.Module, layout: Layout) -> None:
    """Check that no parameter which the layout replaces by a part of it has a hook on its gradient.

    Raises:
        ModelError: one has, and the part would train without it.
    """
    is_sharded = layout.sharding == "fsdp" and layout.copies > 1
    if layout.tensor == 1 and not is_sharded:
        return
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            remedy = "`parallelism.tensor` to 1" if layout.tensor > 1 else "`parallelism.sharding` to replicas"
            raise ModelError(
                f"`{name}` has a hook on its gradient, and ranks hold parts of it, which have none",
                hint=f"leave the hook out, or set {remedy}.",
            )
