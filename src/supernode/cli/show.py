"""What people see: tables with Rich on the terminal, the same values as JSON on demand."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from supernode.cli.words import printable, printable_json
from supernode.schema.codec import to_plain
from supernode.schema.report import Report, RunState
from supernode.units import show, show_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from supernode.control.simulate import Simulation
    from supernode.hardware.sheet import MachineSheet
    from supernode.schema.plan import Plan
    from supernode.simulation.waterfall import Bar


class _Console(Console):
    """A console that leaves it to its caller what to do once its reader has gone."""

    def on_broken_pipe(self) -> None:
        """Tell of it; Rich itself would end the process."""
        raise BrokenPipeError("its reader has gone")  # Without a number, which Typer would end the process for.


_OUT = _Console()
TALK = _Console(stderr=True)
NOBODY_LISTENS = (OSError, ValueError)
"""What talking raises where the stream is full, closed, or without a reader."""


def talk(text: str) -> None:
    """Say something that is not data."""
    with suppress(*NOBODY_LISTENS):
        TALK.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print JSON on stdout."""
    print(printable_json(value))


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print rows for people: what, and how much."""
    drawn = Table(title=title, show_header=False, title_justify="left")
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in rows:
        drawn.add_row(_plain(name), _plain(value))
    _OUT.print(drawn)


def grid(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table with a head; the first column is never broken."""
    drawn = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        drawn.add_column(name, no_wrap=place == 0, overflow="fold")
    for row in rows:
        drawn.add_row(*map(_plain, row))
    _OUT.print(drawn)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(printable(text))


def plan(value: Plan, bars: tuple[Bar, ...] = (), files: tuple[Path, ...] = (), *, as_json: bool) -> None:
    """Show a plan, where its step's time goes if that was asked for, and which pictures were drawn."""
    from supernode.planning.planner import explain

    if as_json:
        drawn = {"files": [str(file) for file in files]} if files else {}
        print_json(to_plain(value) | waterfall_json(bars) | drawn)
    else:
        table(f"plan of {value.job.name}", explain(value))
        waterfall(bars)
        say(files)


def say(files: tuple[Path, ...]) -> None:
    """Say which files were written."""
    for file in files:
        talk(str(file))


def waterfall(bars: tuple[Bar, ...]) -> None:
    """Show where a step's time goes; nothing where nothing is known."""
    from supernode.simulation.waterfall import rows

    if bars:
        table("where the step's time goes", rows(bars))


def waterfall_json(bars: tuple[Bar, ...]) -> dict[str, Any]:
    """Return the same for programs, in seconds."""
    return {"waterfall": {bar.name: bar.seconds for bar in bars}} if bars else {}


def machine(sheet: MachineSheet, *, as_json: bool) -> None:
    """Show a machine's sheet."""
    if as_json:
        print_json(to_plain(sheet))
    else:
        table("machine", sheet.rows())


def simulation(value: Simulation, files: tuple[Path, ...], *, as_json: bool) -> None:
    """Show what a simulated run came to."""
    state = value.state
    if as_json:
        print_json(
            {
                "step_seconds": value.timeline.total,
                "closed_form_seconds": value.plan.step.total if value.plan.step else None,
                "seconds": value.seconds, "ideal_seconds": value.ideal_seconds, "goodput": value.goodput,
                "failures": state.failures, "steps_repeated": len(state.repeats), "saves": state.saves,
                "save_seconds": value.save_seconds, "outcome": state.outcome, "assumptions": list(value.terms),
                "files": [str(file) for file in files],
            }
        )  # fmt: skip
        return
    rows = [
        ("one step", f"{show_seconds(value.timeline.total)} event by event"),
        ("run", f"{show_seconds(value.seconds)} for {value.plan.job.steps:,} steps; {state.outcome}"),
        ("goodput", f"{value.goodput:.1%} of it in steps that count"),
        ("failures", f"{state.failures}, {len(state.repeats)} steps done again"),
        ("checkpoints", f"{state.saves}, {show_seconds(value.save_seconds)} each (assumed 1 GB/s a node)"),
        *(("assumed", said) for said in value.terms),
    ]
    if state.message:
        rows.append(("ended", state.message))
    table(f"simulation of {value.plan.job.name}", rows)
    say(files)


def status(state: RunState, *, as_json: bool) -> None:
    """Show how a run stands."""
    if as_json:
        print_json(to_plain(state))
        return
    job = state.plan.job
    loss = f"{state.losses[state.step]:.4f}" if state.step in state.losses else "–"
    rows = [
        ("outcome", state.outcome + (f": {state.message}" if state.message else "")),
        ("layout", str(state.plan.layout)),
        ("cards up", f"{state.ready} of {state.plan.ranks}"),
        ("step", f"{state.step:,} of {job.steps:,}"),
        ("loss", loss),
        ("failures", f"{state.failures}, {len(state.repeats)} steps done again, "
                     f"{sum(same for _, same in state.repeats)} with the same loss"),
        ("checkpoints", ", ".join(name for _, name in state.checkpoints) or "none"),
    ]  # fmt: skip
    if state.skipped:
        rows.append(("skipped", f"{state.skipped} steps whose gradients overflowed in float16"))
    rows += [(name, note) for name, note in state.notes.items() if isinstance(note, str) and note and name != "sample"]
    rows += [
        (show_seconds(incident.time), f"{incident.what} {incident.detail}".strip()) for incident in state.incidents[-8:]
    ]
    if state.hint:
        rows.append(("hint", state.hint))
    table(job.name, rows)


def report(value: Report, *, as_json: bool) -> None:
    """Show a run's sum."""
    if as_json:
        from supernode.pages.report import report_json

        print_json(report_json(value))
        return
    predicted, measured = value.predicted.get("total"), value.measured.get("total")
    rows = [
        ("outcome", value.outcome),
        ("steps", f"{value.steps:,} on {value.layout}"),
        ("loss", _number(value.loss)),
        ("held-out loss", f"{_number(value.held_out_loss)} (bigram model: {_number(value.bigram_loss)})"),
        ("step time", f"{_time(measured)} measured, {_time(predicted)} predicted"),
        ("speed", f"{show(value.tokens_per_second, 'tokens/s')}" if value.tokens_per_second else "–"),
        (
            "failures",
            f"{value.failures}; {value.repeats} steps done again, {value.repeats_identical} with the same loss",
        ),
    ]
    if value.skipped:
        rows.append(("skipped", f"{value.skipped} steps whose gradients overflowed in float16"))
    if value.sample:
        rows.append(("sample", value.sample))
    table(value.name, rows)
    if value.folder:
        talk(f"report: {value.folder}/report.html")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else show_seconds(seconds)
