"""Which machine is best for a job? Each with its best plan and what the whole project takes there, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supernode.advice.answer import utilisation
from supernode.advice.local import LOCAL, this_computer
from supernode.advice.pace import Pace, pace_of_best
from supernode.advice.project import Project, forecast
from supernode.advice.question import Question, search
from supernode.advice.terms import Terms
from supernode.errors import CapacityError, SpecError
from supernode.hardware.assemble import predefined
from supernode.hardware.machine import Machine
from supernode.registry import lookup
from supernode.schema.job import JobSpec
from supernode.search.best import Plans
from supernode.units import count_of, show_seconds
from supernode.workload.strategy import PRECISIONS

OBJECTIVES = {"time": "days", "energy": "energy", "cost": "cost", "memory": "memory of a card"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One machine with its answer; without one, why.

    Attributes:
        trouble: why nothing fits; empty otherwise.
        hint: what to do about it.
    """

    machine: Machine
    plans: Plans | None = None
    project: Project | None = None
    trouble: str = ""
    hint: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know of the machine and its plan."""
        return self.project.pace.notes if self.project is not None else ()

    @property
    def pace(self) -> Pace:
        """How fast it goes."""
        assert self.project is not None
        return self.project.pace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Machines side by side.

    Attributes:
        entries: in the order in which they were named.
        ranking: places of those that can do it, best first.
    """

    question: Question
    objective: str
    entries: tuple[Entry, ...]
    ranking: tuple[int, ...]

    @property
    def winner(self) -> Entry | None:
        """The best machine, if any can do it."""
        return self.entries[self.ranking[0]] if self.ranking else None

    def refusal(self) -> CapacityError:
        """Return why no machine can do it, and what to do about it."""
        said = "; ".join(f"{entry.machine.name}: {entry.trouble}" for entry in self.entries)
        hints = dict.fromkeys(entry.hint.rstrip(".") for entry in self.entries if entry.hint)
        return CapacityError(f"no machine can do it: {said}", hint=f"{'; or '.join(hints)}.")


def compare(
    question: Question, machines: Sequence[Machine], terms: Terms, *, objective: str = "time", runnable: bool = False
) -> Comparison:
    """Return what a job takes on each machine, with the plan that is best there.

    A machine on which nothing fits says why and leaves the others alone.

    Raises:
        SpecError: no machines, an unknown objective, a question that no machine can answer, or cost is compared and a
            machine has no price.
    """
    if not machines:
        raise SpecError("no machines to compare", hint="name some: `--machines 512xH100,supernode-512`.")
    lookup(objective, OBJECTIVES, kind="objective")
    entries = tuple(_entry(question, machine, terms, objective, runnable) for machine in machines)
    able = [place for place, entry in enumerate(entries) if entry.project is not None]
    ranking = sorted(able, key=lambda place: score(entries[place], objective))
    return Comparison(question=question, objective=objective, entries=entries, ranking=tuple(ranking))


def _entry(question: Question, machine: Machine, terms: Terms, objective: str, runnable: bool) -> Entry:
    try:
        plans = search(question, machine, top=1, objective=objective, runnable=runnable, price=terms.price)
        project = forecast(question, machine, terms, pace=pace_of_best(plans))
    except CapacityError as error:
        return Entry(machine=machine, trouble=error.message, hint=error.hint)
    return Entry(machine=machine, plans=plans, project=project)


def score(entry: Entry, objective: str) -> float:
    """Return what an entry is ranked by: the project's middle figure, or the fullest card's bytes."""
    project = entry.project
    assert project is not None
    if objective == "cost":
        assert project.cost is not None  # else the search would have refused
        return project.cost.middle
    by_name = {"time": project.seconds.middle, "energy": project.energy.middle, "memory": project.pace.memory}
    return by_name[objective]


def headroom(entry: Entry) -> float:
    """Return the part of a card's usable memory that stays free."""
    assert entry.plans is not None
    return 1 - entry.pace.memory / entry.plans.room.memory


def verdict(comparison: Comparison) -> str:
    """Return in words which machine wins, and why the next one does not."""
    winner = comparison.winner
    if winner is None:
        return "no machine can do it"
    name = winner.machine.name
    if len(comparison.ranking) == 1:
        others = " (of those that were named)" if len(comparison.entries) == 1 else ", the only one on which it fits"
        return f"{name}{others}"
    second = comparison.entries[comparison.ranking[1]]
    objective = comparison.objective
    times = score(second, objective) / score(winner, objective)
    said = f"{name}: {second.machine.name} takes {times:.2f} times the {OBJECTIVES[objective]}"
    return f"{said}; {'; '.join(_differences(comparison.question, winner, second))}"


def _differences(question: Question, winner: Entry, second: Entry) -> list[str]:
    """Return what tells two machines apart: how many cards, how fast, how well used, what they wait for."""
    assert winner.plans is not None
    assert second.plans is not None
    ours, theirs = winner.pace, second.pace
    said = []
    if ours.cards != theirs.cards:
        said.append(f"{count_of(ours.cards, 'card')} against {theirs.cards:,}")
    place = PRECISIONS.index(question.precision)
    peaks = [entry.plans.card.peaks[place] for entry in (winner, second) if entry.plans]
    if peaks[0] != peaks[1]:
        said.append(f"each with {peaks[0] / peaks[1]:.2f} times the peak FLOP/s")
    used = [utilisation(question, entry.plans, entry.plans.best) for entry in (winner, second) if entry.plans]
    said.append(f"{used[0]:.0%} of the peak used against {used[1]:.0%}")
    waits = [_waits(entry.plans) for entry in (winner, second) if entry.plans]
    said.append(f"a step of {show_seconds(ours.seconds)} against {show_seconds(theirs.seconds)}, of which waiting "
                f"{waits[0]} against {waits[1]}")  # fmt: skip
    binds = [entry.plans.reasons[0].binds for entry in (winner, second) if entry.plans]
    said.append(f"what binds is {binds[0]}" + (f" against {binds[1]}" if binds[0] != binds[1] else " on both"))
    overlap = _overlap(winner, second)
    return said + ([overlap] if overlap else [])


def _waits(plans: Plans) -> str:
    parts = plans.reasons[0].parts
    return f"{1 - parts['compute'] / sum(parts.values()):.0%}"


def _overlap(winner: Entry, second: Entry) -> str:
    assert winner.project is not None
    assert second.project is not None
    if winner.project.seconds.high > second.project.seconds.low:
        return "their bands overlap, so that the order of days is not certain"
    return ""


def named(text: str, job: JobSpec | None = None) -> tuple[Machine, ...]:
    """Return machines from their names, with commas between; `local` is this computer, for the job.

    Raises:
        SpecError: no name, one twice (whatever its case), or an unknown one.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    alike = [name.lower().replace("×", "x") for name in names]
    if twice := next((name for name, same in zip(names, alike, strict=True) if alike.count(same) > 1), ""):
        raise SpecError(f"`{twice}` is named twice", hint="name each machine once.")
    return tuple(this_computer(job) if name.lower() == LOCAL else predefined(name) for name in names)
