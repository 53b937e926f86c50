"""What do other trainers call our decoder's tensors, what shapes have these, and whose rows do they turn in pairs?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from supernode.errors import ModelError
from supernode.schema.model import DecoderShape

BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The names that a trainer gives to the tensors of a decoder.

    Attributes:
        outside: its name of each tensor outside of blocks, by ours.
        block: what its names of a block's tensors begin with; `{}` is the block's number.
        inside: its name of each tensor within a block, by ours.
        in_pairs: it turns neighbouring rows of queries and keys against each other, where we turn the two halves.
        derived: ends of names of what follows from the shape, and is not read.
    """

    outside: Mapping[str, str]
    block: str
    inside: Mapping[str, str]
    in_pairs: bool = False
    derived: tuple[str, ...] = ()

    def of(self, name: str) -> str:
        """Return its name of one of our tensors.

        Raises:
            ModelError: it has none.
        """
        if matched := BLOCK.fullmatch(name):
            number, rest = matched.groups()
            if rest in self.inside:
                return f"{self.block.format(number)}.{self.inside[rest]}"
        elif name in self.outside:
            return self.outside[name]
        raise ModelError(
            f"`{name}` has no counterpart under these names",
            hint="keep our own names, or train it as your own module with `model: file.py:function`.",
        )


_OUTSIDE = ("embedding.weight", "norm.weight", "head.weight")
_INSIDE = (
    "attention_norm.weight", "attention.query.weight", "attention.key.weight", "attention.value.weight",
    "attention.out.weight", "mlp_norm.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight",
)  # fmt: skip
_EXPERTS = ("mlp.router.weight", "mlp.experts.gate", "mlp.experts.up", "mlp.experts.down")


def _against(ours: Iterable[str], theirs: str) -> dict[str, str]:
    return dict(zip(ours, theirs.split(), strict=True))


NAMINGS: Mapping[str, Naming] = {
    "ours": Naming(
        outside={name: name for name in _OUTSIDE}, block="blocks.{}",
        inside={name: name for name in (*_INSIDE, *_EXPERTS)},
    ),
    # transformers, models/llama/modeling_llama.py.
    "llama": Naming(
        outside=_against(_OUTSIDE, "model.embed_tokens.weight model.norm.weight lm_head.weight"),
        block="model.layers.{}",
        inside=_against(
            _INSIDE,
            "input_layernorm.weight self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
            "self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate_proj.weight mlp.up_proj.weight "
            "mlp.down_proj.weight",
        ),
        derived=("rotary_emb.inv_freq",),
    ),
    # torchtitan 0.3, models/llama3/state_dict_adapter.py; Meta's own files turn pairs too.
    "titan": Naming(
        outside=_against(_OUTSIDE, "tok_embeddings.weight norm.weight lm_head.weight"),
        block="layers.{}",
        inside=_against(
            _INSIDE,
            "attention_norm.weight attention.qkv_linear.wq.weight attention.qkv_linear.wk.weight "
            "attention.qkv_linear.wv.weight attention.wo.weight ffn_norm.weight feed_forward.w1.weight "
            "feed_forward.w3.weight feed_forward.w2.weight",
        ),
        in_pairs=True,
        derived=("freqs_cis", "rope.cache"),
    ),
    # torchtitan up to 0.2, and Meta's own release of Llama but for its `output`, which titan called so too.
    "titan-0.2": Naming(
        outside=_against(_OUTSIDE, "tok_embeddings.weight norm.weight output.weight"),
        block="layers.{}",
        inside=_against(
            _INSIDE,
            "attention_norm.weight attention.wq.weight attention.wk.weight attention.wv.weight attention.wo.weight "
            "ffn_norm.weight feed_forward.w1.weight feed_forward.w3.weight feed_forward.w2.weight",
        ),
        in_pairs=True,
        derived=("freqs_cis",),
    ),
}  # fmt: skip
"""By the name that `--names` takes."""


def shapes_of(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of our decoder's tensors by name; a tied head is the embedding, and not there."""
    keys, width, inner = shape.key_heads * shape.head_width, shape.width, shape.inner
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (width,), "attention.query.weight": (width, width),
        "attention.key.weight": (keys, width), "attention.value.weight": (keys, width),
        "attention.out.weight": (width, width), "mlp_norm.weight": (width,),
    }  # fmt: skip
    if shape.experts:
        block |= {
            "mlp.router.weight": (shape.experts, width), "mlp.experts.gate": (shape.experts, inner, width),
            "mlp.experts.up": (shape.experts, inner, width), "mlp.experts.down": (shape.experts, width, inner),
        }  # fmt: skip
    else:
        block |= {"mlp.gate.weight": (inner, width), "mlp.up.weight": (inner, width), "mlp.down.weight": (width, inner)}
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (shape.vocabulary, width)}
    for number in range(shape.layers):
        found |= {f"blocks.{number}.{name}": size for name, size in block.items()}
    found["norm.weight"] = (width,)
    if not shape.tied:
        found["head.weight"] = (shape.vocabulary, width)
    return found


def heads_in_pairs(name: str, naming: Naming, shape: DecoderShape) -> int:
    """Return how many heads a tensor has whose rows the naming orders otherwise than we do; 0 for the same order."""
    if not naming.in_pairs:
        return 0
    if name.endswith("attention.query.weight"):
        return shape.heads
    return shape.key_heads if name.endswith("attention.key.weight") else 0


def halves_from_pairs(rows: int, heads: int) -> list[int]:
    """Return for each row as we order it, halves against each other, where it stands among rows in pairs.

    Row j of the left half and row j of the right half of a head are rows 2j and 2j + 1 of that head in pairs.
    """
    width = rows // heads
    return [
        head * width + 2 * row + half for head in range(heads) for half in range(2) for row in range(width // 2)
    ]  # fmt: skip


def pairs_from_halves(rows: int, heads: int) -> list[int]:
    """Return for each row in pairs where it stands as we order rows."""
    found = [0] * rows
    for ours, theirs in enumerate(halves_from_pairs(rows, heads)):
        found[theirs] = ours
    return found
