"""What is said of a run while it goes? Progress on the terminal, and incidents as they happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from supernode.cli import show as shown
from supernode.cli.show import NOBODY_LISTENS
from supernode.cli.words import printable
from supernode.schema.event import (
    CardChecked,
    Diverged,
    Ended,
    Evaluated,
    Event,
    Fenced,
    Noted,
    RankLost,
    Rejected,
    Restored,
    Saved,
    Spiked,
    Started,
    StepDone,
    StopAsked,
    Unsaved,
)
from supernode.schema.report import RunState
from supernode.units import show, show_bytes, show_seconds

if TYPE_CHECKING:
    from pathlib import Path


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
            console=shown.TALK, disable=quiet or not shown.TALK.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> Watching:
        with self._talking():
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*NOBODY_LISTENS):
            self._progress.stop()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except NOBODY_LISTENS:
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
        elif isinstance(event, (Diverged, Fenced, CardChecked, Spiked)) or (
            isinstance(event, Restored) and state.incarnation > 1
        ):
            if state.incidents and state.incidents[-1].what:
                self._say(f"{state.incidents[-1].what} {state.incidents[-1].detail}")
        elif isinstance(event, Saved):
            self._say(
                f"step {event.step:,}: {event.checkpoint} saved, {show_bytes(event.nbytes)} new, on disk within "
                f"{show_seconds(event.took)}; training stood still for {show_seconds(event.seconds)}"
            )
        elif isinstance(event, Unsaved):
            self._say(f"step {event.step:,} is not saved: {event.reason}; {event.hint}")
        elif isinstance(event, Evaluated):
            self._say(f"step {event.step:,}: held-out loss {event.loss:.4f}")
        elif isinstance(event, RankLost):
            self._say(f"rank {event.rank} lost: {event.reason}")
        elif isinstance(event, Rejected):
            self._say(f"{event.checkpoint} is not used: {event.reason}")
        elif isinstance(event, StopAsked):
            self._say("stopping now" if event.now else "saving, then stopping; Ctrl-C again stops now")
        elif isinstance(event, Noted) and event.name == "bigram_loss":
            self._say(f"a bigram model of the same text: held-out loss {event.value:.4f}")
        elif isinstance(event, Noted) and event.name != "sample" and isinstance(event.value, str) and event.value:
            between = "\n" if "\n" in event.value else " "  # A table's columns start below each other.
            self._say(f"{event.name}:{between}{event.value}")
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
