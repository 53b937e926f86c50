"""A model is cut into stages whose names, ties and first values are those of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from supernode.errors import ModelError
from supernode.hardware.assemble import build_machine
from supernode.parallel.assemble import _cut_sequential, _user_ties, assemble
from supernode.parallel.chance import seed_for
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan, Stage
from supernode.schema.spread import Parallelism

MACHINE = build_machine(card_count=8, card="H100")
SHAPE = DecoderShape(layers=5, width=32, heads=4)


def plan_of(model: str | DecoderShape, *, pipeline: int = 1, seed: int = 0) -> Plan:
    own = isinstance(model, str)
    job = JobSpec(
        model=model, seed=seed, batch=16, gradient_accumulation=4, parallelism=Parallelism(pipeline=pipeline, data=1),
        data=DataSpec(dataset="d.py:f") if own else DataSpec(),
    )  # fmt: skip
    return make_plan(job, MACHINE)


def test_a_seed_depends_on_every_part_of_its_key() -> None:
    seeds = {seed_for(*key) for key in [(0,), (1,), (0, "a"), (0, "a", 1), (0, "a", 2), (0, "b", 1)]}

    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A checkpoint of an older version goes on with the same numbers: they may never change.
    assert seed_for(0, "step", 1, 0, 0) == 2616976342065944097


def test_the_whole_decoder_in_one_process_has_each_parameter_once() -> None:
    parts = assemble(plan_of(SHAPE), None)

    names = [name for name, _ in parts.parameters()]
    assert len(names) == len(set(names))
    assert "head.weight" not in names
    assert sum(parameter.numel() for _, parameter in parts.parameters()) == plan_of(SHAPE).parameters
    assert not any(parameter.is_meta for _, parameter in parts.parameters())
    assert list(parts.buffers()) == []


def test_first_values_follow_from_the_seed_alone() -> None:
    def values(seed: int) -> dict[str, torch.Tensor]:
        return dict(assemble(plan_of(SHAPE, seed=seed), None).parameters())

    torch.manual_seed(1)
    first = values(0)
    torch.manual_seed(2)
    again, other = values(0), values(1)

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(first["blocks.0.mlp.gate.weight"], first["blocks.1.mlp.gate.weight"])


def sequence(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


@pytest.mark.parametrize(
    ("widths", "count", "lengths"),
    [
        ((4, 4, 4, 4), 2, [2, 2]),
        ((4, 4, 4, 4), 4, [1, 1, 1, 1]),
        ((30, 4, 4, 4), 2, [1, 3]),
        ((4, 4, 4, 30), 2, [3, 1]),
        ((30, 4, 4), 3, [1, 1, 1]),
    ],
)
def test_a_sequence_is_cut_into_about_equal_parts(widths: tuple[int, ...], count: int, lengths: list[int]) -> None:
    model = sequence(*widths)

    pieces = _cut_sequential(model, count)

    assert [len(list(piece.children())) for piece in pieces] == lengths
    names = [name for piece in pieces for name, _ in piece.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_a_sequence_is_cut_where_a_traced_plan_says() -> None:
    bounds = [(0, 1), (1, 4)]
    stages = tuple(
        Stage(index=s, rank=s, first=first, last=last, embeds=s == 0, heads=s == 1)
        for s, (first, last) in enumerate(bounds)
    )
    pieces = _cut_sequential(sequence(4, 4, 4, 30), 2, stages)

    assert [len(list(piece.children())) for piece in pieces] == [1, 3]


def test_the_pieces_of_a_sequence_compute_what_it_does() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)

    flow = x
    for piece in _cut_sequential(model, 3):
        flow = piece(flow)

    assert torch.equal(flow, model(x))


def test_what_is_no_sequence_or_too_short_cannot_be_cut() -> None:
    with pytest.raises(ModelError, match=r"Linear; only an nn\.Sequential") as first:
        _cut_sequential(nn.Linear(2, 2), 2)
    with pytest.raises(ModelError, match="2 modules in sequence, and the plan wants 3") as second:
        _cut_sequential(sequence(4, 4), 3)

    assert "parallelism.pipeline" in first.value.hint
    assert "at most 2" in second.value.hint


def test_shared_parameters_are_found_with_the_stages_that_hold_them() -> None:
    model = sequence(4, 4, 4, 4)
    model[3].weight = model[0].weight
    apart = sequence(4, 4)

    assert _user_ties(model, plan_of("net.py:build", pipeline=2), 2) == [(("0.weight", "3.weight"), (0, 1))]
    assert _user_ties(model, plan_of("net.py:build"), 1) == [(("0.weight", "3.weight"), (0,))]
    assert _user_ties(apart, plan_of("net.py:build", pipeline=2), 2) == []


def test_the_users_model_starts_from_the_jobs_seed(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))\n"
    )
    plan = plan_of(f"{tmp_path}/net.py:build")

    torch.manual_seed(1)
    first = assemble(plan, None)
    torch.manual_seed(2)
    second = assemble(plan, None)

    assert torch.equal(first.modules[0][0].weight, second.modules[0][0].weight)  # type: ignore[index]
    assert [name for name, _ in first.buffers()] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
