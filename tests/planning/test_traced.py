"""A plan of the user's own module follows its trace: cut, memory and time by hand, and beside a shape's plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from supernode.errors import CapacityError, SpecError
from supernode.forecast.network import send_time, sum_time
from supernode.forecast.rates import card_of
from supernode.hardware.assemble import build_machine
from supernode.models.decoder import Decoder
from supernode.parallel.recompute import recompute_user
from supernode.parallel.tensor import cross_entropy
from supernode.planning.again import units_of
from supernode.planning.cost import at_work
from supernode.planning.planner import explain, make_plan
from supernode.planning.traced import traced_first, traced_messages, traced_stage_times, traced_sums
from supernode.probing.trace import trace_module
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism
from supernode.schema.trace import ModelTrace, PassWork, Size, TracedPart, Work

MACHINE = build_machine(card_count=8, card="H100")
TERA = 1e12


def part(name: str, teraflops: float = 1.0, parameters: int = 1000, **more: object) -> TracedPart:
    """Return a part whose forward takes so many TFLOP for each sample, and its backward twice as many."""
    ahead, back = Work(products=teraflops * TERA), Work(products=2 * teraflops * TERA)
    given = {
        "kind": "Linear", "parameters": parameters, "trained": parameters, "kept": Size(each=100.0, once=7.0),
        "output": Size(each=10.0), "forward": PassWork(each=ahead, kernels=1, operations=3),
        "backward": PassWork(each=back, kernels=2, operations=5), **more,
    }  # fmt: skip
    return TracedPart(name=name, **given)  # type: ignore[arg-type]


def sequence(*parts: TracedPart) -> ModelTrace:
    return ModelTrace(parts=parts, children=tuple(p.name for p in parts if "." not in p.name and p.name != "loss"))


def job(**degrees: object) -> JobSpec:
    return JobSpec(
        model="mine.py:build", data=DataSpec(dataset="mine.py:data"), batch=16, gradient_accumulation=4,
        parallelism=replace(Parallelism(data=1), **degrees),
    )  # fmt: skip


def bounds(plan: Plan) -> list[tuple[int, int]]:
    return [(stage.first, stage.last) for stage in plan.stages]


def test_the_cut_follows_the_cost_and_not_the_number_of_modules() -> None:
    trace = sequence(*(part(str(n), cost) for n, cost in enumerate([1, 1, 1, 1, 4])))

    assert bounds(make_plan(job(pipeline=2), MACHINE, trace=trace)) == [(0, 4), (4, 5)]
    assert ("stages", "0–3 | 4") in explain(make_plan(job(pipeline=2), MACHINE, trace=trace))


def test_the_loss_is_computed_by_the_last_stage() -> None:
    trace = sequence(part("0"), part("1"), part("2"), part("3"), part("loss", 2.0, parameters=0))

    # 1 + 1 + 1 beside 1 + 2: the loss keeps the last module alone.
    assert bounds(make_plan(job(pipeline=2), MACHINE, trace=trace)) == [(0, 3), (3, 4)]


def test_a_step_takes_the_products_at_the_cards_rate() -> None:
    plan = make_plan(job(), MACHINE, trace=sequence(part("0"), part("1")))
    rate = float(card_of(MACHINE).product_rate(torch.tensor(5.0).numpy()))

    assert plan.flops == pytest.approx(16 * 2 * 3 * TERA)
    assert plan.step is not None
    assert plan.step.compute == pytest.approx(plan.flops / rate, rel=1e-4)
    (stage,) = traced_stage_times(plan, MACHINE)
    assert stage.backward == pytest.approx(2 * stage.forward, rel=1e-4)


def test_memory_is_the_parts_of_the_trace() -> None:
    trace = replace(sequence(part("0", buffers=64), part("1", trained=0)), workspace=Size(each=1e6, once=0.0))
    plan = make_plan(job(), MACHINE, trace=trace)

    assert plan.parameters == 2000
    assert plan.memory is not None
    assert plan.memory.weights == 2000 * 4 + 64
    assert plan.memory.gradients == 1000 * 4  # the other part is frozen
    assert plan.memory.optimizer == 2 * 1000 * 4
    assert plan.memory.activations == 2 * (4 * 100 + 7)
    assert plan.memory.workspace == 4e6


def test_a_matrix_tied_across_stages_is_held_by_both() -> None:
    trace = sequence(part("0", parameters=5000), part("1", parameters=10, shared=(("0", 5000),)))
    sgd = replace(job(pipeline=2), optimizer=OptimizerSpec(name="sgd", momentum=0.0))
    memory = make_plan(sgd, MACHINE, trace=trace).memory

    assert make_plan(sgd, MACHINE, trace=trace).parameters == 5010
    assert memory is not None
    assert memory.weights in (4 * 5000, 4 * 5010)  # of the fuller of the two


def test_the_first_stage_of_1f1b_holds_a_micro_batch_for_each_stage_and_what_it_sent() -> None:
    plan = make_plan(job(pipeline=4), MACHINE, trace=sequence(*(part(str(n)) for n in range(4))))

    assert plan.memory is not None
    assert plan.memory.activations == 4 * (4 * 100 + 7 + 4 * 10)


def test_a_module_that_is_no_sequence_is_cut_in_the_order_in_which_its_parts_are_met() -> None:
    trace = ModelTrace(parts=(part("", 0), part("body.first"), part("body.second"), part("head", 3), part("loss", 0)))

    plan = make_plan(job(pipeline=2), MACHINE, trace=trace)

    assert bounds(plan) == [(0, 3), (3, 5)]
    assert ("stages", "(root)–body.second | head–loss") in explain(plan)
    assert any("cut in the graph of your module" in note for note in plan.notes)
    assert make_plan(job(pipeline=4), MACHINE, trace=ModelTrace(parts=(part("body"), part("loss")))).memory is None
    with pytest.raises(SpecError, match="cannot fill 4 stages"):
        make_plan(job(pipeline=4), MACHINE, trace=sequence(part("0"), part("1")))


def test_a_tensor_axis_holds_its_share_of_parameters_and_whole_activations() -> None:
    trace = sequence(part("0", parameters=1001), part("1", parameters=2000))
    one, two = (make_plan(job(tensor=n), MACHINE, trace=trace) for n in (1, 2))

    assert one.memory is not None
    assert two.memory is not None
    assert (one.memory.weights, two.memory.weights) == (4 * 3001, 4 * 1501)
    assert one.memory.activations == two.memory.activations
    assert any("here each card has 1/2 of all parameters" in note for note in two.notes)


def test_a_module_that_does_not_fit_is_refused_with_the_key_that_helps() -> None:
    # 3 samples of 10 GiB fit, 16 do not.
    trace = sequence(part("0", kept=Size(each=10 * 2.0**30)))
    with pytest.raises(CapacityError, match="activations") as caught:
        make_plan(replace(job(), gradient_accumulation=1), MACHINE, trace=trace)

    assert "`gradient_accumulation` to 4" in caught.value.hint


def test_without_a_trace_the_plan_stays_open() -> None:
    plan = make_plan(job(), MACHINE)

    assert plan.memory is None
    assert plan.step is None


def test_a_traced_decoder_is_planned_like_its_shape() -> None:
    shape = DecoderShape(layers=4, width=1024, heads=8, vocabulary=32_000)

    def tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.zeros(samples, 1024, dtype=torch.int64),) * 2

    trace = trace_module(lambda: Decoder(shape), tokens, cross_entropy, micro_batch=4)
    asked = JobSpec(
        model=shape, batch=16, gradient_accumulation=4, parallelism=Parallelism(data=1), data=DataSpec(sequence=1024)
    )  # fmt: skip
    ours = make_plan(asked, MACHINE)
    traced = make_plan(replace(asked, model="mine.py:build"), MACHINE, trace=trace)

    assert ours.step is not None
    assert traced.step is not None
    assert ours.memory is not None
    assert traced.memory is not None
    assert traced.parameters == ours.parameters
    assert traced.memory.weights == pytest.approx(ours.memory.weights, rel=1e-4)
    # PyTorch's RMSNorm on a CPU keeps a third copy of the stream, which the closed form does not count.
    assert traced.memory.total == pytest.approx(ours.memory.total, rel=0.15)
    # The shape's bytes are what good kernels move, the trace's what eager PyTorch does.
    assert traced.step.compute == pytest.approx(ours.step.compute, rel=0.3)


FROZEN_LAYOUTS: list[dict[str, object]] = [
    {"pipeline": 2, "data": 2}, {"data": 2}, {"pipeline": 2, "data": 2, "sharding": "fsdp"},
]  # fmt: skip


@pytest.mark.parametrize("degrees", FROZEN_LAYOUTS, ids=str)
def test_a_stage_that_trains_nothing_sums_nothing(degrees: dict[str, object]) -> None:
    frozen = [part(str(n), 4.0, parameters=10**6, trained=0) for n in range(2)]
    trace = sequence(*frozen, *(part(str(n), 4.0, parameters=10**6, trained=10**6) for n in (2, 3)))

    plan = make_plan(job(**degrees), MACHINE, trace=trace)

    assert plan.step is not None
    first, last = (traced_sums(plan, MACHINE, rank) for rank in (0, plan.layout.pipeline - 1))
    assert last[0] > 0
    if plan.layout.pipeline > 1:
        assert first[0] == traced_first(plan, 0) == 0
        assert (first[1] > 0) == (plan.layout.sharding == "fsdp")  # weights that stand still are gathered all the same


@pytest.mark.parametrize("sharding", ["replicas", "fsdp"])
def test_a_module_that_trains_nothing_exchanges_no_gradients(sharding: str) -> None:
    bare = [part(str(n), parameters=0, trained=0) for n in range(2)]

    plan = make_plan(job(data=2, sharding=sharding), MACHINE, trace=sequence(*bare))

    assert plan.step is not None
    assert plan.step.data == 0
    assert traced_sums(plan, MACHINE, 0) == (0, 0)  # no latency for no bytes


def test_groups_lie_where_the_tensor_axis_leaves_them() -> None:
    # Tensor 4 × data 2 fills a node of 8; with data 4 a copy's neighbours and a stage's are in other nodes.
    machine = build_machine(card_count=64, card="H100", interconnect="Hybrid")
    trace = sequence(*(part(str(n), parameters=10**6, output=Size(each=1e6)) for n in range(4)))

    def plan(**degrees: int) -> Plan:
        return make_plan(job(**degrees), machine, trace=trace)

    wires = at_work(plan(), machine).tuned_wires
    apart = plan(tensor=8, data=2)
    nbytes = np.asarray(4e6 / 8 * 4)
    assert traced_sums(apart, machine, 0)[0] == pytest.approx(
        float(sum_time(wires, nbytes, cards=np.asarray(2.0), stride=np.asarray(8.0))) / 2
    )
    near, far = plan(pipeline=2, data=4), plan(pipeline=2, tensor=2, data=4)
    assert traced_messages(near, machine)[1] == float(send_time(wires, np.asarray(1e6), stride=np.asarray(4.0)))
    assert traced_messages(far, machine)[1] == float(send_time(wires, np.asarray(1e6), stride=np.asarray(8.0)))
    assert traced_messages(far, machine)[1] > traced_messages(near, machine)[1]


def layered(count: int) -> ModelTrace:
    """Return a model with an embedding, a list of layers of a linear each, and a head."""
    layers = [
        part(f"layers.{n}{below}", output=Size(each=30.0), kept=Size(each=50.0), kind=kind)
        for n in range(count) for below, kind in (("", "Layer"), (".linear", "Linear"))
    ]  # fmt: skip
    return ModelTrace(
        parts=(
            part("", 0, kind="Model", kept=Size()), part("embedding", 0, kind="Embedding"), *layers,
            part("head", 1), part("loss", 0, kind="loss"), part("layers", 0, kind="ModuleList", kept=Size()),
        )
    )  # fmt: skip


def test_layers_that_are_computed_again_keep_their_inputs_and_take_a_forward_more() -> None:
    whole, again = (make_plan(job(recompute=what), MACHINE, trace=layered(6)) for what in ("none", "full"))

    assert whole.memory is not None
    assert again.memory is not None
    ends = 3 * (4 * 100 + 7)  # embedding, head, loss
    assert whole.memory.activations == ends + 6 * 2 * 4 * 50
    assert again.memory.activations == ends + 6 * 4 * 30 + 2 * 4 * 50
    (one,), (two,) = (traced_stage_times(plan, MACHINE) for plan in (whole, again))
    # Twelve of thirteen parts with work are in layers.
    assert two.forward == one.forward
    assert two.backward == pytest.approx(one.backward + 12 / 13 * one.forward, rel=1e-3)
    assert any("parallelism.recompute" in note for note in again.notes)
    assert not any("parallelism.recompute" in note for note in whole.notes)


def test_a_stage_of_a_graph_that_is_computed_again_keeps_its_input() -> None:
    trace = ModelTrace(parts=tuple(part(f"body{n}", parameters=0, trained=0) for n in range(4)))
    plan = make_plan(job(pipeline=2, recompute="full"), MACHINE, trace=trace)

    assert plan.memory is not None
    assert bounds(plan) == [(0, 2), (2, 4)]
    # Two micro-batches on the first of two, of each the output that it sent (samples themselves are not counted), and
    # for a moment all that one keeps.
    assert plan.memory.activations == 2 * 4 * 10 + 2 * (4 * 100 + 7)


def test_a_sequence_of_single_layers_is_computed_again_in_runs() -> None:
    trace = sequence(*(part(str(n)) for n in range(9)))

    memory = make_plan(job(recompute="full"), MACHINE, trace=trace).memory
    assert memory is not None
    # Three runs of three, the last kept.
    assert memory.activations == 3 * (4 * 100 + 7) + 2 * 4 * 10 + 3 * (4 * 100 + 7)


class Mixed(nn.Module):
    """A model with a list of layers, a sequence of blocks, and one of single layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)), nn.Tanh())
        self.unlike = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Tanh())


@pytest.mark.parametrize("make", [Mixed, lambda: nn.Sequential(*(nn.Sequential(nn.Tanh()) for _ in range(3)))])
def test_what_a_plan_takes_to_be_computed_again_is_what_the_trainer_does(make: Callable[[], nn.Module]) -> None:
    model = make()
    parts = tuple(TracedPart(name=name, kind=type(each).__name__) for name, each in model.named_modules())
    children = tuple(name for name, _ in model.named_children()) if isinstance(model, nn.Sequential) else ()

    recompute_user(model, "full")

    wrapped = {name for name, each in model.named_modules() if "forward" in vars(each)}
    units = units_of(ModelTrace(parts=parts, children=children), is_graph=False)
    assert len(wrapped) in (3, 5)
    assert {unit.last for unit in units} == wrapped
