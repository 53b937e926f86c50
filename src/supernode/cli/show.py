"""What people see: tables and progress with Rich on the terminal, the same values as JSON on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from supernode.cli.words import printable, printable_json
from supernode.schema.codec import to_plain
from supernode.schema.event import (
    Ended,
    Evaluated,
    Event,
    Noted,
    RankLost,
    RankReady,
    Rejected,
    Saved,
    Started,
    StepDone,
    StopAsked,
)
from supernode.schema.report import Report, RunState
from supernode.units import show, show_bytes, show_seconds

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
_TALK = _Console(stderr=True)
_NOBODY_LISTENS = (OSError, ValueError)
"""What talking raises where the stream is full, closed, or without a reader."""


def talk(text: str) -> None:
    """Say something that is not data."""
    with suppress(*_NOBODY_LISTENS):
        _TALK.print(printable(text), highlight=False, markup=False, soft_wrap=True)


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


def plan(value: Plan, bars: tuple[Bar, ...] = (), *, as_json: bool) -> None:
    """Show a plan, and where its step's time goes if that was asked for."""
    from supernode.planning.planner import explain

    if as_json:
        print_json(to_plain(value) | waterfall_json(bars))
    else:
        table(f"plan of {value.job.name}", explain(value))
        waterfall(bars)


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
                "save_seconds": value.save_seconds, "outcome": state.outcome, "files": [str(file) for file in files],
            }
        )  # fmt: skip
        return
    rows = [
        ("one step", f"{show_seconds(value.timeline.total)} event by event"),
        ("run", f"{show_seconds(value.seconds)} for {value.plan.job.steps:,} steps; {state.outcome}"),
        ("goodput", f"{value.goodput:.1%} of it in steps that count"),
        ("failures", f"{state.failures}, {len(state.repeats)} steps done again"),
        ("checkpoints", f"{state.saves}, {show_seconds(value.save_seconds)} each (assumed 1 GB/s a node)"),
    ]
    if state.message:
        rows.append(("ended", state.message))
    table(f"simulation of {value.plan.job.name} (losses are not simulated)", rows)
    for file in files:
        talk(str(file))


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
    rows += [
        (show_seconds(incident.time), f"{incident.what} {incident.detail}".strip()) for incident in state.incidents[-8:]
    ]
    if state.hint:
        rows.append(("hint", state.hint))
    table(job.name, rows)


def report(value: Report, *, as_json: bool) -> None:
    """Show a run's sum."""
    if as_json:
        from supernode.control.report import report_json

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
    if value.sample:
        rows.append(("sample", value.sample))
    table(value.name, rows)
    if value.folder:
        talk(f"report: {value.folder}/report.html")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else show_seconds(seconds)


class Watching:
    """Progress of a run on the terminal: step, loss, tokens/s, time left, cards up; incidents as they happen.

    Once the terminal is gone it goes quiet: a run does not end because nobody listens.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._folder: Path | None = None
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=_TALK, disable=quiet or not _TALK.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> Watching:
        with self._talking():
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*_NOBODY_LISTENS):
            self._progress.stop()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except _NOBODY_LISTENS:
            self._quiet = True

    def place(self, folder: Path) -> None:
        """Hear where the run lives, which is said once it starts."""
        self._folder = folder

    def prepare(self, what: str, done: float) -> None:
        """Show the data being prepared."""
        if self._quiet:
            return
        with self._talking():
            if self._task is None:
                self._task = self._progress.add_task("data", total=1.0, told="")
            self._progress.update(self._task, description="data", completed=done, told=what)

    def see(self, event: Event, state: RunState) -> None:
        """Show an event."""
        if not self._quiet:
            with self._talking():
                self._show(event, state)

    def _show(self, event: Event, state: RunState) -> None:
        job = state.plan.job
        if isinstance(event, Started):
            if self._folder is not None:
                self._say(f"run in {self._folder}")
            self._say(f"{job.name}: {state.plan.layout}, {job.steps:,} steps; cards {_list(state.plan.cards)}")
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task("step", total=job.steps, completed=state.step, told="starting")
        elif isinstance(event, StepDone):
            self._stepped(event, state)
        elif isinstance(event, RankReady):
            if state.ready == 1 and state.incarnation > 1:
                self._say(f"{state.incidents[-1].what} {state.incidents[-1].detail}")
        elif isinstance(event, Saved):
            self._say(
                f"step {event.step:,}: {event.checkpoint} saved, "
                f"{show_bytes(event.nbytes)} in {show_seconds(event.seconds)}"
            )
        elif isinstance(event, Evaluated):
            self._say(f"step {event.step:,}: held-out loss {event.loss:.4f}")
        elif isinstance(event, RankLost):
            self._say(f"rank {event.rank} lost: {event.reason}")
        elif isinstance(event, Rejected):
            self._say(f"{event.checkpoint} is not used: {event.reason}")
        elif isinstance(event, StopAsked):
            self._say("stopping now" if event.now else "saving, then stopping; Ctrl-C again stops now")
        elif isinstance(event, Noted) and event.name != "sample":
            self._say(f"{event.name}: {event.value}")
        elif isinstance(event, Ended):
            self._say(f"{event.outcome}{': ' + event.message if event.message else ''}")

    def _stepped(self, event: StepDone, state: RunState) -> None:
        job = state.plan.job
        speed = show(event.tokens / event.seconds, "tokens/s" if not job.data.dataset else "samples/s")
        told = f"{event.step:,}/{job.steps:,} loss {event.loss:.4f} {speed} cards {state.ready}/{state.plan.ranks}"
        if self._task is not None:
            self._progress.update(self._task, completed=event.step, told=told)
        # Without a live line, a word now and then.
        if self._progress.disable and (event.step % max(1, job.steps // 20) == 0 or event.step == 1):
            self._say(f"step {told}")

    def _say(self, text: str) -> None:
        self._progress.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _list(cards: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, cards[:8]))
    return shown + (f", … ({len(cards)} in all)" if len(cards) > 8 else "")
