"""How will this job run on this machine? Puts layout, cut, memory and time together, and tells people of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from supernode.errors import CapacityError, SpecError
from supernode.forecast.trust import doubts
from supernode.hardware.machine import Machine
from supernode.planning.cost import flops_per_step, step_time
from supernode.planning.cut import cut_stages
from supernode.planning.layout import resolve_layout
from supernode.planning.memory import USABLE, memory_use, product_precision, wall
from supernode.planning.sums import sum_table
from supernode.planning.traced import cut_traced, pieces_of, stage_names, traced_memory, traced_step_time
from supernode.planning.work import block_forward_flops, head_forward_flops, with_vocabulary
from supernode.schema.job import JobSpec, OptimizerSpec
from supernode.schema.plan import Layout, MemoryUse, Plan, Stage
from supernode.schema.trace import ModelTrace
from supernode.units import show, show_bytes, show_seconds

BYTE_TOKENS = 256


def make_plan(
    job: JobSpec, machine: Machine, cards: tuple[int, ...] | None = None, *, vocabulary: int = 0,
    trace: ModelTrace | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of `job` on the first of `cards` that it can use.

    Args:
        cards: cards at hand, in rank order; None for all of the machine's.
        vocabulary: token kinds that the tokenizer has; 0 for what the job's `data.tokenizer` says.
        trace: of the user's own module; without it, its cut, memory and time stay open.

    Raises:
        SpecError: the job cannot be laid out on so many cards.
        CapacityError: a card's memory would not hold its part, or it has no products in the precision asked for.
    """
    at_hand = _check_cards(machine, cards)
    _check_products(job, machine)
    plan = _draft(job, machine, at_hand, vocabulary, trace)
    memory = memory_use(plan) or traced_memory(plan)
    notes = list(_notes(plan, machine, at_hand, memory))
    if memory is not None and memory.total > wall(machine):
        part = "" if machine.card.kind == "cpu" else f", of which tensors can have {USABLE:.0%}"
        raise CapacityError(
            f"the fullest card would hold {show_bytes(memory.total)} ({_memory_parts(memory)}), "
            f"and {machine.card.name} has {show_bytes(machine.card.memory)}{part}",
            hint=_remedy(job, machine, at_hand, vocabulary, trace),
        )
    step = step_time(plan, machine) or traced_step_time(plan, machine)
    return replace(plan, memory=memory, step=step, notes=tuple(notes))


def explain(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan as rows for people: what, and how much."""
    rows = [
        ("machine", plan.machine),
        ("layout", str(plan.layout)),
        ("cards", f"{len(plan.cards)} ({ranges(plan.cards)})"),
        ("batch", f"{plan.job.batch} samples = {plan.layout.data} × {plan.micro_batches} × {plan.micro_batch}"
                  " (data × micro-batches × samples)"),
    ]  # fmt: skip
    rows.append(("optimizer", optimizer_words(plan.job.optimizer)))
    if plan.layout.pipeline > 1:
        rows.append(("schedule", plan.layout.schedule))
    if plan.trace is not None and len(plan.stages) > 1:
        rows.append(("stages", stage_names(plan)))
    elif plan.parameters and plan.trace is None:
        rows.append(("stages", _stages(plan.stages)))
    if plan.parameters:
        rows += [("parameters", f"{plan.parameters:,}"), ("arithmetic of a step", show(plan.flops, "FLOP"))]
    if plan.memory is not None:
        rows.append(("memory of the fullest card", f"{show_bytes(plan.memory.total)}: {_memory_parts(plan.memory)}"))
    if plan.step is not None:
        step, unit = plan.step, "sample/s" if plan.job.data.dataset else "token/s"
        names = ("compute", "tensor", "context", "expert", "pipeline", "data", "optimizer", "overhead")
        parts = [f"{name} {show_seconds(getattr(step, name))}" for name in names if getattr(step, name)]
        rows += [
            ("step, predicted", f"{show_seconds(step.total)}: {', '.join(parts)}"),
            ("throughput, predicted", f"{show(plan.tokens_per_step / step.total, unit)}"),
            ("arithmetic, predicted", f"{show(plan.flops / step.total / plan.ranks, 'FLOP/s')} per card"),
        ]
    return rows + [("note", note) for note in plan.notes]


def optimizer_words(spec: OptimizerSpec) -> str:
    """Return all that moves the weights in a line; what is not in it is off.

    >>> optimizer_words(OptimizerSpec(clip=1.0, warmup=10, decay="cosine"))
    'adamw, rate 0.001 after 10 steps, cosine to 0.0001, betas 0.9 and 0.95, epsilon 1e-08, clipped at norm 1'
    """
    words = [f"{spec.name}, rate {spec.learning_rate:g}" + f" after {spec.warmup} steps" * (spec.warmup > 0)]
    if spec.decay != "none":
        words.append(f"{spec.decay} to {spec.final_ratio * spec.learning_rate:g}")
    if spec.name == "sgd":
        words.append(f"momentum {spec.momentum:g}")
    else:
        words.append(f"betas {spec.betas[0]:g} and {spec.betas[1]:g}, epsilon {spec.epsilon:g}")
    if spec.weight_decay:
        words.append(f"weight decay {spec.weight_decay:g}")
    if spec.clip:
        words.append(f"clipped at norm {spec.clip:g}")
    if spec.state != "same":
        words.append(f"moments in {spec.state}")
    if spec.rounding != "nearest":
        words.append("weights rounded by chance")
    if spec.in_backward:
        words.append("updated in backward")
    return ", ".join(words)


def _check_products(job: JobSpec, machine: Machine) -> None:
    """Check that the card multiplies in 8 bits, if the job asks for it; a CPU does, slower than in 16."""
    card = machine.card
    if job.arithmetic == "float8" and card.kind != "cpu" and "float8" not in card.flops:
        raise CapacityError(
            f"{card.name} has no products in float8 ({', '.join(card.flops)})",
            hint="leave out `arithmetic`, or take a card that has, such as H100.",
        )


def _check_cards(machine: Machine, cards: tuple[int, ...] | None) -> tuple[int, ...]:
    if cards is None:
        return tuple(range(machine.card_count))
    strange = [card for card in cards if not 0 <= card < machine.card_count]
    if strange or len(set(cards)) < len(cards) or not cards:
        raise SpecError(
            f"cards {ranges(cards) or '(none)'} of a machine of {machine.card_count}",
            hint=f"name each card once, from 0 to {machine.card_count - 1}.",
        )
    return cards


def _draft(job: JobSpec, machine: Machine, cards: tuple[int, ...], vocabulary: int, trace: ModelTrace | None) -> Plan:
    """Return the plan without its predictions."""
    layout = resolve_layout(job, len(cards))
    shape = with_vocabulary(job, vocabulary or token_kinds(job))
    if shape is not None and shape.vocabulary < vocabulary:
        raise SpecError(
            f"`model.vocabulary` is {shape.vocabulary}, and the tokenizer has {vocabulary} tokens",
            hint=f"set `model.vocabulary` to {vocabulary} or more, or to 0.",
        )
    sequence = job.data.sequence
    draft = Plan(
        job=job,
        layout=layout,
        machine=machine.name,
        cards=cards[: layout.ranks],
        micro_batch=job.micro_batch_of // layout.data,
        micro_batches=job.gradient_accumulation,
        stages=_placeholders(layout),
        sums=sum_table(layout, machine),
    )
    if shape is None and trace is not None:
        trace = pieces_of(trace, layout)
    if shape is None and trace is not None:
        return replace(
            draft,
            stages=cut_traced(job, layout, trace, machine, micro_batch=draft.micro_batch),
            parameters=trace.parameters,
            flops=trace.flops(draft.micro_batch) * draft.micro_batches * layout.data,
            trace=trace,
        )
    if shape is None:
        return draft
    return replace(
        draft,
        stages=cut_stages(
            [block_forward_flops(shape, sequence)] * shape.layers,
            pipeline=layout.pipeline,
            interleave=layout.interleave,
            head=head_forward_flops(shape),
        ),
        parameters=shape.parameters,
        vocabulary=shape.vocabulary,
        flops=flops_per_step(shape, job.batch * sequence, sequence),
    )


def token_kinds(job: JobSpec) -> int:
    """Return how many tokens the job's tokenizer has."""
    tokenizer = job.data.tokenizer
    return int(tokenizer.removeprefix("bpe:")) if tokenizer.startswith("bpe:") else BYTE_TOKENS


def _placeholders(layout: Layout) -> tuple[Stage, ...]:
    count = layout.pipeline * layout.interleave
    return tuple(
        Stage(index=s, rank=s % layout.pipeline, first=0, last=0, embeds=s == 0, heads=s == count - 1)
        for s in range(count)
    )


def _notes(plan: Plan, machine: Machine, at_hand: tuple[int, ...], memory: MemoryUse | None) -> Iterator[str]:
    idle = len(at_hand) - plan.ranks
    if idle:
        yield f"{idle} of {len(at_hand)} cards stay idle: a micro-batch of {plan.job.micro_batch_of} samples is cut " \
              f"{plan.layout.data} ways on cards that come in groups of {plan.ranks // plan.layout.data}."  # fmt: skip
    if plan.trace is not None:
        yield "your own module was traced: parameters, arithmetic, bytes and activations are counted operation by " \
              f"operation at {plan.micro_batch} samples a micro-batch; no published run backs its time."  # fmt: skip
        yield from plan.trace.notes
        yield from _open(plan)
    said = plan.job.communication
    if said.compress != "none" and plan.layout.copies > 1:
        more = "; what it leaves out is kept, 4 bytes more for each number that a card holds, and not counted here"
        yield f"`communication.compress` is {said.compress}, and sums are predicted as if whole gradients travelled" \
              f"{more * (said.where == 'all')}."  # fmt: skip
    if memory is None:
        yield "the model is your own: its stages are cut, and its memory and time known, once it is built."
        return
    precision = product_precision(plan.job)
    if precision not in machine.card.flops:
        yield f"nothing is known of {machine.card.name} in {precision}; its slowest precision is taken."
    yield from doubts(plan, machine)
    if memory.total > USABLE * machine.card.memory:  # on cores alone; see `wall`
        yield f"the fullest rank needs about {show_bytes(memory.total)}, and a core's share of memory is " \
              f"{show_bytes(machine.card.memory)}."  # fmt: skip


def _open(plan: Plan) -> Iterator[str]:
    """Say what of a traced module's plan its graph alone tells, which is made when it is built."""
    tensor = plan.layout.tensor
    if tensor > 1:
        yield "what the tensor axis splits of your module, its graph tells when a run begins (`supernode status` has " \
              f"it); here each card has 1/{tensor} of all parameters and products, activations " \
              "are whole, and sums over the axis take no time."  # fmt: skip
    if plan.layout.recompute == "full":
        yield "what `parallelism.recompute` leaves is told by the classes of your module's parts: what is computed " \
              "again keeps what it is given, taken to be as much as the part before it hands on."  # fmt: skip
    if plan.trace is not None and plan.trace.is_cut_anywhere:
        yield "stages are cut in the graph of your module when a run begins; here it is cut between modules, in the " \
              "order in which they are met."  # fmt: skip


def _remedy(job: JobSpec, machine: Machine, cards: tuple[int, ...], vocabulary: int, trace: ModelTrace | None) -> str:
    """Return the first change of one key, cheapest in speed first, with which the job fits."""
    for words, changes in _changes(job):
        try:
            draft = _draft(replace(job, **changes), machine, cards, vocabulary, trace)
            memory = memory_use(draft) or traced_memory(draft)
        except SpecError:
            continue
        if memory is not None and memory.total <= wall(machine):
            return f"set {words}; the fullest card then holds {show_bytes(memory.total)}."
    return "set `precision` to bfloat16 and `parallelism.sharding` to fsdp, take more cards, or a smaller model."


def _changes(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    want = job.parallelism
    steps = [n for n in (job.gradient_accumulation * 2**n for n in range(1, 16)) if n <= job.batch]
    for n in steps:
        yield f"`gradient_accumulation` to {n}", {"gradient_accumulation": n}
    said = job.communication
    if want.sharding == "replicas" and said.compress == "none" and said.algorithm == "auto":
        fsdp = {"parallelism": replace(want, sharding="fsdp")}
        yield "`parallelism.sharding` to fsdp", fsdp
        for n in steps:
            words = f"`parallelism.sharding` to fsdp and `gradient_accumulation` to {n}"
            yield words, {**fsdp, "gradient_accumulation": n}
    for n in (2, 4, 8, 16, 32, 64):
        for key, cut in (
            ("tensor", replace(want, data=0, tensor=n)),
            ("pipeline", replace(want, data=0, pipeline=n)),
            ("context", replace(want, data=0, context=n)),
        ):
            if n > getattr(want, key):
                yield f"`parallelism.{key}` to {n} and `parallelism.data` to 0", {"parallelism": cut}


def _memory_parts(memory: MemoryUse) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "workspace")
    return ", ".join(f"{name} {show_bytes(getattr(memory, name))}" for name in names if getattr(memory, name))


def _stages(stages: tuple[Stage, ...]) -> str:
    """Return the cut in a line, such as `embedding + layers 0–3 | layers 4–6 + head`."""
    cut = []
    for stage in stages:
        last = stage.last - 1
        blocks = f"layers {stage.first}–{last}" if last > stage.first else f"layer {stage.first}"
        cut.append("embedding + " * stage.embeds + blocks + " + head" * stage.heads)
    return " | ".join(cut)


def ranges(cards: tuple[int, ...]) -> str:
    """Return card numbers in a line, runs drawn together: `0–3, 6`."""
    runs: list[list[int]] = []
    for card in cards:
        if runs and card == runs[-1][1] + 1:
            runs[-1][1] = card
        else:
            runs.append([card, card])
    return ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in runs)
