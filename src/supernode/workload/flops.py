"""How many floating-point operations does training need? One count for plans, searches and utilisation alike."""

from __future__ import annotations

import numpy as np

from supernode.workload.shape import ModelShape


def token_flops(model: ModelShape, sequence: int) -> float:
    """Return the floating-point operations that a training step needs for one token.

    Each matrix entry that a token meets takes two in the forward and four in the backward; scores and their sums
    likewise, over the half of the sequence that a causal mask leaves, or over the window. The embedding is a look-up.

    Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B; halved for the mask.
    """
    entries = (
        model.attentions * model.attention_parameters
        + model.mlps * model.mlp_parameters
        + model.mixtures * (model.routed * model.expert_parameters + model.shared_parameters)
        + model.mambas * model.mamba_parameters
        + model.outputs * model.vocabulary * model.width
    )
    seen = np.where(model.causal > 0, sequence / 2, sequence)
    near = np.where(model.window > 0, np.minimum(model.window, seen), seen)
    pairs = (model.attentions - model.windowed) * seen + model.windowed * near
    return float(6 * entries + 6 * pairs * model.heads * (model.head_width + model.values))
