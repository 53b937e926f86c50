from __future__ import annotations

import pytest

from supernode.advice.question import Question, question_about, question_of, token_flops
from supernode.errors import SpecError
from supernode.planning.cost import flops_per_step
from supernode.schema.job import JobSpec
from supernode.schema.model import PRESETS
from supernode.workload.presets import public_model, public_models
from supernode.workload.shape import decoder_shape


def test_a_token_takes_six_operations_for_each_matrix_entry_and_its_scores() -> None:
    # Llama 3 70B, by hand: 80 layers of (2 × 8192² + 2 × 8192 × 1024) and 3 × 8192 × 28672, and the head.
    entries = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672) + 128_256 * 8192
    scores = 80 * 2 * 64 * 128 * 4096 / 2  # query times key and score times value, causal

    assert token_flops(public_model("llama3-70b"), 4096) == pytest.approx(6 * (entries + scores))


def test_tokens_of_a_mixture_meet_few_experts() -> None:
    model = public_model("deepseek-v3")

    # The paper activates 37 billion of 671 billion parameters; the embedding's 0.9 billion are a look-up.
    assert token_flops(model, 1) / 6 == pytest.approx(37e9 - 0.9e9, rel=0.02)
    assert float(model.parameters) == pytest.approx(671e9, rel=0.01)


def test_our_own_decoder_counts_as_the_planner_counts_it() -> None:
    shape = PRESETS["llama3-8b"]
    ours = token_flops(decoder_shape(shape), 8192)

    # The planner counts the embedding and the norms with the rest.
    extra = 6 * (shape.embedding_parameters + (2 * shape.layers + 1) * shape.width)
    assert ours == pytest.approx(flops_per_step(shape, 1, 8192) - extra, rel=1e-9)


@pytest.mark.parametrize("name", sorted({*PRESETS} & {*public_models()} - {"gpt3-175b"}))
def test_a_public_model_that_we_train_is_the_one_that_we_forecast(name: str) -> None:
    ours, public = decoder_shape(PRESETS[name]), public_model(name)

    for part in ("parameters", "heads", "key_value_heads", "mlp_width", "layers", "vocabulary"):
        assert float(getattr(ours, part)) == pytest.approx(float(getattr(public, part)), rel=1e-5)


def test_a_job_asks_with_its_tokenizer_s_vocabulary() -> None:
    question = question_of(JobSpec(model="tiny", batch=4))

    assert (question.tokens, float(question.model.vocabulary)) == (4 * 128, 256)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"name": "lama3-70b"}, "unknown model `lama3-70b`"), ({"name": "tiny"}, "unknown model `tiny`"),
     ({"batch": 0}, "a batch of 0"), ({"sequence": 1}, "of 1 tokens"), ({"precision": "fp7"}, "precision `fp7`")],
)  # fmt: skip
def test_senseless_questions_are_refused(wrong: dict[str, object], named: str) -> None:
    asked = {"name": "llama3-70b", "batch": 8, "sequence": 128} | wrong
    with pytest.raises(SpecError, match=named) as refused:
        question_about(**asked)  # type: ignore[arg-type]

    assert refused.value.hint


def test_a_model_of_one_s_own_has_no_layers_to_ask_about() -> None:
    with pytest.raises(SpecError, match="your own"):
        question_of(JobSpec(model="net.py:build"))
    assert isinstance(question_about("bert-large", batch=1, sequence=2), Question)
