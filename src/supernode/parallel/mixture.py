"""Where do the experts of a block lie? Spread over a part of the data axis, each cut over the tensor axis."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from supernode.axes.expert import visit_over
from supernode.axes.sequence import gather_tokens, scatter_sum
from supernode.axes.tensor import Spread, Sum, local
from supernode.models.experts import Experts, run_experts
from supernode.parallel.mesh import Place

_DIMS = {"gate": 1, "up": 1, "down": 2}
"""Which dim of a matrix over all experts is an expert's inner size."""


def spread_experts(experts: Experts, place: Place) -> None:
    """Keep this rank's experts, and its part of each; tokens travel to the others.

    Parameters become DTensors, so that checkpoints and sharding know their logical shapes. A token's weights stay whole
    on each tensor rank, and so the router is outside: it is the same on all of them, with the same gradient.
    """
    layout = place.layout
    if layout.expert == 1 and layout.tensor == 1:
        return
    for name, dim in _DIMS.items():
        experts.register_parameter(name, _part(experts.get_parameter(name), place, dim=dim))

    def own(x_VD: Tensor, counts: Sequence[int]) -> Tensor:
        # By attribute, where a cast of the weights may stand while they are used.
        return run_experts(x_VD, counts, local(experts.gate), local(experts.up), local(experts.down))

    if layout.expert > 1:
        vars(experts)["visit"] = visit_over(place.group("expert"), own)
    else:
        vars(experts)["visit"] = lambda x_MD, counts_E: own(x_MD, counts_E.tolist())
    if layout.tensor > 1:
        _join(experts, place)


def _part(weight: nn.Parameter, place: Place, *, dim: int) -> nn.Parameter:
    mesh, placements = place.mesh["tensor"], [Shard(dim)]
    if place.experts is not None:
        mesh, placements = place.experts, [Shard(0), *placements]
    # Every rank initialises all experts of the block alike, so each cuts its own part and nothing is sent.
    part = distribute_tensor(weight.detach(), mesh, placements, src_data_rank=None)
    # A view would keep all experts in memory.
    own = DTensor.from_local(
        part.to_local().clone(), mesh, placements, run_check=False, shape=part.shape, stride=part.stride()
    )
    return nn.Parameter(own, requires_grad=weight.requires_grad)


def _join(experts: Experts, place: Place) -> None:
    """Give every tensor rank the tokens with their weights, and sum what the parts of the experts make of them.

    Each rank's part of the outputs is a part of a weight's gradient, too, so weights go in as tokens do.
    """
    group = place.group("tensor")
    if place.layout.sequence:
        experts.register_forward_pre_hook(lambda _, given: tuple(gather_tokens(part, group) for part in given))
        experts.register_forward_hook(lambda _, __, made: scatter_sum(made, group))
    else:
        experts.register_forward_pre_hook(
            lambda _, given: (*(Spread.apply(part, group) for part in given[:2]), given[2])
        )
        experts.register_forward_hook(lambda _, __, made: Sum.apply(made, group))


def is_spread(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter is of experts that lie on several ranks."""
    return isinstance(parameter, DTensor) and "expert" in (parameter.device_mesh.mesh_dim_names or ())
