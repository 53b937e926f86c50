from __future__ import annotations

import pytest

from supernode.advice.local import this_computer
from supernode.advice.question import Question, question_about, question_of
from supernode.errors import SpecError
from supernode.schema.job import JobSpec
from supernode.schema.model import PRESETS
from supernode.schema.spread import Parallelism
from supernode.workload.presets import public_model, public_models
from supernode.workload.shape import decoder_shape


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


def test_this_computer_has_the_cards_of_every_axis_that_a_job_names() -> None:
    fixed = JobSpec(parallelism=Parallelism(tensor=2, context=2, data=2))
    spread = JobSpec(parallelism=Parallelism(context=2, expert=4))

    assert this_computer(fixed).card_count == 8
    assert this_computer(spread).card_count % 8 == 0
