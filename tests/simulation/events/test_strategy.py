"""What a strategy's step consists of agrees with what the closed form takes for granted."""

from __future__ import annotations

import pytest

from supernode.errors import SpecError
from supernode.forecast.efficiency import card_model
from supernode.forecast.memory import rank_shares
from supernode.forecast.times import step_parts
from supernode.simulation.events.strategy import even_layers, strategy_work
from supernode.workload.presets import public_model
from supernode.workload.shape import make_shape
from supernode.workload.strategy import Software, make_strategies


@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8, 16])
def test_the_closed_form_counts_the_layers_of_the_fullest_and_the_last_rank(pipeline: int, interleave: int) -> None:
    for layers in range(max(2, pipeline * interleave - 2), 140):
        cut = even_layers(layers, pipeline * interleave)
        held = [sum(cut[rank::pipeline]) for rank in range(pipeline)]
        model = make_shape(width=8, vocabulary=8, attentions=layers, mlps=layers)

        most, last = rank_shares(model, make_strategies(pipeline=pipeline, interleave=interleave))

        assert sum(cut) == layers
        assert float(most) * layers == pytest.approx(max(held[:-1]))
        assert float(last) * layers == pytest.approx(held[-1])


def test_the_slowest_rank_s_passes_are_the_closed_form_s() -> None:
    model, card, software = public_model("llama3-70b"), card_model("H100"), Software()
    ways = make_strategies(
        tensor=4, context=2, pipeline=4, data=2, batch=64, sequence=8192, recompute=2, sequence_parallel=1
    )
    parts = step_parts(model, ways, card, software)
    busy = float(parts.compute + parts.launch + parts.tensor + parts.context)

    work = strategy_work(model, ways, card, software)

    assert work.micro_batches * max(stage.total for stage in work.stages) == pytest.approx(busy)


@pytest.mark.parametrize(
    ("degrees", "layers", "wrong"),
    [
        ({"batch": [1, 2]}, (), "micro_batches"),
        ({"batch": 3, "data": 2}, (), "micro_batches"),
        ({"pipeline": 128}, (), "layers for"),
        ({"pipeline": 2}, (40, 41), "of a model of 80"),
    ],
)
def test_what_is_no_single_strategy_is_refused(degrees: dict[str, object], layers: tuple[int, ...], wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        strategy_work(
            public_model("llama3-70b"),
            make_strategies(**degrees),  # type: ignore[arg-type]
            card_model("H100"),
            Software(),
            layers=layers,
        )
