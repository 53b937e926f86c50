"""Model shapes against published sizes."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.errors import SpecError
from supernode.schema.model import PRESETS
from supernode.workload.presets import public_model, public_models
from supernode.workload.shape import decoder_shape, gpt_shape, make_shape

# In 10⁹: all parameters, and those that a token meets, as the models' own papers and cards give them.
PUBLISHED = {
    "llama3-8b": (8.03, 8.03), "llama3-70b": (70.6, 70.6), "llama3-405b": (405.9, 405.9), "gpt3-175b": (174.6, 174.6),
    "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22), "gpt-oss-120b": (116.8, 5.7),
    "gpt-oss-20b": (20.9, 4.2),
    "deepseek-v3": (671, 37), "kimi-k2": (1040, 32.6), "mixtral-8x7b": (46.7, 12.9), "nemotron-3-nano": (31.6, 3.6),
    "nemotron-3-super": (120.6, 12), "bert-large": (0.335, 0.335),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    model, (everything, active) = public_model(name), PUBLISHED[name]
    idle = model.routed_parameters * (1 - model.routed / np.maximum(model.experts, 1))

    assert float(model.parameters) / 1e9 == pytest.approx(everything, rel=0.03)
    # Some count the embedding as met, some do not (GPT-OSS gives 5.1 and 3.6 without it).
    assert float(model.parameters - idle) / 1e9 == pytest.approx(active, rel=0.13)


def test_every_public_model_reads() -> None:
    assert all(float(public_model(name).parameters) > 0 for name in public_models())


def test_the_projects_own_decoder_has_the_same_size_here() -> None:
    own = PRESETS["llama3-8b"]

    assert float(decoder_shape(own).parameters) == pytest.approx(own.parameters, rel=1e-5)


def test_shapes_are_arrays_as_well() -> None:
    many = gpt_shape(layers=[24, 96], width=[2304, 12_288], heads=[24, 96], vocabulary=51_200, positions=2048)

    # Narayanan et al., arXiv:2104.04473, table 1 and section 5.1: 1.7 and 174.6 billion.
    assert many.parameters / 1e9 == pytest.approx([1.7, 174.6], rel=0.03)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(SpecError, match="width"):
        make_shape(width=-1, vocabulary=10)
