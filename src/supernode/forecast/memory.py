"""How full does the fullest card get? Bytes by part for arrays of strategies, on the first or last pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import FULL, GPIPE, NO_RECOMPUTE, ZERO_BUBBLE, Software, Strategies

# Mixed precision: gradients summed in float32, moments of it, and a float32 copy of weights of 16 bits.
WIDE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryParts:
    """Bytes on the fullest card, for each strategy.

    Attributes:
        weights: of 16 bits, with what is gathered of sharded ones.
        gradients: in float32.
        optimizer: float32 copy of the weights and two moments.
        activations: what forwards leave until their backwards.
        workspace: logits and their gradient, one layer computed anew, or what the update makes.
    """

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    workspace: Numbers

    @property
    def state(self) -> Numbers:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> Numbers:
        """Bytes in all."""
        return self.state + self.activations + self.workspace


def memory_parts(model: ModelShape, ways: Strategies, software: Software) -> MemoryParts:
    """Return the memory of the fuller of two pipeline ranks; arguments broadcast.

    The first holds the embedding and most activations, the last the head and its logits; those between hold less.
    """
    return fuller_rank(model, ways, software)[0]


def fuller_rank(model: ModelShape, ways: Strategies, software: Software) -> tuple[MemoryParts, Numbers]:
    """Return the memory of the fuller of the first and the last pipeline rank, and what a micro-batch leaves there."""
    kept, layer = _activations(model, ways, software)
    first, each = _rank_parts(model, ways, software, kept, layer, is_last=False)
    if np.all(ways.pipeline == 1):
        return first, each
    last, late = _rank_parts(model, ways, software, kept, layer, is_last=True)
    is_late = (ways.pipeline > 1) & (last.total > first.total)
    parts = {
        name: np.where(is_late, getattr(last, name), getattr(first, name))
        for name in ("weights", "gradients", "optimizer", "activations", "workspace")
    }
    return MemoryParts(**parts), np.where(is_late, late, each)


def _rank_parts(
    model: ModelShape, ways: Strategies, software: Software, kept: Numbers, layer: Numbers, *, is_last: bool
) -> tuple[MemoryParts, Numbers]:
    """Return the memory of the first or the last pipeline rank, and what a micro-batch leaves there.

    Of a single rank, both are the same.

    Args:
        kept: bytes that a micro-batch leaves in all layers.
        layer: bytes that it leaves in one that keeps all.
    """
    share = rank_shares(model, ways)[is_last]
    dense, experts = _parameters(model, ways, share, is_last=is_last)
    copies = ways.data * ways.context
    spread = expert_copies(ways)

    def held(stage: int) -> Numbers:
        is_cut = ways.sharding >= stage
        return dense / np.where(is_cut, copies, 1) + experts / np.where(is_cut, spread, 1)

    layers = np.maximum(model.layers, 1)
    # FSDP holds the layer at work and the next one whole; all of them while weights' gradients are put off.
    at_work = np.where((ways.schedule == ZERO_BUBBLE) & (ways.pipeline > 1), 1, 2 / layers * ways.pipeline)
    gathered = np.where(ways.sharding >= 3, np.minimum(at_work, 1) * (dense + experts), 0)
    # Logits, their softmax in float32 and its gradient; GPipe keeps all micro-batches' until their backwards.
    pending = np.where((ways.schedule == GPIPE) & (ways.pipeline > 1), ways.micro_batches, 1)
    logits = ways.tokens * model.vocabulary / ways.tensor * ((ways.element + 4) * pending + ways.element)
    logits = logits if is_last else np.where(ways.pipeline > 1, 0, logits)
    anew = np.where(ways.recompute == FULL, layer, 0)
    element = software.weight_bytes or ways.element
    wide = np.where(software.master_copy, WIDE_BYTES, element)
    copied = np.where(software.master_copy & (wide > element), WIDE_BYTES, 0)
    # Where the strategy does not say, activations are spread evenly.
    each = kept * np.where((ways.fullest > 0) | is_last, share, 1 / ways.pipeline)
    activations, gradients = each * _in_flight(ways, is_last=is_last), held(2) * wide
    if software.early:  # One at a time, through more micro-batches all; the largest is an embedding.
        ends = np.minimum(model.vocabulary * model.width / ways.tensor * element, gradients)
        gradients, anew = np.where(ways.micro_batches == 1, 0, gradients), np.maximum(anew, ends)
    updating = np.maximum(gradients - activations, 0) if software.copies_update else 0
    parts = MemoryParts(
        weights=(held(3) + gathered) * element,
        gradients=gradients,
        optimizer=held(1) * (software.moments * (software.moment_bytes or wide) + copied),
        activations=activations,
        workspace=np.maximum(np.maximum(logits, anew), updating),
    )
    return parts, each


def card_parameters(model: ModelShape, ways: Strategies) -> tuple[Numbers, Numbers]:
    """Return the parameters on a card of the first pipeline rank before sharding: all but routed experts, and these."""
    return _parameters(model, ways, rank_shares(model, ways)[0], is_last=False)


def _parameters(model: ModelShape, ways: Strategies, share: Numbers, *, is_last: bool) -> tuple[Numbers, Numbers]:
    ends = model.vocabulary * model.width * np.where((ways.pipeline > 1) | (model.tied > 0), 1, 2)
    positions = model.positions * model.width * (np.where(ways.pipeline > 1, 0, 1) if is_last else 1)
    dense = (model.body_parameters * share + ends + positions) / ways.tensor
    return dense, model.routed_parameters * share / (ways.expert * ways.expert_tensor)


def rank_shares(model: ModelShape, ways: Strategies) -> tuple[Numbers, Numbers]:
    """Return the parts of the body that the fullest pipeline rank but the last holds, and the last one.

    Where the strategy does not say, every stage holds as many layers, and the last, the first, the last but one, … give
    one way where that is uneven.
    """
    layers = np.maximum(model.layers, 1)
    stages, parts = ways.pipeline, ways.pipeline * ways.interleave
    each = np.ceil(layers / parts) * ways.interleave
    spare = each * stages - layers
    front = np.floor(spare / 2)
    back = spare - front
    # Whole rounds take one from each rank; what is left of both ends does, too, where it meets in the middle.
    met = np.maximum(np.mod(front, stages) + np.mod(back, stages), np.mod(front, stages) + 1) >= stages
    most = each - np.floor(front / stages) - np.floor(back / stages) - met
    last = np.maximum(each - np.floor(front / stages) - np.ceil(back / stages), 0)
    is_cut = (ways.fullest > 0) & (stages > 1)
    most, last = np.where(is_cut, ways.fullest, most), np.where(is_cut, ways.last, last)
    return np.where(stages > 1, np.minimum(most / layers, 1), 1.0), np.where(stages > 1, last / layers, 1.0)


def expert_copies(ways: Strategies) -> Numbers:
    """Return the cards that hold the same experts, over which their optimizer can be sharded."""
    return np.maximum(ways.tensor * ways.context * ways.data / (ways.expert * ways.expert_tensor), 1)


def _activations(model: ModelShape, ways: Strategies, software: Software) -> tuple[Numbers, Numbers]:
    """Return bytes that one micro-batch leaves in all layers, and in one that keeps all.

    Source: Korthikanti et al., arXiv:2205.05198, section 4 and equations 1 to 6; counted anew for flash attention,
    gated layers and mixtures.
    """
    whole, own, scores = _token_bytes(model, ways, software)
    spread = np.where(ways.sequence_parallel > 0, ways.tensor, 1)
    kept = whole / spread + own / ways.tensor
    layer = kept + scores / ways.tensor
    inputs = ways.element * model.width * model.layers / spread
    per_token = np.where(ways.recompute == FULL, inputs, np.where(ways.recompute == NO_RECOMPUTE, layer, kept))
    return ways.tokens * per_token, ways.tokens * layer / np.maximum(model.layers, 1)


def _token_bytes(model: ModelShape, ways: Strategies, software: Software) -> tuple[Numbers, Numbers, Numbers]:
    """Return bytes per token over all layers: whole on each card of the tensor axis, cut over it, and scores."""
    mask = 1 if software.dropout else 0
    whole = model.sublayers * model.width * (2 * ways.element + mask)
    queries, outputs = model.heads * model.head_width, model.heads * model.values
    pairs = model.key_value_heads * (model.head_width + model.values)
    # Unfused, attention's result is laid out anew for the output's product, and the gate's activation kept beside it.
    again = 0 if software.fused else 1
    attention = (queries + pairs + (1 + again) * outputs) * ways.element
    mlp = model.mlp_width * (2 + (1 + again) * model.gated) * ways.element
    mixture = model.routed * (2 * model.routed_width + (2 + model.gated) * model.expert_width) * ways.element
    mixture = mixture + model.shared_width * (2 + model.gated) * ways.element
    mamba = 6 * model.mamba_heads * model.mamba_width * ways.element
    own = model.attentions * attention + model.mlps * mlp + model.mixtures * mixture + model.mambas * mamba
    # Softmax, the mask of its dropout, and what is left of it.
    scores = (
        0
        if software.flash
        else model.attentions
        * model.heads
        * ways.sequence
        * (2 * ways.element * mask + mask + ways.element * (1 - mask))
    )
    return whole, own, np.asarray(scores, dtype=np.float64)


def _in_flight(ways: Strategies, *, is_last: bool) -> Numbers:
    """Return micro-batches whose activations the first or the last rank holds; see `schema.order.forwards_ahead`.

    Interleaving adds (p − 1) / (p v) of the first rank's. The last one's backward follows each forward, save with
    interleaving, whose other stages are ahead, and with ZB-H1, which puts its weights' gradients off.
    """
    stages, parts = ways.pipeline, ways.interleave
    if is_last:
        most = np.where(
            parts > 1, ((parts - 1) * stages + 1) / parts, np.where(ways.schedule == ZERO_BUBBLE, stages, 1)
        )
    else:
        most = np.where(parts > 1, stages + (stages - 1) / parts, stages)
    held = np.where(ways.schedule == GPIPE, ways.micro_batches, np.minimum(most, ways.micro_batches))
    return np.where(stages > 1, held, 1)
