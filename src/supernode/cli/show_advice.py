"""How is advice shown? A search, a comparison and a project's forecast, as tables or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supernode.advice import answer, tell
from supernode.advice.compare import verdict
from supernode.cli import show

if TYPE_CHECKING:
    from pathlib import Path

    from supernode.advice.compare import Comparison
    from supernode.advice.project import Project
    from supernode.advice.question import Question
    from supernode.search.best import Plans
    from supernode.simulation.waterfall import Bar


def search(
    question: Question, plans: Plans, files: tuple[Path, ...], bars: tuple[Bar, ...] = (), *, as_json: bool
) -> None:
    """Show the best few plans, why, the front, and where the best one's time goes if that was asked for."""
    if as_json:
        told = answer.as_plain(question, plans) | {"files": [str(file) for file in files]}
        show.print_json(told | show.waterfall_json(bars))
        return
    show.table(f"plans for {question.name}", list(answer.rows(question, plans)))
    show.waterfall(bars)
    show.say(files)


def comparison(value: Comparison, files: tuple[Path, ...], *, as_json: bool) -> None:
    """Show machines side by side, and which wins."""
    if as_json:
        show.print_json(tell.comparison_plain(value) | {"files": [str(file) for file in files]})
        return
    columns, rows = tell.comparison_table(value)
    show.grid(f"machines for {value.question.name}", columns, rows)
    show.table("best", [("why", verdict(value)), *(("note", note) for note in value.question.notes)])
    show.say(files)


def project(value: Project, files: tuple[Path, ...], *, as_json: bool) -> None:
    """Show what a project takes."""
    if as_json:
        show.print_json(tell.project_plain(value) | {"files": [str(file) for file in files]})
        return
    show.table(f"forecast of {value.question.name}", tell.project_rows(value))
    show.say(files)
