"""Is arithmetic counted once, and as one counts it by hand?"""

from __future__ import annotations

import pytest

from supernode.advice.question import question_of
from supernode.hardware.assemble import predefined
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.workload.flops import token_flops
from supernode.workload.presets import public_model


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


def test_a_plan_a_search_and_a_count_by_hand_agree() -> None:
    # By hand: 32 layers of 2 × 4096² + 2 × 4096 × 1024 and 3 × 4096 × 14336, and the head; scores over half of 8,192.
    entries = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 128_256 * 4096
    counted = 4 * 8192 * 6 * (entries + 32 * 2 * 4096 * 4096)
    job = JobSpec(model="llama3-8b", batch=4, precision="bfloat16", data=DataSpec(sequence=8192))
    plan = make_plan(job, predefined("8xB200"), cards=(0, 1, 2, 3))

    assert plan.flops == pytest.approx(counted, rel=1e-12)
    assert question_of(job).flops == pytest.approx(counted, rel=1e-12)
