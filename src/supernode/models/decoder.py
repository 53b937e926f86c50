"""A decoder-only transformer as Llama has it, or any run of its blocks; it does not know that it is parallel.

Dims: B batch, T tokens, D width, H query heads, G key heads, K head width, F inner size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from supernode.models.experts import Mixture
from supernode.schema.model import DecoderShape

INIT_DEVIATION = 0.02  # Radford et al., "Language Models are Unsupervised Multitask Learners", and Llama after it.


def rotary_table(
    tokens: int | Tensor, head_width: int, base: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, each (T, K).

    Args:
        tokens: how many, from 0, or where each stands.

    Source: Su et al., "RoFormer", arXiv:2104.09864; halves rotated against each other, as Llama's reference code does.
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    places = tokens if isinstance(tokens, Tensor) else torch.arange(tokens, device=device)
    angles = torch.outer(places.to(pairs), base ** (-pairs / head_width))
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x_BHTK: Tensor, cosines_TK: Tensor, sines_TK: Tensor) -> Tensor:
    """Return the heads turned by their positions; (B, H, T, K)."""
    left, right = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cosines_TK + torch.cat((-right, left), dim=-1) * sines_TK


def attend_causally(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √K) v, each token seeing itself and those before it; (B, H, T, K)."""
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with grouped keys; it counts the heads in its projections' outputs, so a shard works.

    Attributes:
        attend: (queries, keys, values) to what the queries find.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend_causally
        self.head_width = shape.head_width
        width, keys = shape.width, shape.key_heads * shape.head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cosines_TK: Tensor, sines_TK: Tensor) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        q_BHTK, k_BGTK, v_BGTK = (
            projection(x_BTD).view(batch, tokens, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        q_BHTK, k_BGTK = rotate(q_BHTK, cosines_TK, sines_TK), rotate(k_BGTK, cosines_TK, sines_TK)
        mixed_BHTK = self.attend(q_BHTK, k_BGTK, v_BGTK)
        return self.out(mixed_BHTK.transpose(1, 2).reshape(batch, tokens, -1))


class GatedMlp(nn.Module):
    """SiLU-gated two-layer network. Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention and MLP or mixture, each behind a norm and added to the stream; (B, T, D) to (B, T, D)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = Mixture(shape) if shape.experts else GatedMlp(shape)
        self.dropout = shape.dropout

    def forward(self, x_BTD: Tensor, cosines_TK: Tensor, sines_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self._drop(self.attention(self.attention_norm(x_BTD), cosines_TK, sines_TK))
        return x_BTD + self._drop(self.mlp(self.mlp_norm(x_BTD)))

    def _drop(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.dropout, self.training) if self.dropout else x_BTD


class Decoder(nn.Module):
    """Some blocks of the model, with the embedding before them or the head behind them where asked.

    Blocks keep their number in the whole model, so a parameter has one name however the model is cut.

    Args:
        shape: of the whole model; its vocabulary must be set.
        blocks: numbers of the blocks to hold; all by default.
        embeds: take token numbers (B, T) instead of the stream (B, T, D).
        heads: return logits (B, T, V) instead of the stream.

    Attributes:
        places: where in the sequence the tokens stand that attention sees, (T,); None for one after the other from 0.
    """

    def __init__(
        self, shape: DecoderShape, *, blocks: Iterable[int] | None = None, embeds: bool = True, heads: bool = True
    ) -> None:
        super().__init__()
        self.shape = shape
        numbers = range(shape.layers) if blocks is None else blocks
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if embeds else None
        self.blocks = nn.ModuleDict({str(number): Block(shape) for number in numbers})
        self.norm = nn.RMSNorm(shape.width, eps=1e-5) if heads else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if heads else None
        self.places: Tensor | None = None
        self._rotary: tuple[Tensor, Tensor] | None = None
        self.tie()

    def tie(self) -> None:
        """Give the head the embedding's matrix if they are tied and both are here."""
        if self.shape.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = x if self.embedding is None else self.embedding(x)
        cosines_TK, sines_TK = self._rotary_for(x_BTD)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, cosines_TK, sines_TK)
        if self.norm is None or self.head is None:
            return x_BTD
        return self.head(self.norm(x_BTD))

    def _rotary_for(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x_BTD.shape[1] if self.places is None else len(self.places)
        if self._rotary is None or self._rotary[0].shape[0] < tokens or self._rotary[0].device != x_BTD.device:
            stand = tokens if self.places is None else self.places
            table = rotary_table(stand, self.shape.head_width, self.shape.rope_base, x_BTD.device)
            self._rotary = (table[0].to(x_BTD.dtype), table[1].to(x_BTD.dtype))
        return self._rotary[0][:tokens], self._rotary[1][:tokens]

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter with its first values, by its name in the whole model."""
        if "norm" in name:
            parameter.fill_(1.0)
            return
        deviation = INIT_DEVIATION
        if name.endswith(("attention.out.weight", "mlp.down.weight", "mlp.experts.down")):
            deviation /= math.sqrt(2 * self.shape.layers)
        parameter.normal_(0.0, deviation, generator=generator)
