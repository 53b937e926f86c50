"""What is trained: the shape of a decoder, or the file and function that build the user's own module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from supernode.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder-only transformer (RMSNorm, rotary positions, gated MLP, no biases), as Llama has it.

    Attributes:
        layers: blocks between embedding and head.
        width: size of the residual stream.
        heads: query heads; `width` divides by it.
        kv_heads: key and value heads; `heads` divides by it. 0 means as many as `heads`.
        hidden: inner size of the gated MLP. 0 means the next multiple of 32 above 8/3 of `width`.
        experts: gated MLPs in each block of which a token visits some; 0 for one MLP that all tokens visit.
        experts_per_token: that a token visits, those of the highest scores; it takes their outputs' mean by softmax.
        expert_hidden: inner size of one expert. 0 means as that of the gated MLP.
        vocabulary: token kinds. 0 means as many as the tokenizer has.
        tied: the head uses the embedding's matrix.
        dropout: probability of dropping an element of each block's two outputs.
        rope_base: base of the rotary frequencies.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    experts: int = 0
    experts_per_token: int = 2
    expert_hidden: int = 0
    vocabulary: int = 0
    tied: bool = True
    dropout: float = 0.0
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for key, most in (("layers", 4096), ("width", 2**17), ("heads", 4096)):
            if not 1 <= getattr(self, key) <= most:
                raise SpecError(f"`model.{key}` is {getattr(self, key)}", hint=f"choose 1 to {most}.")
        sizes = (("kv_heads", 4096), ("hidden", 2**20), ("expert_hidden", 2**20), ("vocabulary", 2**22))
        for key, most in sizes:
            if not 0 <= getattr(self, key) <= most:
                raise SpecError(f"`model.{key}` is {getattr(self, key)}", hint=f"choose 0 (derive it) to {most}.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise SpecError(
                f"`model.width` {self.width} over `model.heads` {self.heads} gives no even head width",
                hint=f"set `model.width` to a multiple of {2 * self.heads}.",
            )
        if self.heads % self.key_heads:
            raise SpecError(
                f"`model.heads` {self.heads} does not divide by `model.kv_heads` {self.kv_heads}",
                hint="set `model.kv_heads` to a divisor of `model.heads`, or to 0.",
            )
        if not 0 <= self.experts <= 65_536:
            raise SpecError(f"`model.experts` is {self.experts}", hint="choose 0 (one MLP for all tokens) to 65,536.")
        most = self.experts or 65_536
        if not 1 <= self.experts_per_token <= most:
            raise SpecError(
                f"`model.experts_per_token` is {self.experts_per_token} of {self.experts} experts",
                hint=f"choose 1 to {most:,}.",
            )
        if not 0 <= self.dropout < 1:
            raise SpecError(f"`model.dropout` is {self.dropout}", hint="choose 0 up to, not including, 1.")
        if not self.rope_base > 1:
            raise SpecError(f"`model.rope_base` is {self.rope_base}", hint="choose a number above 1, such as 10000.")

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @property
    def inner(self) -> int:
        """Inner size of the gated MLP, or of one expert."""
        hidden = self.expert_hidden or self.hidden if self.experts else self.hidden
        return hidden or -(-8 * self.width // (3 * 32)) * 32

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: attention, MLP or experts with their router, and two norms."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.key_heads)
        return attention + 3 * self.width * self.inner * max(self.experts, 1) + (self.experts + 2) * self.width

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding matrix; the head has as many again unless it is tied."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, shared ones counted once."""
        matrices = 1 if self.tied else 2
        return self.layers * self.block_parameters + matrices * self.embedding_parameters + self.width


PRESETS: dict[str, DecoderShape] = {
    "tiny": DecoderShape(layers=4, width=128, heads=4),
    "small": DecoderShape(layers=8, width=256, heads=8, kv_heads=4),
    "medium": DecoderShape(layers=12, width=768, heads=12),
    # Brown et al., arXiv:2005.14165, table 2.1 (GPT-3 13B and 175B, width and depth; our MLP is gated).
    "gpt3-13b": DecoderShape(layers=40, width=5120, heads=40, vocabulary=50_257, tied=True),
    "gpt3-175b": DecoderShape(layers=96, width=12_288, heads=96, vocabulary=50_257, tied=True),
    # Touvron et al., arXiv:2307.09288, section 2.2, and the shapes published with the weights.
    "llama2-7b": DecoderShape(layers=32, width=4096, heads=32, hidden=11_008, vocabulary=32_000, tied=False),
    "llama2-13b": DecoderShape(layers=40, width=5120, heads=40, hidden=13_824, vocabulary=32_000, tied=False),
    "llama2-70b": DecoderShape(
        layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672, vocabulary=32_000, tied=False
    ),
    # Grattafiori et al., arXiv:2407.21783, table 3.
    "llama3-8b": DecoderShape(
        layers=32, width=4096, heads=32, kv_heads=8, hidden=14_336, vocabulary=128_256, tied=False, rope_base=500_000
    ),
    "llama3-70b": DecoderShape(
        layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256, tied=False, rope_base=500_000
    ),
    "llama3-405b": DecoderShape(
        layers=126,
        width=16_384,
        heads=128,
        kv_heads=8,
        hidden=53_248,
        vocabulary=128_256,
        tied=False,
        rope_base=500_000,
    ),
}
"""Shapes by name. A vocabulary of 0 takes the tokenizer's."""
