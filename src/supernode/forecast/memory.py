"""How full does the fullest card get? Bytes by part for arrays of strategies, on the first pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import FULL, GPIPE, NO_RECOMPUTE, Software, Strategies

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
        workspace: logits and their gradient, or one layer computed anew.
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
    """Return the memory of the first pipeline rank, which holds most activations; arguments broadcast."""
    dense, experts = card_parameters(model, ways)
    copies = ways.data * ways.context
    spread = expert_copies(ways)

    def held(stage: int) -> Numbers:
        is_cut = ways.sharding >= stage
        return dense / np.where(is_cut, copies, 1) + experts / np.where(is_cut, spread, 1)

    layers = np.maximum(model.layers, 1)
    # FSDP holds the layer at work and the next one whole.
    gathered = np.where(ways.sharding >= 3, np.minimum(2 / layers * ways.pipeline, 1) * (dense + experts), 0)
    activations, one_layer = _activations(model, ways, software)
    # Logits, their softmax in float32 and its gradient, on a card that holds the head.
    logits = np.where(
        ways.pipeline > 1, 0, ways.tokens * model.vocabulary / ways.tensor * (ways.element + 4 + ways.element)
    )
    anew = np.where(ways.recompute == FULL, one_layer, 0)
    wide = np.where(software.master_copy, WIDE_BYTES, ways.element)
    return MemoryParts(
        weights=(held(3) + gathered) * ways.element,
        gradients=held(2) * wide,
        optimizer=held(1) * (software.moments * wide + np.where(wide > ways.element, WIDE_BYTES, 0)),
        activations=activations,
        workspace=np.maximum(logits, anew),
    )


def card_parameters(model: ModelShape, ways: Strategies) -> tuple[Numbers, Numbers]:
    """Return the parameters on a card of the first pipeline rank before sharding: all but routed experts, and these."""
    share, _ = rank_shares(model, ways)
    ends = model.vocabulary * model.width * np.where((ways.pipeline > 1) | (model.tied > 0), 1, 2)
    dense = (model.body_parameters * share + ends + model.positions * model.width) / ways.tensor
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
    """Return bytes of all micro-batches in flight, and of one layer of one.

    Source: Korthikanti et al., arXiv:2205.05198, section 4 and equations 1 to 6; counted anew for flash attention,
    gated layers and mixtures.
    """
    whole, own, scores = _token_bytes(model, ways, software)
    spread = np.where(ways.sequence_parallel > 0, ways.tensor, 1)
    kept = whole / spread + own / ways.tensor
    layer = kept + scores / ways.tensor
    inputs = ways.element * model.width * model.layers
    per_token = np.where(ways.recompute == FULL, inputs, np.where(ways.recompute == NO_RECOMPUTE, layer, kept))
    part = np.where(ways.fullest > 0, rank_shares(model, ways)[0], 1 / ways.pipeline)
    tokens = ways.tokens * part  # a rank holds so much of the layers ...
    flying = tokens * per_token * _in_flight(ways)  # ... of so many micro-batches
    return flying, ways.tokens * layer / np.maximum(model.layers, 1)


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


def _in_flight(ways: Strategies) -> Numbers:
    """Return micro-batches whose activations the first rank holds; interleaving adds (p − 1) / (p v) of them."""
    most = np.where(ways.interleave > 1, ways.pipeline + (ways.pipeline - 1) / ways.interleave, ways.pipeline)
    held = np.where(ways.schedule == GPIPE, ways.micro_batches, np.minimum(most, ways.micro_batches))
    return np.where(ways.pipeline > 1, held, 1)
