"""How are a comparison and a project told? As rows and columns for people, and as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from supernode.advice.answer import point, utilisation
from supernode.advice.compare import Comparison, Entry, headroom, verdict
from supernode.advice.project import Project, Spread
from supernode.units import count_of, show, show_bytes, show_energy, show_number, show_seconds

DAY = 86_400.0
CAUSES = 5
Show = Callable[[float], str]


def project_rows(project: Project) -> list[tuple[str, str]]:
    """Return a project's forecast as rows: in the middle, and from one case of ten below to one of ten above."""
    pace, question = project.pace, project.question
    times = project.seconds
    rows = [
        ("asked", f"{question.name}: {show(project.tokens, 'tokens')} in {project.steps:,} steps of "
                  f"{question.batch:,} × {question.sequence:,}, {question.precision}"),
        ("machine", f"{count_of(pace.cards, 'card')} of {project.machine.name}"),
        ("plan", pace.words + ("" if pace.is_found else " (the job's own)")),
        ("step", f"{show_seconds(pace.seconds)} ± {project.band:.0%}, {show_bytes(pace.memory)} a card"),
        ("time", _told(times, days)),
        ("its best steps alone", days(project.ideal)),
        ("goodput", _told(project.goodput, lambda part: f"{part:.1%}")),
        ("restarts", _restarts(project)),
        ("checkpoints", f"every {show_seconds(project.interval)}, {show_seconds(project.save)} each"),
        ("failures twice as often", days(project.twice_the_failures)
                                    if math.isfinite(project.twice_the_failures) else "it would never be done"),
        ("card-hours", _told(project.card_hours, show_number)),
        ("energy", f"{_told(project.energy, show_energy)}; PUE {project.pue:.2f}"),
        ("cost", _told(project.cost, money) if project.cost else "the hardware has no price; `--price` gives one"),
        ("carbon", _told(project.carbon, mass)),
    ]  # fmt: skip
    return rows + [("assumed", said) for said in project.assumptions]


def _restarts(project: Project) -> str:
    told = _told(project.restarts, lambda count: f"{count:,.0f}")
    if not project.by_cause or project.restarts.high < 1:
        return f"{told}; a failure every {show_seconds(project.mtbf)}"
    most = sorted(project.by_cause.items(), key=lambda item: -item[1])[:CAUSES]
    said = ", ".join(f"{cause} {count:,.1f}" for cause, count in most)
    rest = sum(project.by_cause.values()) - sum(count for _, count in most)
    return f"{told}; a failure every {show_seconds(project.mtbf)}: {said}, others {rest:,.1f}"


def days(seconds: float) -> str:
    """Return a duration in days, or shorter units below one."""
    return f"{show_number(seconds / DAY)} days" if seconds >= DAY else show_seconds(seconds)


def money(usd: float) -> str:
    """Return an amount of money, in millions where it is much."""
    return f"{show_number(usd / 1e6)} million USD" if usd >= 1e6 else f"{show_number(usd)} USD"


def mass(kg: float) -> str:
    """Return a mass of carbon dioxide, in tonnes where it is much."""
    return f"{show_number(kg / 1000)} t CO2" if kg >= 1000 else f"{show_number(kg)} kg CO2"


def _told(spread: Spread, shown: Show) -> str:
    return f"{shown(spread.middle)} ({shown(spread.low)} to {shown(spread.high)})"


def project_plain(project: Project) -> dict[str, Any]:
    """Return a project as JSON has it; SI units, infinities as null."""
    pace = project.pace
    return {
        "name": project.question.name, "machine": project.machine.name, "cards": pace.cards, "plan": pace.words,
        "plan_found": pace.is_found, "steps": project.steps, "tokens": project.tokens, "step_seconds": pace.seconds,
        "bytes_a_card": pace.memory, "seconds": _plain(project.seconds), "best_steps_seconds": project.ideal,
        "overhead": project.overhead,
        "goodput": _plain(project.goodput), "restarts": _plain(project.restarts), "by_cause": dict(project.by_cause),
        "interval_seconds": _finite(project.interval), "save_seconds": project.save,
        "restart_seconds": project.restart, "mtbf_seconds": _finite(project.mtbf), "joules": _plain(project.energy),
        "pue": project.pue, "usd": _plain(project.cost) if project.cost else None, "kg_co2": _plain(project.carbon),
        "card_hours": _plain(project.card_hours), "band": project.band,
        "seconds_with_twice_the_failures": _finite(project.twice_the_failures),
        "assumptions": list(project.assumptions),
    }  # fmt: skip


def _plain(spread: Spread) -> dict[str, float]:
    return {"p10": spread.low, "p50": spread.middle, "p90": spread.high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def comparison_table(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a comparison as column names (one a machine) and rows."""
    entries = comparison.entries
    columns = ("", *(entry.machine.name for entry in entries))
    rows = [(name, *(_cell(entry, shown) for entry in entries)) for name, shown in _figures(comparison).items()]
    troubles = [entry.trouble or "–" for entry in entries]
    if any(entry.trouble for entry in entries):
        rows.append(("trouble", *troubles))
    if any(entry.notes for entry in entries):
        rows.append(("notes", *("\n".join(entry.notes) or "–" for entry in entries)))
    return columns, [("place", *_places(comparison)), *rows]


def _places(comparison: Comparison) -> list[str]:
    place = {index: rank for rank, index in enumerate(comparison.ranking, start=1)}
    return [str(place.get(index, "–")) for index in range(len(comparison.entries))]


def _cell(entry: Entry, shown: Callable[[Entry, Project], str]) -> str:
    return shown(entry, entry.project) if entry.project is not None else "–"


def _rate(comparison: Comparison, entry: Entry) -> float:
    return comparison.question.tokens / entry.pace.seconds


def _used(comparison: Comparison, entry: Entry) -> float:
    assert entry.plans is not None
    return utilisation(comparison.question, entry.plans, entry.plans.best)


def _figures(comparison: Comparison) -> dict[str, Callable[[Entry, Project], str]]:
    def within(spread: Spread | None, shown: Show) -> str:
        return _told(spread, shown) if spread is not None else "no price"

    return {
        "cards": lambda entry, _: f"{entry.pace.cards:,} × {entry.machine.card.name}",
        "best plan": lambda entry, _: entry.pace.words,
        "step": lambda entry, project: f"{show_seconds(entry.pace.seconds)} ± {project.band:.0%}",
        "speed": lambda entry, _: show(_rate(comparison, entry), "token/s"),
        "speed of a card": lambda entry, _: show(_rate(comparison, entry) / entry.pace.cards, "token/s"),
        "of peak FLOP/s": lambda entry, _: f"{_used(comparison, entry):.1%}",
        "time": lambda _, project: _told(project.seconds, days),
        "goodput": lambda _, project: f"{project.goodput.middle:.1%}",
        "energy": lambda _, project: within(project.energy, show_energy),
        "cost": lambda _, project: within(project.cost, money),
        "carbon": lambda _, project: within(project.carbon, mass),
        "memory of a card": lambda entry, _: f"{show_bytes(entry.pace.memory)}, {headroom(entry):.0%} free",
        "binds": lambda entry, _: entry.plans.reasons[0].binds if entry.plans else "–",
    }


def comparison_plain(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON has it."""
    machines = []
    for place, entry in zip(_places(comparison), comparison.entries, strict=True):
        said: dict[str, Any] = {"machine": entry.machine.name, "trouble": entry.trouble, "hint": entry.hint,
                                "notes": list(entry.notes)}  # fmt: skip
        if entry.plans is not None and entry.project is not None:
            said |= {
                "place": int(place), "best": point(entry.plans.best), "project": project_plain(entry.project),
                "tokens_per_second": _rate(comparison, entry), "mfu": _used(comparison, entry),
                "headroom": headroom(entry), "binds": entry.plans.reasons[0].binds,
            }  # fmt: skip
        machines.append(said)
    winner = comparison.winner
    return {
        "name": comparison.question.name, "objective": comparison.objective, "machines": machines,
        "winner": winner.machine.name if winner else None, "why": verdict(comparison),
        "notes": list(comparison.question.notes),
    }  # fmt: skip
