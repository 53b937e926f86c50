"""Split over tensor ranks, models as their users bring them compute what they compute in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

Law = Callable[..., dict[str, Any]]
VOCABULARY = 97  # No two ranks can have as much of it.
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
DECODER = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


class Translation(nn.Module):
    """An encoder and a decoder on one input, as something that takes a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.both = model

    def forward(self, tokens: Tensor) -> Any:
        return self.both(input_ids=tokens, decoder_input_ids=tokens.flip(1)).logits


def words() -> Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def built(model: str, config: str, x: Callable[[], Tensor] = words, **settings: Any) -> Callable[..., Any]:
    def build() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # Inside a split region ranks draw for themselves, so no numbers could be compared.
        return (Translation(made) if "T5" in model else made), x()

    return build


MODELS = {
    "gpt2": built("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2,
                  n_head=4, use_cache=False, attn_pdrop=0.0),
    "llama": built("LlamaForCausalLM", "LlamaConfig", **DECODER, attn_implementation="eager"),
    "qwen2": built("Qwen2ForCausalLM", "Qwen2Config", **DECODER, tie_word_embeddings=True),
    "qwen3": built("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8),
    "phi3": built("Phi3ForCausalLM", "Phi3Config", **DECODER, pad_token_id=0),
    "mixtral": built("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4),
    "bloom": built("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4,
                   use_cache=False),
    "bert": built("BertForMaskedLM", "BertConfig", **SMALL, num_attention_heads=4, max_position_embeddings=16,
                  attention_probs_dropout_prob=0.0),
    "t5": built("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=32, d_ff=64, d_kv=8,
                num_layers=2, num_heads=4, use_cache=False, dropout_rate=0.0),
    "vit": built("ViTForImageClassification", "ViTConfig", images, hidden_size=32, intermediate_size=64,
                 num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=10),
    "resnet": built("ResNetForImageClassification", "ResNetConfig", images, embedding_size=8, hidden_sizes=[16, 32],
                    depths=[2, 2], layer_type="bottleneck", num_labels=10),
}  # fmt: skip

# Matrices that every rank holds whole, by the end of their names, with a part of the reason that is told for each.
WHOLE = {
    "gpt2": {"wpe.weight": "reads it in the same places"},
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "mixtral": {"mlp.gate.weight": "`index`"},
    "bloom": {},
    "bert": {
        "position_embeddings.weight": "reads it in the same places",
        "token_type_embeddings.weight": "reads it in the same places",
        "transform.dense.weight": "`layer_norm`",
    },
    "t5": {},
    "vit": {
        "projection.weight": "the model's input",
        "position_embeddings": "whole on every rank",
        "cls_token": "whole on every rank",
    },
    "resnet": {
        "embedder.convolution.weight": "the model's input",
        "layer.2.convolution.weight": "a sum over the ranks",
        "shortcut.convolution.weight": "needs it whole",
    },
}


def test_models_split_over_two_are_those_of_one_process_and_only_what_is_named_is_whole(law: Law) -> None:
    found = law(MODELS, ranks=2)

    for name, outcome in found.items():
        outcome.assert_same()
        matrices = {kept.name: kept.reason for kept in outcome.report.whole if len(kept.shape) > 1}
        unmet = {end for end in WHOLE[name] if not any(matrix.endswith(end) for matrix in matrices)}
        assert not unmet, (name, matrices)
        for matrix, reason in matrices.items():
            told = [part for end, part in WHOLE[name].items() if matrix.endswith(end)]
            assert told, (name, matrix, reason)
            assert told[0] in reason, (name, matrix, reason)
    # A table of two ways to say one thing is split once.
    assert [kept.name for kept in found["qwen2"].report.parameters if kept.shape == (VOCABULARY, 32)] == [
        "model.embed_tokens.weight"
    ]
    # Three projections in one, and gate and inner half in one, are held in pieces.
    assert {kept.name.split(".")[-2] for kept in found["gpt2"].report.segmented} == {"c_attn"}
    assert {kept.name.split(".")[-2] for kept in found["phi3"].report.segmented} == {"qkv_proj", "gate_up_proj"}
    # T5's bias by distance is split by heads, in the one place where it is held for all layers.
    biases = [kept for kept in found["t5"].report.parameters if "relative_attention_bias" in kept.name]
    assert [kept.split.dim for kept in biases if kept.split] == [1, 1]
