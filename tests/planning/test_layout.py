"""Degrees that fit are filled in; degrees that do not are named with numbers that do."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from supernode.errors import SpecError
from supernode.planning.layout import fit_layout, resolve_layout
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism


def job(*, batch: int = 16, accumulation: int = 1, model: str | DecoderShape = "tiny", **degrees: object) -> JobSpec:
    return JobSpec(
        model=model, batch=batch, gradient_accumulation=accumulation, parallelism=replace(Parallelism(), **degrees)
    )


def test_data_takes_what_tensor_and_pipeline_leave_over() -> None:
    layout = resolve_layout(job(batch=16, accumulation=2, tensor=2, pipeline=2), 16)

    assert (layout.tensor, layout.pipeline, layout.data) == (2, 2, 4)
    assert layout.ranks == 16


def test_after_a_card_is_lost_data_shrinks_to_what_the_batch_divides_by() -> None:
    assert resolve_layout(job(batch=16), 7).data == 4


@pytest.mark.parametrize("cards", range(1, 20))
def test_an_open_data_axis_always_fits_cards_and_batch(cards: int) -> None:
    layout = resolve_layout(job(batch=12), cards)

    assert layout.ranks <= cards
    assert 12 % layout.data == 0


def test_more_cards_than_are_up_are_refused_with_the_data_that_fits() -> None:
    with pytest.raises(SpecError, match=r"wants 16 cards .*, and 9 are up") as caught:
        resolve_layout(job(tensor=2, data=8), 9)

    assert "`parallelism.data` to 4" in caught.value.hint


def test_a_context_axis_of_too_many_cards_is_named_with_what_fits_cards_and_sequence() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_layout(replace(job(context=16, data=1), data=DataSpec(sequence=48)), 5)

    assert caught.value.hint == "set `parallelism.context` to 4."


def test_one_copy_that_is_too_large_gets_a_smaller_tensor() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_layout(job(tensor=4, pipeline=4, accumulation=4), 3)

    assert "`parallelism.tensor` to 2 and `parallelism.pipeline` to at most 1" in caught.value.hint


def test_tensor_divides_key_heads_too() -> None:
    shape = DecoderShape(heads=8, kv_heads=2, width=128)

    with pytest.raises(SpecError, match="8 heads, 2 key heads") as caught:
        resolve_layout(job(model=shape, tensor=4), 4)

    assert "`parallelism.tensor` to 2" in caught.value.hint


def test_an_inner_size_and_a_vocabulary_need_not_divide_by_tensor() -> None:
    shape = DecoderShape(heads=4, width=128, hidden=257, vocabulary=301)

    assert resolve_layout(job(model=shape, tensor=4), 4).tensor == 4


def test_every_stage_needs_a_layer() -> None:
    with pytest.raises(SpecError, match="4 layers for 8 stages") as caught:
        resolve_layout(job(pipeline=4, schedule="interleaved", interleave=2, accumulation=4), 4)

    assert "`parallelism.pipeline` to 2" in caught.value.hint


def test_a_batch_that_does_not_divide_gets_two_ways_out() -> None:
    with pytest.raises(SpecError, match=r"`batch` 16 .* 3 × data 1 = 3") as caught:
        resolve_layout(job(batch=16, accumulation=3), 1)

    assert "`gradient_accumulation` to 2" in caught.value.hint
    assert "`batch` to 15" in caught.value.hint


def test_a_pipeline_needs_as_many_micro_batches_as_stages() -> None:
    with pytest.raises(SpecError, match="fewer than the 4 pipeline stages") as caught:
        resolve_layout(job(pipeline=4, accumulation=2), 4)

    assert "`gradient_accumulation` to 4" in caught.value.hint


def test_interleaving_wants_whole_rounds_of_micro_batches() -> None:
    with pytest.raises(SpecError, match=r"no multiple of `parallelism\.pipeline` 2") as caught:
        resolve_layout(job(batch=15, accumulation=5, pipeline=2, schedule="interleaved", interleave=2), 2)

    assert "`gradient_accumulation` to 4" in caught.value.hint


def test_an_own_module_takes_the_axes_that_its_graph_is_taken_apart_by() -> None:
    found = resolve_layout(job(model="net.py:build", tensor=3, pipeline=2, accumulation=2), 6)

    assert (found.tensor, found.pipeline) == (3, 2)


def test_an_own_module_does_not_share_its_tokens_among_tensor_ranks() -> None:
    # Its split products meet whole, so that gradients of what lies between would be counted twice.
    with pytest.raises(SpecError, match=r"`parallelism\.sequence` is on, and net\.py:build") as caught:
        resolve_layout(job(model="net.py:build", tensor=2, sequence=True), 2)

    assert "leave out `parallelism.sequence`" in caught.value.hint


@pytest.mark.parametrize("arithmetic", ["float32", "float8"])
def test_an_own_module_that_becomes_a_graph_has_no_layers_for_other_arithmetic(
    arithmetic: Literal["float32", "float8"],
) -> None:
    asked = replace(job(model="net.py:build", tensor=2), precision="bfloat16", arithmetic=arithmetic)
    with pytest.raises(SpecError, match=f"`arithmetic` is {arithmetic}, and net") as caught:
        resolve_layout(asked, 2)

    assert "`parallelism.tensor` to 1" in caught.value.hint
    assert resolve_layout(replace(asked, parallelism=Parallelism(data=2)), 2).data == 2


def test_one_stage_has_no_bubble_to_fill_and_fewer_cards_go_on_without_it() -> None:
    with pytest.raises(SpecError, match="zero_bubble on one pipeline stage"):
        Parallelism(schedule="zero_bubble")

    fitted = fit_layout(job(accumulation=2, pipeline=2, schedule="zero_bubble"), 1).parallelism
    assert (fitted.pipeline, fitted.schedule) == (1, "1f1b")
