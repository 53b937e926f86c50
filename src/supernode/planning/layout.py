"""How many cards does each axis get? Checks the degrees that a job asks for and fills in what it leaves open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from supernode.errors import SpecError
from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout


def resolve_layout(job: JobSpec, cards: int) -> Layout:
    """Return the layout that `job` has on `cards` cards.

    With `parallelism.data` 0, the data axis takes as many of the cards that are left over as the batch divides by;
    after a failure the same job then goes on with fewer.

    Raises:
        SpecError: the layout needs more cards than there are, or the model or the batch cannot be cut so.
    """
    want = job.parallelism
    one_copy = want.one_copy
    _check_cards(job, one_copy=one_copy, cards=cards)
    _check_model(job)
    _check_accumulation(job)
    _check_recompute(job)
    return Layout(
        tensor=want.tensor,
        pipeline=want.pipeline,
        data=want.data or _largest_data(job, cards // one_copy),
        context=want.context,
        expert=want.expert,
        sequence=want.sequence,
        sharding=want.sharding,
        schedule=want.schedule,
        interleave=want.interleave,
        recompute=want.recompute,
    )


def _check_cards(job: JobSpec, *, one_copy: int, cards: int) -> None:
    want = job.parallelism
    needed = one_copy * max(want.data, 1)
    if needed <= cards:
        return
    degrees = f"tensor {want.tensor} × pipeline {want.pipeline} × data {want.data or '1 or more'}"
    degrees += f" × context {want.context}" * (want.context > 1)
    if one_copy <= cards:
        hint = f"set `parallelism.data` to {cards // one_copy}, or to 0 for what is left over."
    elif want.context > 1 and (model_alone := want.tensor * want.pipeline) <= cards:
        parts = (n for n in range(1, cards // model_alone + 1) if job.data.sequence % (2 * n) == 0)
        hint = f"set `parallelism.context` to {max(parts, default=1)}."
    else:
        tensor = _nearest(want.tensor, (n for n in range(1, cards + 1) if _tensor_fits(job.shape, n)))
        hint = f"set `parallelism.tensor` to {tensor} and `parallelism.pipeline` to at most {cards // tensor}"
        hint += ", and `parallelism.context` to 1." if want.context > 1 else "."
    raise SpecError(f"{job.name} wants {needed} cards ({degrees}), and {cards} are up", hint=hint)


def _check_model(job: JobSpec) -> None:
    want, shape = job.parallelism, job.shape
    if shape is None:
        # What the tensor axis can split of it, its graph tells once it is built.
        if want.context > 1:
            raise SpecError(
                f"`parallelism.context` is {want.context}, and {job.model} is your own module, whose attention and "
                "positions are not known",
                hint="set `parallelism.context` to 1, or `model` to a preset or a shape; "
                "`parallelism.recompute: full` makes longer sequences fit, too.",
            )
        if want.expert > 1:
            raise SpecError(
                f"`parallelism.expert` is {want.expert}, and {job.model} is your own module, whose experts "
                "are not known",
                hint="set `parallelism.expert` to 1, or `model` to a shape with `experts`.",
            )
        if want.recompute == "selective":
            raise SpecError(
                f"`parallelism.recompute` is selective, and {job.model} is your own module, whose attention is not "
                "known",
                hint="set `parallelism.recompute` to full, which takes repeated layers of any module, or to none.",
            )
        if want.sequence:
            raise SpecError(
                f"`parallelism.sequence` is on, and {job.model} is your own module, of which it is not known what lies "
                "between its split matrices",
                hint="leave out `parallelism.sequence`, or set `model` to a preset or a shape.",
            )
        _check_arithmetic(job)
        return
    _check_tokens(job)
    _check_experts(job, shape)
    if not _tensor_fits(shape, want.tensor):
        fits = _nearest(want.tensor, (n for n in range(1, want.tensor + shape.heads) if _tensor_fits(shape, n)))
        raise SpecError(
            f"`parallelism.tensor` is {want.tensor}, and the model has {shape.heads} heads, {shape.key_heads} key "
            f"heads and an inner size of {shape.inner}",
            hint=f"set `parallelism.tensor` to {fits}, a divisor of both numbers of heads.",
        )
    stages = want.pipeline * want.interleave
    if shape.layers < stages:
        raise SpecError(
            f"the model has {shape.layers} layers for {stages} stages "
            f"(pipeline {want.pipeline} × interleave {want.interleave})",
            hint=f"set `parallelism.pipeline` to {max(1, shape.layers // want.interleave)} or fewer; "
            "every stage keeps a layer or more.",
        )


def _check_arithmetic(job: JobSpec) -> None:
    """Check that nothing is asked of the layers of a module that becomes a graph, which has none."""
    if job.arithmetic != "same" and job.parallelism.tensor > 1:
        raise SpecError(
            f"`arithmetic` is {job.arithmetic}, and {job.model} is your own module, which a tensor axis makes a graph, "
            "without layers",
            hint="set `arithmetic` to same, or `parallelism.tensor` to 1.",
        )


def _check_experts(job: JobSpec, shape: DecoderShape) -> None:
    expert = job.parallelism.expert
    if expert == 1:
        return
    if not shape.experts:
        raise SpecError(
            f"`parallelism.expert` is {expert}, and the model has no experts",
            hint=f"set `parallelism.expert` to 1, or `model.experts` to a multiple of {expert}.",
        )
    if shape.experts % expert:
        fits = _nearest(expert, (n for n in _divisors(shape.experts)))
        raise SpecError(
            f"`parallelism.expert` is {expert}, and the model has {shape.experts} experts",
            hint=f"set `parallelism.expert` to {fits}, a divisor of `model.experts`.",
        )


def _check_tokens(job: JobSpec) -> None:
    """Check that the ranks that share a sequence get as many tokens each."""
    want, sequence = job.parallelism, job.data.sequence
    # Each context rank holds two chunks of the sequence, and its tensor ranks share both.
    parts = (2 * want.context if want.context > 1 else 1) * (want.tensor if want.sequence else 1)
    if sequence % parts == 0:
        return
    shares = [f"2 × context {want.context}"] * (want.context > 1) + [f"tensor {want.tensor}"] * want.sequence
    raise SpecError(
        f"`data.sequence` is {sequence}, and its tokens are shared by {' × '.join(shares)} = {parts} parts, "
        "which does not divide it",
        hint=f"set `data.sequence` to {max(1, round(sequence / parts)) * parts}.",
    )


def _tensor_fits(shape: DecoderShape | None, tensor: int) -> bool:
    if shape is None:
        return True
    return shape.heads % tensor == 0 and shape.key_heads % tensor == 0 and shape.inner >= tensor


def _check_accumulation(job: JobSpec) -> None:
    want, micro_batches = job.parallelism, job.gradient_accumulation
    data = max(want.data, 1)
    if job.batch % (micro_batches * data):
        fits = _nearest(micro_batches, (n for n in _divisors(job.batch) if job.batch % (n * data) == 0))
        other = f"`gradient_accumulation` to {fits}, or " if fits else ""
        unit = micro_batches * data
        raise SpecError(
            f"`batch` {job.batch} does not divide by gradient_accumulation {micro_batches} × data {data} = {unit}",
            hint=f"set {other}`batch` to {max(1, round(job.batch / unit)) * unit}.",
        )
    # torch.distributed.pipelining.ScheduleInterleaved1F1B deals micro-batches out in rounds of one per rank.
    if want.schedule == "interleaved" and micro_batches % want.pipeline:
        rounds = max(1, round(micro_batches / want.pipeline))
        raise SpecError(
            f"`gradient_accumulation` is {micro_batches}, no multiple of `parallelism.pipeline` {want.pipeline}, "
            "as the interleaved schedule needs",
            hint=f"set `gradient_accumulation` to {rounds * want.pipeline}.",
        )
    # torch.distributed.pipelining.Schedule1F1B refuses fewer; under gpipe most of the pipeline would stand idle.
    if micro_batches < want.pipeline:
        fits = next((n for n in _divisors(job.batch) if n >= want.pipeline and job.batch % (n * data) == 0), 0)
        choice = f"`gradient_accumulation` to {fits}" if fits else f"`batch` to {want.pipeline * data} or a multiple"
        raise SpecError(
            f"`gradient_accumulation` is {micro_batches}, fewer than the {want.pipeline} pipeline stages that it fills",
            hint=f"set {choice}, or `parallelism.pipeline` to {micro_batches} or fewer.",
        )


def _check_recompute(job: JobSpec) -> None:
    want = job.parallelism
    # Each weights' gradient that is put off would compute its whole layer once more.
    if want.recompute == "full" and want.schedule == "zero_bubble" and want.pipeline > 1:
        raise SpecError(
            "`parallelism.recompute` is full and `parallelism.schedule` zero_bubble, which would compute every layer "
            "again for each of its matrices",
            hint="set `parallelism.recompute` to selective or none, or `parallelism.schedule` to 1f1b.",
        )


def _largest_data(job: JobSpec, most: int) -> int:
    """Return the largest number of copies, up to `most`, among which a micro-batch divides."""
    want = job.parallelism
    fits = [n for n in _divisors(job.micro_batch_of) if n <= most and n % want.expert == 0]
    if not fits:
        raise SpecError(
            f"`parallelism.expert` is {want.expert}, and the data axis has at most {most} cards for micro-batches of "
            f"{job.micro_batch_of} samples",
            hint=f"set `parallelism.expert` to a divisor of {job.micro_batch_of} of at most {most}.",
        )
    return max(fits)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _nearest(wanted: int, candidates: Iterable[int]) -> int:
    """Return the candidate closest to `wanted`, the smaller of two; 0 if there is none."""
    return min(candidates, key=lambda n: (abs(n - wanted), n), default=0)


def fit_layout(job: JobSpec, cards: int) -> JobSpec:
    """Return the job with degrees that `cards` cards can hold, as near to its own as can be.

    The data axis shrinks first, then the pipeline, then context and tensor; the batch stays, so the curve goes on.

    Raises:
        SpecError: no degrees fit, or `cards` is not positive.
    """
    if cards < 1:
        raise SpecError(f"`cards` is {cards}", hint="choose 1 or more.")
    want = job.parallelism
    tensors = [n for n in range(want.tensor, 0, -1) if want.tensor % n == 0 and n <= cards]
    contexts, experts = ([n for n in range(most, 0, -1) if most % n == 0] for most in (want.context, want.expert))
    choices = [
        (t, p, c, e)
        for t in tensors
        for c in contexts
        for p in range(min(want.pipeline, cards // (t * c)), 0, -1)
        for e in experts
    ]
    choices.sort(key=lambda ways: (ways[0] * ways[1] * ways[2], ways[0], ways[2], ways[3]), reverse=True)
    for tensor, pipeline, context, expert in choices:
        interleaves = pipeline > 1 and want.schedule == "interleaved"
        needs_stages = want.schedule in ("interleaved", "zero_bubble")
        degrees = replace(
            want, tensor=tensor, pipeline=pipeline, context=context, expert=expert, data=0,
            sequence=want.sequence and tensor > 1, interleave=want.interleave if interleaves else 1,
            schedule="1f1b" if needs_stages and pipeline == 1 else want.schedule,
        )  # fmt: skip
        candidate = replace(job, parallelism=degrees)
        try:
            resolve_layout(candidate, cards)
        except SpecError:
            continue
        return candidate
    raise SpecError(f"{job.name} cannot be laid out on {cards} cards", hint="try another number of cards.")
