"""The terminal's advice: plan or search a job, compare machines for it, forecast a whole project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from supernode.cli.flags import Card, Cards, Cooling, Interconnect, Json, Named, Set, node, overrides_of
from supernode.errors import SpecError

Asked = Annotated[Optional[Path], typer.Argument(metavar="FILE", help="Job file (YAML).", show_default=False)]  # noqa: UP045
Model = Annotated[
    str,
    typer.Option(
        "--model", help="A model by name, such as llama3-70b; without FILE, --batch and --sequence go with it."
    ),
]
Batch = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--batch", help="Samples of a step; by default the job's.", show_default=False),
]
Sequence = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--sequence", help="Tokens of a sample; by default the job's.", show_default=False),
]
Precision = Annotated[str, typer.Option("--precision", help="bfloat16, float8, …; by default the job's, or bfloat16.")]
Objective = Annotated[str, typer.Option("--objective", help="What is to be least: time, memory, energy or cost.")]
Top = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--top", help="How many plans a search shows; by default 5.", show_default=False),
]
Runnable = Annotated[
    bool, typer.Option("--runnable", help="Search only what our own trainer can run; on CPU cores it does so anyway.")
]
Tokens = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--tokens", help="Tokens to train on, such as 1.4T or 300B.", show_default=False),
]
Steps = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--steps", help="Steps to train instead; by default those of FILE.", show_default=False),
]
Mtbf = Annotated[
    str,
    typer.Option("--mtbf", help="Mean time between failures of one card, such as 5000h; by default as Llama 3 met."),
]
Save = Annotated[
    str,
    typer.Option(
        "--save", help="Time that a checkpoint stops training, such as 30s; by default as long as writing takes."
    ),
]
Restart = Annotated[str, typer.Option("--restart", help="Time from a failure until work goes on, such as 10min.")]
Price = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--price", help="USD for a card and hour; by default the machine is owned.", show_default=False),
]
Grid = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--grid", help="kg of CO2 per kWh; by default the United States' of 2022.", show_default=False),
]
Overhead = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--overhead", help="Time of the whole over that of its best steps; by default as published projects took.",
        show_default=False,
    ),
]  # fmt: skip
Drawn = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--out", help="Folder for pictures: of the plan (timeline, trace, waterfall), or of a search (its front).",
        show_default=False,
    ),
]  # fmt: skip
Pictures = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", help="Folder for pictures (HTML, SVG) and JSON.", show_default=False),
]


def plan(
    file: Asked = None, cards: Cards = None, card: Card = "", interconnect: Interconnect = "", cooling: Cooling = "",
    machine: Named = "",
    search: Annotated[bool, typer.Option("--search", help="Find the best ways to spread it, and say why.")] = False,
    model: Model = "", batch: Batch = None, sequence: Sequence = None, precision: Precision = "",
    objective: Objective = "",
    top: Top = None,
    runnable: Runnable = False,
    write: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--write", help="Job file to write: the best plan that our trainer runs.", show_default=False),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where the step's time goes, part by part.")] = False,
    price: Price = None, out: Drawn = None, overrides: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Check a job's degrees, cut its layers, estimate memory and step time; or search for the best degrees.

    A search is also what a job without degrees gets on a machine of the catalogue, and a model without a job file.
    """
    from supernode.cli import show
    from supernode.control.simulate import draw_plan
    from supernode.intake.asking import load_asked, write_job
    from supernode.schema.job import JobSpec
    from supernode.schema.spread import Parallelism
    from supernode.simulation.waterfall import plan_waterfall, plans_waterfall

    asked = load_asked(
        file, model=model, batch=batch, sequence=sequence, precision=precision, overrides=overrides_of(overrides)
    )
    held = node(cards, card, interconnect, cooling, machine, asked if isinstance(asked, JobSpec) else JobSpec())
    is_asked = search or runnable or bool(objective or write or top is not None or price is not None) or file is None
    # Of the user's own module only the planner knows the layers, which it traces.
    is_open = isinstance(asked, JobSpec) and not asked.module and asked.parallelism == Parallelism()
    if isinstance(asked, JobSpec) and not is_asked and not (is_open and held.machine.card.kind != "cpu"):
        laid_out = held.plan(asked)
        drawn = draw_plan(out, laid_out, held.machine) if out is not None else ()
        show.plan(laid_out, plan_waterfall(laid_out, held.machine) if explain else (), drawn, as_json=as_json)
        return
    from supernode.cli import show_advice
    from supernode.search.runnable import job_of

    wanted = {"objective": objective or "time", "top": 5 if top is None else top, "price": _dear(price)}
    question, plans = held.advise(asked, runnable=runnable or write is not None, **wanted)
    if write is not None:
        assert question.job is not None  # else nothing would have been found to run
        write_job(job_of(plans.space, plans.best, question.job), write)
    bars = plans_waterfall(plans) if explain else ()
    show_advice.search(question, plans, _written(out, question, plans), bars, as_json=as_json)
    if write is not None:
        show.talk(f"job file: {write}")


def compare(
    file: Asked = None,
    machines: Annotated[
        str, typer.Option("--machines", help="Names with commas: supernode-512,512xH100,local.")
    ] = "",
    model: Model = "", batch: Batch = None, sequence: Sequence = None, precision: Precision = "",
    objective: Objective = "time", runnable: Runnable = False, tokens: Tokens = None, steps: Steps = None,
    mtbf: Mtbf = "", save: Save = "", restart: Restart = "", price: Price = None, grid: Grid = None,
    overhead: Overhead = None, out: Pictures = None, overrides: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Set machines side by side: the best plan on each, days, energy, cost, carbon, and which wins."""
    from supernode.advice import compare as comparing
    from supernode.cli import show_advice
    from supernode.intake.asking import as_question, load_asked
    from supernode.pages.pictures import write_comparison
    from supernode.schema.job import JobSpec

    asked = load_asked(
        file, model=model, batch=batch, sequence=sequence, precision=precision, overrides=overrides_of(overrides)
    )
    terms = _terms(file, tokens, steps, mtbf, save, restart, price, grid, overhead)
    value = comparing.compare(
        as_question(asked),
        comparing.named(machines, asked if isinstance(asked, JobSpec) else None),
        terms,
        objective=objective,
        runnable=runnable,
    )
    if value.winner is None:
        raise value.refusal()
    show_advice.comparison(value, write_comparison(out, value) if out is not None else (), as_json=as_json)


def forecast(
    file: Asked = None, cards: Cards = None, card: Card = "", interconnect: Interconnect = "", cooling: Cooling = "",
    machine: Named = "", model: Model = "", batch: Batch = None, sequence: Sequence = None, precision: Precision = "",
    runnable: Runnable = False, tokens: Tokens = None, steps: Steps = None, mtbf: Mtbf = "", save: Save = "",
    restart: Restart = "", price: Price = None, grid: Grid = None, overhead: Overhead = None, out: Pictures = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Forecast a whole project: days, restarts, energy, cost and carbon, each with the range four of five lie in."""
    from supernode.advice.pace import pace_of
    from supernode.advice.project import forecast as reckon
    from supernode.cli import show_advice
    from supernode.intake.asking import as_question, load_asked
    from supernode.pages.pictures import write_project
    from supernode.schema.job import JobSpec

    asked = load_asked(
        file, model=model, batch=batch, sequence=sequence, precision=precision, overrides=overrides_of(overrides)
    )
    terms = _terms(file, tokens, steps, mtbf, save, restart, price, grid, overhead)
    held = node(cards, card, interconnect, cooling, machine, asked if isinstance(asked, JobSpec) else JobSpec())
    question = as_question(asked)
    value = reckon(question, held.machine, terms, pace=pace_of(question, held.machine, runnable=runnable))
    show_advice.project(value, write_project(out, value) if out is not None else (), as_json=as_json)


def _terms(
    file: Path | None,
    tokens: str | None,
    steps: int | None,
    mtbf: str,
    save: str,
    restart: str,
    price: float | None,
    grid: float | None,
    overhead: float | None,
) -> Any:
    """Return what to reckon with, the flags' hours and kWh in SI.

    A bare model's name says nothing of how much to train; a file's steps are its own.
    """
    from supernode.advice.terms import GRID, Terms, open_end
    from supernode.units import parse_count, parse_seconds

    if file is None and tokens is None and steps is None:
        raise open_end()
    return Terms(
        tokens=_above(parse_count(tokens, key="--tokens"), "--tokens") if tokens is not None else 0.0,
        steps=int(_above(steps, "--steps")) if steps is not None else 0,
        mtbf=_above(parse_seconds(mtbf, key="--mtbf"), "--mtbf") if mtbf else 0.0,
        save=parse_seconds(save, key="--save") if save else None,
        restart=parse_seconds(restart, key="--restart") if restart else None,
        price=None if (dear := _dear(price)) is None else dear / 3600,
        grid=GRID if grid is None else grid / 3.6e6,
        overhead=overhead,
    )


def _dear(price: float | None) -> float | None:
    """Return USD for a card and hour, if any were given."""
    return None if price is None else _above(price, "--price")


def _above(value: float, flag: str) -> float:
    if not 0 < value < float("inf"):
        raise SpecError(f"`{flag}` is {value:g}", hint="give a number above 0.")
    return value


def _written(out: Path | None, *values: Any) -> tuple[Path, ...]:
    from supernode.pages.pictures import write_search

    return write_search(out, *values) if out is not None else ()
