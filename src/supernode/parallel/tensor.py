"""How one block is split over the tensor axis: columns then rows, and the loss over a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from supernode.axes.sequence import gather_tokens, scatter_sum, split_linear
from supernode.axes.tensor import IGNORED, SplitLoss, Spread, Sum, first_of, local, own_rows
from supernode.errors import ModelError
from supernode.models.experts import Mixture

__all__ = ["IGNORED", "SplitCrossEntropy", "cross_entropy", "first_of", "local"]


def split_block(block: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split a decoder block: heads and the MLP's inner size over the axis, one all-reduce after each half.

    Parameters become DTensors, so that checkpoints and sharding know their logical shapes; the arithmetic runs on the
    local parts, since DTensor's own dispatch costs about a millisecond an operation on small shards.

    Args:
        sequence: between the halves each rank holds its part of the tokens; they meet as `axes.sequence` says.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
    """
    enter, leave = _doors(mesh.get_group(), sequence=sequence)
    for half, columns, row in (("attention", ("query", "key", "value"), "out"), ("mlp", ("gate", "up"), "down")):
        module = block.get_submodule(half)
        if isinstance(module, Mixture):  # `parallel.mixture` cuts its experts, and leaves its router whole.
            continue
        module.register_forward_pre_hook(lambda _, given: (enter(given[0]), *given[1:]))
        for name in columns:
            _split_linear(module.get_submodule(name), mesh, dim=0)
        _split_linear(module.get_submodule(row), mesh, dim=1)
        module.get_submodule(row).register_forward_hook(lambda _, __, output: leave(output))


def _doors(
    group: dist.ProcessGroup, *, sequence: bool
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return what becomes of the stream before split matrices, and of their outputs after them."""
    if sequence:
        return lambda x: gather_tokens(x, group), lambda x: scatter_sum(x, group)
    return lambda x: Spread.apply(x, group), lambda x: Sum.apply(x, group)


def split_embedding(embedding: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split the vocabulary of an embedding over the axis; each rank looks up its own tokens, then all are summed."""
    assert isinstance(embedding, nn.Embedding)
    first = first_of(embedding.num_embeddings, mesh.get_group())
    _, leave = _doors(mesh.get_group(), sequence=sequence)
    _distribute(embedding, mesh, dim=0)

    def forward(tokens_BT: Tensor) -> Tensor:
        return leave(own_rows(local(embedding.weight), tokens_BT, -1, first))

    _run_instead(embedding, forward)


def split_head(head: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split the vocabulary of the head over the axis; the logits stay split for `SplitCrossEntropy`."""
    enter, _ = _doors(mesh.get_group(), sequence=sequence)
    head.register_forward_pre_hook(lambda _, given: (enter(given[0]),))
    _split_linear(head, mesh, dim=0)


def _distribute(module: nn.Module, mesh: DeviceMesh, *, dim: int) -> None:
    weight = module.get_parameter("weight")
    # Every rank initialises the whole block alike, so each cuts its own part and nothing is sent.
    part = weight if isinstance(weight, DTensor) else distribute_tensor(weight, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(part, requires_grad=weight.requires_grad))


def _split_linear(linear: nn.Module, mesh: DeviceMesh, *, dim: int) -> None:
    _distribute(linear, mesh, dim=dim)
    # By attribute, where `precision.casting` may put a cast of the weight while the layer runs.
    _run_instead(linear, lambda x: split_linear(x, local(linear.weight)))  # type: ignore[arg-type]


def _run_instead(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Give one module another forward; its hooks and its place in the model stay."""
    vars(module)["forward"] = forward


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the *sum* of the cross-entropies in float32 over all positions that count.

    Args:
        output: logits (…, V); over images and the like (B, V).
        target: class numbers (…), `IGNORED` where a position does not count.

    Raises:
        ModelError: they do not fit each other.
    """
    if output.ndim < 2 or output.shape[:-1].numel() != target.numel():
        raise ModelError(
            f"the model returned {list(output.shape)} for targets of {list(target.shape)}",
            hint="return logits whose last dim is the classes and whose other dims are the targets', or name a "
            "`data.loss` of your own.",
        )
    try:
        return F.cross_entropy(output.flatten(0, -2).float(), target.flatten(), ignore_index=IGNORED, reduction="sum")
    except IndexError:
        raise ModelError(
            f"targets go from {int(target.min())} to {int(target.max())}, and the model returned {output.shape[-1]} "
            f"classes; {IGNORED} is for positions that do not count",
            hint="return as many logits as there are classes, or number the classes of `data.dataset` from 0.",
        ) from None


class SplitCrossEntropy:
    """`cross_entropy` over logits whose vocabulary is split over a group as `torch.chunk` would split it."""

    def __init__(self, group: dist.ProcessGroup, vocabulary: int) -> None:
        self.group = group
        self.first = first_of(vocabulary, group)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = SplitLoss.apply(output.flatten(0, -2).float(), target.flatten(), self.first, self.group)
        return loss
