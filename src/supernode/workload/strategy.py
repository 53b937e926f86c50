"""How is the work spread, and with what software? Strategies as arrays, one entry for each way to run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import ArrayLike

from supernode.errors import SpecError
from supernode.workload.shape import Numbers, as_numbers

NO_RECOMPUTE, SELECTIVE, FULL = 0, 1, 2
"""What is computed again in the backward: nothing, the attention's core, whole layers."""
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = 0, 1, 2, 3
"""Pipeline schedules."""
PRECISIONS = ("float16", "bfloat16", "float8", "mxfp8", "nvfp4", "float32")
"""Of the matrix products; everything else is of 16 bits, or of 32 where they are."""
FLOAT32 = 5
_FROM_ZERO = ("sharding", "recompute", "schedule", "sequence_parallel", "precision", "fullest", "last")


def _one() -> Numbers:
    return np.ones(())


def _zero() -> Numbers:
    return np.zeros(())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategies:
    """Ways to run one step; every field is a number or an array, and they broadcast.

    Ranks are laid out tensor first, then context, data, pipeline, as Megatron does; experts are spread over
    tensor × context × data. One step trains on `batch` samples, `batch` / `data` / `micro_batch` micro-batches each.

    Attributes:
        tensor: cards that share each matrix.
        context: cards that share each sequence.
        expert: cards over which the experts of a mixture are spread.
        expert_tensor: cards that share each expert.
        pipeline: stages.
        interleave: parts of the model that each pipeline rank holds.
        data: copies that see different samples.
        sharding: ZeRO stage: 1 optimizer, 2 and gradients, 3 and weights (FSDP); 0 for whole copies.
        micro_batch: samples.
        batch: samples of one step over all cards.
        sequence: tokens of a sample.
        recompute: `NO_RECOMPUTE`, `SELECTIVE` or `FULL`.
        schedule: `GPIPE`, `ONE_F_ONE_B`, `INTERLEAVED` or `ZERO_BUBBLE`.
        sequence_parallel: 1 if norms and residuals are spread over the tensor axis.
        precision: index into `PRECISIONS`.
        fullest: layers on the pipeline rank that holds most, the last one left out; 0 cuts as evenly as it goes.
        last: layers on the last pipeline rank, where `fullest` is given.
    """

    tensor: Numbers = field(default_factory=_one)
    context: Numbers = field(default_factory=_one)
    expert: Numbers = field(default_factory=_one)
    expert_tensor: Numbers = field(default_factory=_one)
    pipeline: Numbers = field(default_factory=_one)
    interleave: Numbers = field(default_factory=_one)
    data: Numbers = field(default_factory=_one)
    sharding: Numbers = field(default_factory=_zero)
    micro_batch: Numbers = field(default_factory=_one)
    batch: Numbers = field(default_factory=_one)
    sequence: Numbers = field(default_factory=_one)
    recompute: Numbers = field(default_factory=_zero)
    schedule: Numbers = field(default_factory=_one)
    sequence_parallel: Numbers = field(default_factory=_zero)
    precision: Numbers = field(default_factory=_one)
    fullest: Numbers = field(default_factory=_zero)
    last: Numbers = field(default_factory=_zero)

    def __post_init__(self) -> None:
        for entry in fields(self):
            numbers = as_numbers(getattr(self, entry.name))
            least = 0 if entry.name in _FROM_ZERO else 1
            if not np.all(numbers >= least):
                raise SpecError(
                    f"`{entry.name}` of a strategy is {numbers.min()}", hint=f"choose {least} or more, everywhere."
                )
            object.__setattr__(self, entry.name, numbers)

    @property
    def cards(self) -> Numbers:
        """Cards that each way takes."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def micro_batches(self) -> Numbers:
        """Micro-batches of one step on each pipeline."""
        return self.batch / (self.data * self.micro_batch)

    @property
    def element(self) -> Numbers:
        """Bytes of an activation."""
        return np.where(self.precision == FLOAT32, 4.0, 2.0)

    @property
    def tokens(self) -> Numbers:
        """Tokens of one micro-batch on one card (before the tensor axis)."""
        return self.micro_batch * self.sequence / self.context


def make_strategies(**degrees: ArrayLike) -> Strategies:
    """Return strategies from plain numbers or arrays.

    >>> float(make_strategies(tensor=8, pipeline=4, data=16).cards)
    512.0
    """
    return Strategies(**{name: as_numbers(value) for name, value in degrees.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What the training program does, as far as time depends on it; facts of its version, not fitted.

    Attributes:
        flash: attention is one kernel that never writes the scores.
        fused: norms, activations, rotary turns and residual sums are fused or compiled.
        dropout: elements are dropped after attention, after each sublayer, and in the scores.
        overlaps_data: gradients (and sharded weights) travel while others are computed.
        overlaps_sums: sharded weights' gradients are summed while others are computed, too.
        overlaps_tensor: the tensor axis' collectives are cut up and overlapped with matrix products.
        overlaps_pipeline: activations travel between stages while others are computed.
        serial_transfers: an activation and a gradient travel between two stages one after the other, not both at once.
        whole_gradients: between stages, each card of the tensor axis sends the whole gradient, not its part.
        whole_messages: likewise the whole activation, so that nothing is gathered where it arrives.
        overlaps_expert: tokens travel to experts and back while another micro-batch is computed.
        gradient_bytes: of one gradient on its way; less where a compressor is at work.
        rails: part of a node's network cards that gathering sharded weights uses.
        accumulate_bytes: read and written for each weight to add a micro-batch's gradient to the sum;
            0 where the product that makes it adds it, behind its arithmetic.
        shard_bytes: read and written for each sharded weight and micro-batch to copy gathered weights to their tensors
            and gradients into one buffer; 0 where tensors are parts of the buffer.
        adapters: only low-rank adapters are trained, so that weights have no gradients.
        update_bytes: that the optimizer reads and writes for each weight it owns.
        launches: part of the launches that the host makes one by one; the rest are in recorded graphs.
        records_attention: an attention's launches are in a recorded graph.
        records_mlp: likewise a dense feed-forward sublayer's.
        records_router: likewise a mixture's up to its experts.
        records_mamba: likewise a Mamba-2 sublayer's.
        syncs: the host must learn how many tokens each expert got before it can go on.
        fused_dispatch: tokens are permuted while they are sent (DeepEP, HybridEP), not in passes of their own.
        fused_experts: experts' products, activation and casts are one kernel.
        early_stop: recomputing a layer stops before its last product, whose result nothing needs, as in PyTorch.
        selective: part of the products that selective recomputation repeats, with all that memory binds, where
            attention is flash; torchtitan keeps every second product.
        attention: rate of its flash kernel over the best one for the card.
        low_attention: the attention's core is computed in 8 bits where products are.
        redone_experts: mixtures are computed again in the backward.
        redone_activations: likewise the experts' activations alone.
        redone_norms: likewise norms.
        splits_ends: the tensor axis sums the embedding's rows and the gradient of the head's input, too.
        scatters_once: sharded gradients are summed in the last micro-batch alone, whole ones kept until then.
        gathers_by_layer: sharded weights of each layer are a collective of their own, none beside another.
        master_copy: weights of 16 bits have a float32 copy, and gradients and moments are of float32; else all are of
            the weights' own precision.
        moments: numbers that the optimizer keeps for each weight.
        weight_bytes: of one weight and of its gradient, where activations are of another size; 0: as these.
        moment_bytes: of one moment, with its part of a block's scale; 0: as the weights, or their float32 copy.
        early: weights are updated in the backward of a step's only micro-batch, and gradients let go one by one.
        copies_update: the update makes one temporary as large as the gradients, when activations are free (torch.optim,
            foreach).
    """

    flash: bool = True
    fused: bool = True
    dropout: bool = False
    overlaps_data: bool = True
    overlaps_sums: bool = True
    overlaps_tensor: bool = False
    overlaps_pipeline: bool = True
    serial_transfers: bool = False
    whole_gradients: bool = False
    whole_messages: bool = False
    overlaps_expert: bool = False
    gradient_bytes: float = 4
    rails: float = 1.0
    accumulate_bytes: Numbers | float = 0.0
    shard_bytes: Numbers | float = 0.0
    adapters: bool = False
    update_bytes: Numbers | float = 34.0
    launches: float = 1.0
    records_attention: bool = False
    records_mlp: bool = False
    records_router: bool = False
    records_mamba: bool = False
    syncs: bool = True
    fused_dispatch: bool = True
    fused_experts: bool = False
    early_stop: bool = False
    selective: float = 0.0
    attention: float = 1.0
    low_attention: bool = False
    redone_experts: bool = False
    redone_activations: bool = False
    redone_norms: bool = False
    splits_ends: bool = False
    scatters_once: bool = False
    gathers_by_layer: bool = False
    master_copy: bool = True
    moments: int = 2
    weight_bytes: float = 0.0
    moment_bytes: float = 0.0
    early: bool = False
    copies_update: bool = False
