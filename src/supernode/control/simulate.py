"""A job in virtual time: one step event by event, then the whole run through the same drive loop that real runs use."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from supernode.control.drive import drive
from supernode.errors import MachineError, SpecError
from supernode.hardware.machine import Machine
from supernode.scheduling.controller import Controller
from supernode.schema.event import Event, Started
from supernode.schema.plan import Plan
from supernode.schema.report import RunState
from supernode.simulation.cluster import SimulatedBackend
from supernode.simulation.step import Timeline, simulate_step
from supernode.simulation.timeline import chrome_trace, timeline_svg
from supernode.simulation.waterfall import Bar, plan_waterfall, waterfall_svg

DISK_BANDWIDTH = 1e9  # bytes/s that one node's disk takes; an assumption until a run has measured it
MOST_STEPS = 2_000_000  # about half a minute
LAUNCH_SECONDS = 5.0  # from a failure to ranks that compute again; an assumption until a run has measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulated run came to.

    Attributes:
        timeline: one step, event by event.
        bars: where its time goes, by the closed form; none where the model is the user's own.
        state: at the end, as a real run's would be; its losses are not simulated.
        seconds: virtual time of the whole run.
        ideal_seconds: of the steps done, without failures, checkpoints and starts.
        save_seconds: that one checkpoint was taken to cost.
    """

    plan: Plan
    timeline: Timeline
    bars: tuple[Bar, ...]
    state: RunState
    seconds: float
    ideal_seconds: float
    save_seconds: float

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that counted."""
        return self.ideal_seconds / self.seconds if self.seconds else 1.0

    def write(self, folder: Path) -> tuple[Path, ...]:
        """Write the step's timeline as SVG and as a trace for Perfetto, and where its time goes; returns the paths."""
        picture, trace, parts = folder / "timeline.svg", folder / "trace.json", folder / "waterfall.svg"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            picture.write_text(timeline_svg(self.timeline.spans), encoding="utf-8")
            trace.write_text(json.dumps(chrome_trace(self.timeline.spans)), encoding="utf-8")
            if self.bars:
                parts.write_text(waterfall_svg(self.bars), encoding="utf-8")
        except OSError as error:
            raise MachineError(
                f"cannot write in {folder}: {os.strerror(error.errno or 0)}", hint="choose another `--out`."
            ) from error
        return (picture, trace, parts) if self.bars else (picture, trace)


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
    nodes = max(1, plan.ranks // machine.node_cards)
    # Weights and two moments in float32, written by all nodes at once.
    save_seconds = 12 * plan.parameters / (nodes * DISK_BANDWIDTH)
    backend = SimulatedBackend(
        plan, mtbf=mtbf, seed=seed, save_seconds=save_seconds, load_seconds=save_seconds,
        launch_seconds=LAUNCH_SECONDS, step_seconds=timeline.total,
    )  # fmt: skip
    controller = Controller()
    drive(Started(plan=plan), controller=controller, backend=backend, record=_Memory())
    assert controller.state is not None
    return Simulation(
        plan=plan, timeline=timeline, bars=plan_waterfall(plan, machine), state=controller.state, seconds=backend.now(),
        ideal_seconds=controller.state.step * timeline.total, save_seconds=save_seconds,
    )  # fmt: skip
