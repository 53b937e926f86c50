"""What came of a run? Sums its state up, and writes it as JSON and as one page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from statistics import median
from typing import Any

from supernode.pages.chart import Series, line_chart, paired_bars, stacked_bar
from supernode.pages.page import PAGE, STYLE
from supernode.planning.planner import explain
from supernode.schema.plan import StepTime
from supernode.schema.report import Report, RunState
from supernode.units import show, show_seconds

_PARTS = ("compute", "tensor", "context", "expert", "pipeline", "data", "optimizer", "overhead")
# What is predicted and what a rank can time are cut differently: forward and backward are one lap, with all that is
# waited for inside; `wait` is the meeting of all ranks that clipping needs.
_BESIDE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("whole step", ("total",), ("total",)),
    ("forward and backward", ("compute", "tensor", "context", "expert", "pipeline", "overhead"), ("compute",)),
    ("synchronising gradients", ("data",), ("sync",)),
    ("clipping and update", ("optimizer",), ("wait", "optimizer")),
    ("reading data", (), ("data",)),
)
_WALL = {
    "steps": "training steps that count",
    "repeated steps": "steps done again after a failure",
    "starting": "from launching the ranks until all are ready, checkpoint loaded",
    "saving": "writing checkpoints",
    "evaluating": "trying the model on held-out data",
    "other": "noticing failures, steps lost in them, preparing data, and the time between two controllers",
}
MOST_ROWS = 20
"""Rows of the table under the loss curve."""


def _measured(state: RunState) -> dict[str, float]:
    """Return the median step, shared among its parts as the running mean is; so the parts add up to the whole."""
    seconds = list(state.step_seconds.values())
    if not seconds:
        return {}
    whole, told = median(seconds), sum(state.parts.values())
    return {"total": whole} | {part: value * whole / told for part, value in state.parts.items() if told > 0}


def make_report(state: RunState) -> Report:
    """Return the run, summed up; it may still be under way."""
    plan = state.plan
    spent = state.spent_seconds
    return Report(
        name=plan.job.name,
        outcome=state.outcome,
        machine=plan.machine,
        layout=str(plan.layout),
        steps=state.step,
        loss=_newest(state.losses),
        held_out_loss=_newest(state.held_out),
        bigram_loss=_number(state.notes.get("bigram_loss")),
        predicted=_predicted(plan.step),
        measured=_measured(state),
        wall=_wall(state),
        tokens_per_second=state.spent_tokens / spent if spent > 0 else None,
        failures=state.failures,
        repeats=len(state.repeats),
        repeats_identical=sum(same for _, same in state.repeats),
        losses=dict(state.losses),
        held_out=dict(state.held_out),
        incidents=state.incidents,
        skipped=state.skipped,
        sample=str(state.notes.get("sample", "")),
    )


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as plain JSON; a number that is not finite is null."""
    plain: dict[str, Any] = _plain(asdict(report))
    return plain


def report_html(report: Report, state: RunState) -> str:
    """Return the report as one HTML page: no script, nothing loaded from elsewhere, light or dark."""
    sections = [
        _head(report, state),
        _loss(report, state),
        _step(report),
        _wall_section(report),
        _section("What happened", _table(("after", "what", "detail"), _diary(report))),
        _section("Plan", _table(("what", "how much"), explain(state.plan))),
    ]
    if report.sample:
        caption = "<p>Written by the trained model, starting from the job's prompt.</p>"
        sections.append(_section("Sample", f"{caption}<pre>{escape(report.sample)}</pre>"))
    return PAGE.format(title=escape(f"{report.name}: {report.outcome}"), style=STYLE, body="\n".join(sections))


def recoveries(state: RunState) -> tuple[int, ...]:
    """Return the steps at which a run took up again what it had done before: the first of each row of repeats."""
    steps = [step for step, _ in state.repeats]
    return tuple(step for before, step in zip([-1, *steps], steps, strict=False) if step != before + 1)


def _newest(values: Mapping[int, float]) -> float | None:
    return _number(values[max(values)]) if values else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _predicted(step: StepTime | None) -> dict[str, float]:
    if step is None:
        return {}
    return {"total": step.total} | {part: getattr(step, part) for part in _PARTS}


def _wall(state: RunState) -> dict[str, float]:
    wall = {
        "steps": state.spent_seconds - state.repeat_seconds,
        "repeated steps": state.repeat_seconds,
        "starting": state.launch_seconds,
        "saving": state.save_seconds,
        "evaluating": state.evaluate_seconds,
    }
    return wall | {"other": max(0.0, state.updated - state.started - sum(wall.values()))}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _head(report: Report, state: RunState) -> str:
    told = f"<p>{escape(state.message)}</p>" if state.message else ""
    hint = f"<p><strong>hint:</strong> {escape(state.hint)}</p>" if state.hint else ""
    speed = "not known" if report.tokens_per_second is None else show(report.tokens_per_second, _unit(state))
    figures = [
        ("outcome", report.outcome),
        ("steps", f"{report.steps:,} of {state.plan.job.steps:,}"),
        ("loss", _loss_text(report.loss)),
        ("held-out loss", _loss_text(report.held_out_loss)),
        ("bigram baseline", _loss_text(report.bigram_loss)),
        ("speed over the steps", speed),
        ("failures", f"{report.failures}"),
        ("repeated steps with the same loss", f"{report.repeats_identical} of {report.repeats}"),
    ]
    if report.skipped:
        figures.append(("steps skipped for overflow in float16", f"{report.skipped}"))
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    where = f"<p>{escape(report.machine)} · {escape(report.layout)}</p>"
    return f"<header><h1>{escape(report.name)}</h1>{where}{told}{hint}<dl>{items}</dl></header>"


def _unit(state: RunState) -> str:
    return "sample/s" if state.plan.job.data.dataset else "token/s"


def _loss_text(loss: float | None) -> str:
    return "not known" if loss is None else f"{loss:.4f}"


def _loss(report: Report, state: RunState) -> str:
    if not report.losses:
        return _section("Loss", "<p>No step is done yet.</p>")
    marks, first = recoveries(state), _number(report.losses[min(report.losses)])
    drawing = line_chart(
        [
            Series(name="training", points=report.losses, style="s1"),
            Series(name="held-out", points=report.held_out, style="s2", dots=True),
        ],
        title="Loss by step",
        desc=f"Training loss from {_loss_text(first)} to {_loss_text(report.loss)} "
        f"over {len(report.losses)} steps; held-out loss {_loss_text(report.held_out_loss)}; "
        f"recovered {len(marks)} times.",
        x_name="step",
        y_name="mean loss",
        level=("bigram", report.bigram_loss) if report.bigram_loss is not None else None,
        marks=marks,
    )
    legend = "Solid: training. Dashed with dots: held-out. Dotted: a bigram model, which knows one token of the past."
    legend += " Triangles: the run was taken up again after a failure." if marks else ""
    rows = [
        (f"{step:,}", _loss_text(_number(report.losses[step])), _loss_text(_number(report.held_out.get(step))))
        for step in _some(sorted(report.losses))
    ]
    table = _table(("step", "training", "held-out"), rows)
    return _section("Loss", _figure(drawing, legend) + f"<details><summary>Numbers</summary>{table}</details>")


def _some(steps: list[int]) -> list[int]:
    """Return the last step and others evenly before it."""
    stride = -(-len(steps) // MOST_ROWS)
    return steps[::-1][::stride][::-1]


def _step(report: Report) -> str:
    rows = [(name, _sum(report.predicted, ours), _sum(report.measured, theirs)) for name, ours, theirs in _BESIDE]
    whole = rows[0]
    drawing = paired_bars(
        rows,
        names=("predicted", "measured"),
        title="Time of a step, predicted and measured",
        desc=f"Predicted {_seconds(whole[1])}, measured {_seconds(whole[2])}.",
        show=show_seconds,
    )
    legend = "Whole step: median over all steps. Parts: their shares of the running mean on the first rank."
    table = _table(("part", "predicted", "measured"), [(n, _seconds(a), _seconds(b)) for n, a, b in rows])
    parts = [(part, _seconds(report.predicted[part])) for part in _PARTS if part in report.predicted]
    fine = _table(("predicted part", "seconds"), parts) if parts else ""
    return _section(
        "Time of a step", f"{_figure(drawing, legend)}<details><summary>Numbers</summary>{table}{fine}</details>"
    )


def _sum(parts: Mapping[str, float], keys: Iterable[str]) -> float | None:
    known = [parts[key] for key in keys if key in parts and math.isfinite(parts[key])]
    return sum(known) if known else None


def _seconds(value: float | None) -> str:
    return "not known" if value is None else show_seconds(value)


def _wall_section(report: Report) -> str:
    whole = sum(report.wall.values())
    drawing = stacked_bar(
        list(report.wall.items()),
        title="Where the time went",
        desc="; ".join(f"{name} {show_seconds(seconds)}" for name, seconds in report.wall.items()),
        show=show_seconds,
    )
    rows = [
        (f"{number}", name, show_seconds(seconds), f"{seconds / whole:.1%}" if whole else "–", _WALL[name])
        for number, (name, seconds) in enumerate(report.wall.items(), start=1)
    ]
    table = _table(("", "part", "time", "share", "what it is"), rows)
    return _section("Where the time went", _figure(drawing, f"{show_seconds(whole)} in all, by part.") + table)


def _diary(report: Report) -> list[tuple[str, str, str]]:
    return [(show_seconds(incident.time), incident.what, incident.detail) for incident in report.incidents]


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
