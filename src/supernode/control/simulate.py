"""A job in virtual time: one step event by event, then the whole run through the same drive loop that real runs use."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from supernode.advice.terms import restart_seconds, whole_runs, writing_seconds
from supernode.control.drive import drive
from supernode.errors import MachineError, SpecError
from supernode.files import write_all
from supernode.hardware.machine import Machine
from supernode.scheduling.controller import Controller
from supernode.schema.event import Event, Started
from supernode.schema.plan import Plan
from supernode.schema.report import RunState
from supernode.simulation.cluster import SimulatedBackend
from supernode.simulation.goodput import LLAMA_RATE
from supernode.simulation.step import Timeline, simulate_step
from supernode.simulation.timeline import chrome_trace, timeline_svg
from supernode.simulation.waterfall import Bar, plan_waterfall, waterfall_svg
from supernode.units import show_seconds

MOST_STEPS = 2_000_000  # about half a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulated run came to.

    Attributes:
        timeline: one step, event by event.
        bars: where its time goes, by the closed form; none where the model is the user's own.
        state: at the end, as a real run's would be; its losses are not simulated.
        seconds: virtual time of the whole run.
        ideal_seconds: of the steps done, without failures, checkpoints and starts.
        save_seconds: that one checkpoint was taken to cost, and loading it, too.
        restart_seconds: from a failure until ranks compute again, loading left out.
        mtbf: seconds between failures of one card; infinity for none.
        is_local: ranks are this computer's cores.
    """

    plan: Plan
    timeline: Timeline
    bars: tuple[Bar, ...]
    state: RunState
    seconds: float
    ideal_seconds: float
    save_seconds: float
    restart_seconds: float
    mtbf: float
    is_local: bool

    @property
    def terms(self) -> tuple[str, ...]:
        """What was assumed, as sentences, and where `supernode forecast` takes something else."""
        fails = "no card fails" if math.isinf(self.mtbf) else f"one card fails every {self.mtbf / 3600:,.0f} h"
        return (
            f"{fails} (`--mtbf`; a forecast takes {1 / LLAMA_RATE / 3600:,.0f} h, as in Llama 3's training, if nothing "
            "is said).",
            f"checkpoints come {self._rhythm}; the start takes "
            f"{show_seconds(self.restart_seconds)}, which a forecast leaves out, and a failure as long and loading.",
            "steps take what one does event by event, with nothing on top (a forecast's overhead is 1); losses are not "
            "simulated."
            if self.is_local else
            f"steps take what one does event by event, with nothing on top (a forecast takes "
            f"{whole_runs().overhead:.2f} times as long, as published projects did); losses are not simulated.",
        )  # fmt: skip

    @property
    def _rhythm(self) -> str:
        every = self.plan.job.checkpoint.every
        return f"every {every:,} steps, as the job has them" if every else "at the end alone, their cost being unknown"

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that counted."""
        return self.ideal_seconds / self.seconds if self.seconds else 1.0

    def write(self, folder: Path) -> tuple[Path, ...]:
        """Write the step's timeline as SVG and as a trace for Perfetto, and where its time goes; returns the paths."""
        return _draw(folder, self.timeline, self.bars)


def draw_plan(folder: Path, plan: Plan, machine: Machine) -> tuple[Path, ...]:
    """Write the same of a plan that is not played."""
    return _draw(folder, simulate_step(plan, machine), plan_waterfall(plan, machine))


def _draw(folder: Path, timeline: Timeline, bars: tuple[Bar, ...]) -> tuple[Path, ...]:
    picture, trace, parts = folder / "timeline.svg", folder / "trace.json", folder / "waterfall.svg"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = {picture: timeline_svg(timeline.spans), trace: json.dumps(chrome_trace(timeline.spans))}
        write_all(drawn | ({parts: waterfall_svg(bars)} if bars else {}))
    except OSError as error:
        raise MachineError(
            f"cannot write in {folder}: {os.strerror(error.errno or 0)}", hint="choose another `--out`."
        ) from error
    return (picture, trace, parts) if bars else (picture, trace)


@dataclass(slots=True)
class _Memory:
    """A record that keeps nothing but the number of events."""

    events: int = field(default=0)

    def append(self, event: Event, time: float) -> None:
        self.events += 1


def simulate(plan: Plan, machine: Machine, *, mtbf: float, seed: int) -> Simulation:
    """Play a plan.

    Args:
        mtbf: mean time between failures of one card, in seconds; infinity for none.
        seed: of the failures.

    Raises:
        SpecError: more steps than can be played in a minute.
    """
    if plan.job.steps > MOST_STEPS:
        raise SpecError(
            f"`steps` is {plan.job.steps:,}, and every step is played",
            hint=f"simulate {MOST_STEPS:,} of them: `--set steps={MOST_STEPS}`.",
        )
    timeline = simulate_step(plan, machine)
    save_seconds, again = writing_seconds(machine, plan.parameters, plan.ranks), restart_seconds(machine)
    backend = SimulatedBackend(
        plan, mtbf=mtbf, seed=seed, save_seconds=save_seconds, load_seconds=save_seconds,
        launch_seconds=again, step_seconds=timeline.total,
    )  # fmt: skip
    controller = Controller()
    drive(Started(plan=plan), controller=controller, backend=backend, record=_Memory())
    assert controller.state is not None
    return Simulation(
        plan=plan, timeline=timeline, bars=plan_waterfall(plan, machine), state=controller.state, seconds=backend.now(),
        ideal_seconds=controller.state.step * timeline.total, save_seconds=save_seconds,
        restart_seconds=again, mtbf=mtbf, is_local=machine.card.kind == "cpu",
    )  # fmt: skip
