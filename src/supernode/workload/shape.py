"""What is a model made of? Sublayers as counts, for one model or for an array of them at once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from supernode.errors import SpecError
from supernode.schema.model import DecoderShape

Numbers = NDArray[np.float64]


def as_numbers(value: ArrayLike) -> Numbers:
    """Return a float array; numbers become arrays of no dims, which broadcast."""
    return np.asarray(value, dtype=np.float64)


def _zero() -> Numbers:
    return np.zeros(())


def _one() -> Numbers:
    return np.ones(())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """A model as counts of its sublayers and their sizes; every field is a number or an array that broadcasts.

    A dense decoder of 32 layers has 32 attentions and 32 MLPs; hybrids count each kind for itself. An encoder is a
    decoder without the causal mask.

    Attributes:
        width: of the residual stream.
        vocabulary: rows of the embedding, padding included.
        streams: copies of the residual stream (hyper-connections).
        tied: 1 if embedding and head are one matrix.
        positions: learned positions; 0 for none.
        outputs: times the head runs for each token: 1, and 1 more for each token predicted further ahead.
        attentions: attention sublayers.
        heads: query heads of an attention.
        key_value_heads: heads of keys and values.
        head_width: of queries and keys.
        value_width: of values; 0 means `head_width`.
        query_rank: rank of the queries' down-projection in latent attention; 0 for none.
        key_value_rank: likewise of keys and values, the shared rotary part included.
        window: tokens that a windowed attention looks back; 0 for all.
        windowed: attentions that have the window.
        causal: 1 if a token sees only what came before.
        mlps: dense feed-forward sublayers.
        mlp_width: of their hidden layer.
        gated: 1 if feed-forward layers have a gate (three matrices), 0 for two.
        mixtures: mixture-of-experts sublayers.
        experts: routed experts of a mixture.
        routed: experts that each token visits.
        expert_width: hidden width of a routed expert.
        biased: 1 if the experts' last products have biases, which tokens weigh as they weigh the expert.
        shared_width: hidden width of the shared experts together; 0 for none.
        latent: width to which tokens are projected before they are routed; 0 means `width`.
        mambas: Mamba-2 sublayers.
        mamba_heads: heads of one.
        mamba_width: of a head.
        mamba_state: state of a head.
        mamba_groups: groups that share B and C.
    """

    width: Numbers
    vocabulary: Numbers
    streams: Numbers = field(default_factory=_one)
    tied: Numbers = field(default_factory=_zero)
    positions: Numbers = field(default_factory=_zero)
    outputs: Numbers = field(default_factory=_one)
    attentions: Numbers = field(default_factory=_zero)
    heads: Numbers = field(default_factory=_one)
    key_value_heads: Numbers = field(default_factory=_one)
    head_width: Numbers = field(default_factory=_one)
    value_width: Numbers = field(default_factory=_zero)
    query_rank: Numbers = field(default_factory=_zero)
    key_value_rank: Numbers = field(default_factory=_zero)
    window: Numbers = field(default_factory=_zero)
    windowed: Numbers = field(default_factory=_zero)
    causal: Numbers = field(default_factory=_one)
    mlps: Numbers = field(default_factory=_zero)
    mlp_width: Numbers = field(default_factory=_zero)
    gated: Numbers = field(default_factory=_zero)
    mixtures: Numbers = field(default_factory=_zero)
    experts: Numbers = field(default_factory=_zero)
    routed: Numbers = field(default_factory=_zero)
    expert_width: Numbers = field(default_factory=_zero)
    biased: Numbers = field(default_factory=_zero)
    shared_width: Numbers = field(default_factory=_zero)
    latent: Numbers = field(default_factory=_zero)
    mambas: Numbers = field(default_factory=_zero)
    mamba_heads: Numbers = field(default_factory=_one)
    mamba_width: Numbers = field(default_factory=_one)
    mamba_state: Numbers = field(default_factory=_zero)
    mamba_groups: Numbers = field(default_factory=_one)

    def __post_init__(self) -> None:
        for entry in fields(self):
            numbers = as_numbers(getattr(self, entry.name))
            if not np.all(np.isfinite(numbers)) or np.any(numbers < 0):
                raise SpecError(f"`{entry.name}` of a model is {numbers}", hint="give counts of 0 or more.")
            object.__setattr__(self, entry.name, numbers)

    @property
    def sublayers(self) -> Numbers:
        """Sublayers of all kinds."""
        return self.attentions + self.mlps + self.mixtures + self.mambas

    @property
    def layers(self) -> Numbers:
        """Layers in the usual sense: an attention with its feed-forward part, or a sublayer that stands alone."""
        return np.where(self.mambas > 0, self.sublayers, self.attentions)

    @property
    def values(self) -> Numbers:
        """Width of a head's values."""
        return np.where(self.value_width > 0, self.value_width, self.head_width)

    @property
    def routed_width(self) -> Numbers:
        """Width of a token on its way to the experts."""
        return np.where(self.latent > 0, self.latent, self.width)

    @property
    def attention_parameters(self) -> Numbers:
        """Matrix entries of one attention."""
        queries, outputs = self.heads * self.head_width, self.heads * self.values
        plain = self.width * (queries + self.key_value_heads * (self.head_width + self.values) + outputs)
        into = self.query_rank * (self.width + queries) + self.key_value_rank * self.width
        # The rotary part of the keys (64 wide in DeepSeek-V3) is shared by all heads and never projected up.
        up = np.maximum(self.key_value_rank - 64, 0) * self.heads * (self.head_width - 64 + self.values)
        latent = into + up + self.width * outputs
        return np.where(self.key_value_rank > 0, latent, plain)

    @property
    def mlp_parameters(self) -> Numbers:
        """Matrix entries of one dense feed-forward sublayer."""
        return (2 + self.gated) * self.width * self.mlp_width

    @property
    def expert_parameters(self) -> Numbers:
        """Matrix entries of one routed expert."""
        return (2 + self.gated) * self.routed_width * self.expert_width

    @property
    def shared_parameters(self) -> Numbers:
        """Matrix entries of one mixture beside its routed experts: shared experts, router, latent projections."""
        latent = np.where(self.latent > 0, 2 * self.width * self.latent, 0)
        return (2 + self.gated) * self.width * self.shared_width + self.experts * self.width + latent

    @property
    def mamba_parameters(self) -> Numbers:
        """Matrix entries of one Mamba-2 sublayer."""
        inner = self.mamba_heads * self.mamba_width
        into = 2 * inner + 2 * self.mamba_groups * self.mamba_state + self.mamba_heads
        return self.width * (into + inner)

    @property
    def body_parameters(self) -> Numbers:
        """Entries of all sublayers but the routed experts, their norms and biases included where they have any."""
        # GPT's layers (learned positions) have biases and norms with them: 13 widths; others two norms.
        small = np.where(self.positions > 0, 13 * self.width, 2 * self.width) * self.layers
        return (
            self.attentions * self.attention_parameters
            + self.mlps * self.mlp_parameters
            + self.mixtures * self.shared_parameters
            + self.mambas * self.mamba_parameters
            + small
        )

    @property
    def routed_parameters(self) -> Numbers:
        """Entries of all routed experts."""
        return self.mixtures * self.experts * self.expert_parameters

    @property
    def parameters(self) -> Numbers:
        """Entries of the whole model."""
        ends = self.vocabulary * self.width * (2 - self.tied) + self.positions * self.width
        return self.body_parameters + self.routed_parameters + ends


def make_shape(**counts: ArrayLike) -> ModelShape:
    """Return a model shape from plain numbers or arrays.

    >>> float(make_shape(width=4, vocabulary=10, attentions=2, heads=2, head_width=2, mlps=2, mlp_width=8).parameters)
    320.0
    """
    return ModelShape(**{name: as_numbers(value) for name, value in counts.items()})


def gpt_shape(
    *, layers: ArrayLike, width: ArrayLike, heads: ArrayLike, vocabulary: ArrayLike, positions: ArrayLike
) -> ModelShape:
    """Return a decoder of the GPT kind: a hidden layer of 4 × width, no gate, learned positions, tied ends."""
    wide, many = as_numbers(width), as_numbers(heads)
    return make_shape(
        width=wide, vocabulary=vocabulary, tied=1, positions=positions, attentions=layers, heads=many,
        key_value_heads=many, head_width=wide / many, mlps=layers, mlp_width=4 * wide,
    )  # fmt: skip


def decoder_shape(shape: DecoderShape) -> ModelShape:
    """Return the project's own decoder in these terms."""
    return make_shape(
        width=shape.width, vocabulary=shape.vocabulary, tied=shape.tied, attentions=shape.layers, heads=shape.heads,
        key_value_heads=shape.key_heads, head_width=shape.head_width, gated=1, **_feed_forward(shape),
    )  # fmt: skip


def _feed_forward(shape: DecoderShape) -> dict[str, int]:
    if not shape.experts:
        return {"mlps": shape.layers, "mlp_width": shape.inner}
    return {
        "mixtures": shape.layers, "experts": shape.experts, "routed": shape.experts_per_token,
        "expert_width": shape.inner,
    }  # fmt: skip
