"""The bars add up to the step, begin at what the arithmetic takes at the peak, and are drawn one after the other."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from supernode.forecast.efficiency import card_model
from supernode.forecast.times import step_parts
from supernode.hardware.assemble import build_machine, predefined
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.spread import Parallelism
from supernode.search.best import best_plans
from supernode.simulation.waterfall import REASONS, plan_waterfall, plans_waterfall, rows, waterfall, waterfall_svg
from supernode.workload.presets import public_model
from supernode.workload.strategy import FULL, Software, make_strategies

SVG = "{http://www.w3.org/2000/svg}"
MODEL, CARD = public_model("llama3-70b"), card_model("H100")
WAYS = make_strategies(
    tensor=8, context=2, pipeline=4, data=4, sharding=1, batch=128, sequence=8192, recompute=FULL, sequence_parallel=1
)
BARS = waterfall(MODEL, WAYS, CARD, Software())


def test_the_bars_add_up_to_the_step() -> None:
    assert sum(bar.seconds for bar in BARS) == pytest.approx(float(step_parts(MODEL, WAYS, CARD, Software()).total))


def test_the_arithmetic_is_what_the_peak_would_take() -> None:
    # 6 FLOPs for each matrix entry and token, 6 × sequence × width a layer for the causal scores (Chowdhery et al.,
    # arXiv:2204.02311, appendix B, halved), their backward 2.5 times the forward in place of twice: 7 for 6.
    tokens, cards = 128 * 8192, 256
    matrices = float(MODEL.parameters - MODEL.vocabulary * MODEL.width)
    scores = 7 * 80 * 8192 * 8192
    peak = CARD.peaks[1]

    assert BARS[0].seconds == pytest.approx(tokens * (6 * matrices + scores) / cards / peak, rel=0.01)


def test_what_is_not_there_takes_no_time() -> None:
    alone = {b.name: b.seconds for b in waterfall(MODEL, make_strategies(sequence=8192), CARD, Software())}

    assert [alone[n] for n in ("tensor", "context", "expert", "bubble", "transfer", "data", "recomputation")] == [0] * 7
    assert alone["uneven stages"] == pytest.approx(0)


def test_recomputation_costs_a_forward() -> None:
    found = {bar.name: bar.seconds for bar in BARS}

    # Three forwards' worth become four, save for the head.
    assert found["recomputation"] / (found["arithmetic"] + found["uneven stages"]) == pytest.approx(1 / 3, rel=0.1)


def test_rows_say_part_share_and_reason() -> None:
    told = dict(rows(BARS))

    assert told["tensor"].endswith(REASONS["tensor"])
    assert "%" in told["arithmetic"]
    assert list(told)[-1] == "step"
    assert "expert" not in told


def test_the_drawing_begins_each_bar_where_the_last_one_ended() -> None:
    root = ElementTree.fromstring(waterfall_svg(BARS))
    boxes = [(float(r.get("x", 0)), float(r.get("width", 0))) for r in root.iter(f"{SVG}rect")]

    *parts, whole = boxes
    for (x, width), (after, _) in pairwise(parts):
        assert after == pytest.approx(x + width, abs=1.2)  # a pixel at least, so that it is seen
    assert sum(parts[-1]) == pytest.approx(sum(whole), abs=1.2)
    assert root.find(f"{SVG}title") is not None
    assert "tensor" in (root.findtext(f"{SVG}desc") or "")
    assert all(rect.find(f"{SVG}title") is not None for rect in root.iter(f"{SVG}rect"))
    assert "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")


def test_a_plan_is_explained_by_its_own_step() -> None:
    machine = build_machine(card_count=8, card="H100")
    job = JobSpec(
        model=DecoderShape(layers=16, width=1024, heads=16, vocabulary=1024), batch=64, gradient_accumulation=8,
        precision="bfloat16", data=DataSpec(sequence=1024),
        parallelism=Parallelism(tensor=2, pipeline=2, data=2),
    )  # fmt: skip
    plan = make_plan(job, machine)

    assert plan.step is not None
    assert sum(bar.seconds for bar in plan_waterfall(plan, machine)) == pytest.approx(plan.step.total)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "llama3-405b"])
@pytest.mark.parametrize("card", ["A100-80", "H100"])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_no_part_is_below_nothing_whichever_rank_is_the_slowest(name: str, card: str, pipeline: int) -> None:
    model = public_model(name)
    ways = make_strategies(
        tensor=4, expert=64 if model.mixtures else 1, pipeline=pipeline, data=512 // 4 // pipeline, batch=1024,
        sequence=4096, sharding=1,
    )  # fmt: skip
    bars = waterfall(model, ways, card_model(card), Software())

    assert min(bar.seconds for bar in bars) >= 0
    total = float(step_parts(model, ways, card_model(card), Software()).total)
    assert sum(bar.seconds for bar in bars) == pytest.approx(total, rel=1e-12)


def test_the_search_whose_slowest_rank_computes_less_than_the_mean_has_no_part_below_nothing() -> None:
    plans = best_plans(public_model("deepseek-v3"), predefined("512xA100-80"), 1024, sequence=4096, top=1)
    bars = plans_waterfall(plans)

    assert min(bar.seconds for bar in bars) >= 0
    assert sum(bar.seconds for bar in bars) == pytest.approx(plans.best.time, rel=1e-9)


def test_what_a_search_found_is_explained_with_its_offload() -> None:
    machine = build_machine(card_count=16, card="H100")
    plans = best_plans(public_model("llama3-8b"), machine, 64, sequence=4096, top=1)

    assert sum(bar.seconds for bar in plans_waterfall(plans)) == pytest.approx(plans.best.time)
