"""What is asked? A model, how much of it makes a step, and whether our own trainer could run it."""

from __future__ import annotations

from dataclasses import dataclass

from supernode.errors import SpecError
from supernode.forecast.efficiency import precision_index
from supernode.hardware.machine import Machine
from supernode.planning.planner import token_kinds
from supernode.planning.work import with_vocabulary
from supernode.registry import did_you_mean
from supernode.schema.job import JobSpec
from supernode.schema.model import PRESETS
from supernode.search.best import Plans, best_plans
from supernode.workload.flops import token_flops
from supernode.workload.presets import provenance, public_model, public_models
from supernode.workload.shape import ModelShape, decoder_shape
from supernode.workload.strategy import PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One step of a model.

    Attributes:
        name: of the job, or of the public model.
        batch: samples of one step.
        sequence: tokens of a sample.
        precision: a name in `PRECISIONS`.
        job: what our trainer would run; None for models that it cannot build.
        notes: what the reader should know of the model's shape.
    """

    name: str
    model: ModelShape
    batch: int
    sequence: int
    precision: str
    job: JobSpec | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1 or self.sequence < 2:
            raise SpecError(
                f"a batch of {self.batch} samples of {self.sequence} tokens",
                hint="give `--batch` 1 or more, and `--sequence` 2 or more.",
            )
        if self.precision not in PRECISIONS:
            raise SpecError(f"unknown precision `{self.precision}`", hint=did_you_mean(self.precision, PRECISIONS))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Floating-point operations of one step over all cards, nothing computed again."""
        return self.tokens * token_flops(self.model, self.sequence)


def question_of(job: JobSpec) -> Question:
    """Return what a job asks.

    Raises:
        SpecError: its model is the user's own.
    """
    shape = with_vocabulary(job, token_kinds(job))
    if shape is None:
        raise SpecError(
            f"the model of {job.name} is your own, and its layers are unknown",
            hint="give a shape or a name under `model:`.",
        )
    return Question(
        name=job.name, model=decoder_shape(shape), batch=job.batch, sequence=job.data.sequence,
        precision=job.precision, job=job,
    )  # fmt: skip


def question_about(name: str, *, batch: int, sequence: int, precision: str = "bfloat16") -> Question:
    """Return a question about a model by its name: one that we train, or a public one.

    Raises:
        SpecError: nobody knows the name, or a number is out of range.
    """
    notes: tuple[str, ...] = ()
    if name in public_models():
        model, stated = public_model(name), provenance(name)
        if stated.assumed:
            notes = (f"the shape of {name} is partly assumed: {stated.assumed} (source: {stated.source}).",)
    elif name in PRESETS and PRESETS[name].vocabulary:
        model = decoder_shape(PRESETS[name])
    else:
        raise SpecError(f"unknown model `{name}`", hint=did_you_mean(name, known_models()))
    return Question(name=name, model=model, batch=batch, sequence=sequence, precision=precision, notes=notes)


def known_models() -> set[str]:
    """Return the names of models that say all of their shape: public ones, and presets that have a vocabulary."""
    return {*public_models(), *(preset for preset, shape in PRESETS.items() if shape.vocabulary)}


def refuse_model_name(name: str) -> None:
    """Raise a SpecError where a model's name stands for a job, which says how much of it makes a step, too."""
    if name in PRESETS or name in public_models():
        raise SpecError(
            f"`{name}` is a model, and how much of it makes a step is open",
            hint=f'ask `advice.question.question_about("{name}", batch=…, sequence=…)`, or give a job.',
        )


def search(
    question: Question, machine: Machine, *, objective: str = "time", top: int = 5, runnable: bool = False,
    cards: int | None = None, price: float | None = None,
) -> Plans:  # fmt: skip
    """Return the best few plans; the arguments are those of `best_plans`."""
    return best_plans(
        question.job or question.model, machine, question.batch, sequence=question.sequence, objective=objective,
        top=top, cards=cards, precision=precision_index(question.precision), runnable=runnable, price=price,
    )  # fmt: skip
