"""How fast does a project go, were nothing ever to fail? With the best plan found, or with the job's own degrees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from supernode.advice.question import Question, search
from supernode.forecast.trust import plan_strays
from supernode.hardware.machine import Machine
from supernode.planning.planner import make_plan
from supernode.schema.spread import Parallelism
from supernode.search.best import Plans, bill_of, words
from supernode.search.search import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a project goes, were nothing ever to fail.

    Attributes:
        words: the layout.
        cards: that it takes.
        seconds: of a step.
        energy: joules of a step.
        memory: bytes of the fullest card.
        is_sharded: weights are cut over the data axis.
        is_found: a search found it; else the job's own degrees say so.
        is_ours: the times are those of our own trainer, and not of what current programs do.
        is_outside: it lies outside of what the card's numbers were fitted on.
        notes: what the reader should know of it, as sentences.
    """

    words: str
    cards: int
    seconds: float
    energy: float
    memory: float
    is_sharded: bool = False
    is_found: bool
    is_ours: bool = False
    is_outside: bool = False
    notes: tuple[str, ...] = ()


def pace_of(question: Question, machine: Machine, *, runnable: bool = False, objective: str = "time") -> Pace:
    """Return how fast a question goes: with its job's own degrees, or with the best plan where it has none."""
    job = question.job
    # On this computer, a job without degrees runs as the planner fills them in.
    is_open = job is not None and job.parallelism == Parallelism() and machine.card.kind != "cpu"
    if job is None or is_open or runnable:
        return pace_of_best(search(question, machine, top=1, runnable=runnable, objective=objective))
    plan, bill = make_plan(job, machine), bill_of(machine)
    assert plan.step is not None  # questions are about models of known shape
    assert plan.memory is not None
    working = plan.step.compute + plan.step.optimizer
    return Pace(
        words=str(plan.layout), cards=plan.ranks, seconds=plan.step.total, is_found=False, is_ours=True,
        energy=float(bill.energy(plan.ranks, seconds=plan.step.total, working=working)), memory=plan.memory.total,
        is_sharded=plan.layout.sharding == "fsdp", is_outside=bool(plan_strays(plan, machine)), notes=plan.notes,
    )  # fmt: skip


def pace_of_best(plans: Plans) -> Pace:
    """Return how fast the best plan of a search goes, with all that the search has to say of it."""
    return replace(
        pace_from(plans.best), is_ours=plans.is_ours, is_outside=bool(plans.outside), notes=plans.notes
    )  # fmt: skip


def pace_from(choice: Choice) -> Pace:
    """Return how fast a strategy goes."""
    return Pace(
        words=words(choice), cards=int(choice.axes["cards"]), seconds=choice.time, energy=choice.energy,
        memory=choice.memory, is_sharded=choice.axes["sharding"] == 3, is_found=True,
    )  # fmt: skip
