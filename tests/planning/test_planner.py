"""A plan says who computes what, refuses what does not fit, and can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supernode.errors import CapacityError, SpecError
from supernode.hardware.assemble import build_machine
from supernode.planning.planner import explain, make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Communication, Parallelism

MACHINE = build_machine(card_count=8, card="H100")
LARGE = JobSpec(model="llama3-8b", batch=8, precision="bfloat16", data=DataSpec(sequence=2048))


def test_the_plan_takes_all_cards_and_cuts_the_batch() -> None:
    plan = make_plan(JobSpec(batch=32, gradient_accumulation=2), MACHINE)

    assert plan.layout.data == 8
    assert plan.cards == tuple(range(8))
    assert (plan.micro_batch, plan.micro_batches) == (2, 2)
    assert plan.layout.data * plan.micro_batch * plan.micro_batches == 32


@pytest.mark.parametrize(
    ("tokenizer", "given", "expected"), [("bytes", 0, 256), ("bpe:4096", 0, 4096), ("bytes", 300, 300)]
)
def test_the_vocabulary_is_that_of_the_tokenizer(tokenizer: str, given: int, expected: int) -> None:
    plan = make_plan(JobSpec(data=DataSpec(tokenizer=tokenizer)), MACHINE, vocabulary=given)

    assert plan.vocabulary == expected
    assert plan.parameters == replace(DecoderShape(), vocabulary=expected).parameters


def test_a_model_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(SpecError, match=r"`model\.vocabulary` is 100") as caught:
        make_plan(JobSpec(model=DecoderShape(vocabulary=100)), MACHINE, vocabulary=256)

    assert "256 or more" in caught.value.hint


def test_ranks_go_to_the_first_cards_at_hand() -> None:
    plan = make_plan(JobSpec(batch=4), MACHINE, (6, 2, 3, 5, 7))

    assert plan.cards == (6, 2, 3, 5)
    assert any("1 of 5 cards stay idle" in note for note in plan.notes)


@pytest.mark.parametrize("cards", [(8,), (0, 0), ()])
def test_strange_cards_are_refused(cards: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="of a machine of 8"):
        make_plan(JobSpec(), MACHINE, cards)


def test_a_model_that_does_not_fit_is_refused_with_the_key_that_helps() -> None:
    # 8 billion parameters × 2 bytes × (weights, gradients, two moments) are 60 GiB; with two samples' activations and
    # logits it is more than the 80 GB of one card.
    with pytest.raises(CapacityError, match="H100 has") as caught:
        make_plan(replace(LARGE, batch=16), MACHINE)

    assert "`gradient_accumulation`" in caught.value.hint or "fsdp" in caught.value.hint


def test_the_remedy_is_true() -> None:
    fits = replace(LARGE, parallelism=Parallelism(sharding="fsdp"))

    plan = make_plan(fits, MACHINE)

    assert plan.memory is not None
    assert plan.memory.total < MACHINE.card.memory


def test_an_own_module_is_planned_without_numbers() -> None:
    own = JobSpec(
        model="net.py:build",
        batch=8,
        gradient_accumulation=4,
        data=DataSpec(dataset="net.py:data"),
        parallelism=Parallelism(pipeline=2, data=1),
    )

    plan = make_plan(own, MACHINE)

    assert plan.memory is None
    assert plan.step is None
    assert (plan.parameters, plan.vocabulary, plan.flops) == (0, 0, 0.0)
    assert [(s.rank, s.first, s.last) for s in plan.stages] == [(0, 0, 0), (1, 0, 0)]
    assert any("your own" in note for note in plan.notes)


def test_rows_for_people_carry_units_and_parts() -> None:
    rows = dict(explain(make_plan(replace(LARGE, parallelism=Parallelism(sharding="fsdp")), MACHINE)))

    assert rows["layout"] == "tensor 1 × pipeline 1 × data 8, fsdp"
    assert rows["cards"] == "8 (0–7)"
    assert rows["stages"] == "embedding + layers 0–31 + head"
    assert "GiB" in rows["memory of the fullest card"]
    assert rows["step, predicted"].split(":")[0].endswith("s")
    assert "token/s" in rows["throughput, predicted"]


def test_a_remedy_is_looked_for_among_counts_that_the_batch_can_have() -> None:
    # 2^20 micro-batches are more than a job may ask for.
    with pytest.raises(CapacityError, match="H100 has") as caught:
        make_plan(replace(LARGE, batch=2**19, gradient_accumulation=2**16), MACHINE)

    assert "fsdp" in caught.value.hint


def test_that_compression_is_not_predicted_is_told() -> None:
    def told(job: JobSpec) -> list[str]:
        return [note for note in make_plan(job, MACHINE).notes if "communication.compress" in note]

    topk = JobSpec(communication=Communication(compress="topk"))
    (slow,) = told(topk)
    (everywhere,) = told(replace(topk, communication=Communication(compress="topk", where="all")))
    assert told(JobSpec()) == told(replace(topk, batch=1, gradient_accumulation=1)) == []
    assert "as if whole gradients travelled" in slow
    assert "4 bytes" not in slow
    assert "4 bytes more for each number" in everywhere
