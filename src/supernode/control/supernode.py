"""The machine in the user's hands: describe it once, then allocate, plan, simulate, run, resume and report on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supernode.errors import SpecError
from supernode.schema.job import JobSpec
from supernode.schema.plan import Plan
from supernode.schema.report import Report, RunState
from supernode.schema.slice import Request
from supernode.units import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from supernode.advice.project import Project
    from supernode.advice.question import Question
    from supernode.control.allocation import Allocation
    from supernode.control.simulate import Simulation
    from supernode.control.training import Watch
    from supernode.hardware.machine import Machine
    from supernode.hardware.sheet import MachineSheet
    from supernode.reliability.answer import Availability
    from supernode.scheduling.pool import Pool
    from supernode.search.best import Plans

Job = JobSpec | Mapping[str, Any] | str | Path
"""A job as a value, as nested dictionaries, or as the path of its YAML file."""


class SuperNode:
    """Many cards as one machine.

    Args:
        card_count: accelerators.
        interconnect: how they are joined, by name: `3D_Ring`, `Full_Mesh`, `Fat_Tree`, …
        cooling: `liquid` or `air`, or another name of the catalogue.
        card: name of the card in the catalogue.
        machine: a machine described elsewhere; the other arguments are then left out.

    Raises:
        SpecError: an unknown name, or a count that no machine has.

    >>> node = SuperNode(card_count=512, interconnect="3D_Ring", cooling="liquid")
    >>> with node.allocate(gpu_memory=80 * 1024, inter_bandwidth=400) as held:
    ...     print(len(held.cards), held.slice.shape)
    8 (2, 2, 2)
    """

    def __init__(
        self, card_count: int = 512, interconnect: str = "3D_Ring", cooling: str = "liquid", *, card: str = "B200",
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        if machine is None:
            from supernode.hardware.assemble import build_machine

            machine = build_machine(card_count=card_count, interconnect=interconnect, cooling=cooling, card=card)
        self.machine = machine
        self._pool: Pool | None = None

    @classmethod
    def discover(cls, cards: int | None = None, *, device: str = "cpu") -> SuperNode:
        """Describe this computer: its CPU cores as cards, or by choice its GPUs.

        Args:
            cards: cards to see; more than there are cores makes each a fraction of one.
            device: `cpu`, which training runs on so far, or `cuda` for the GPUs, to be planned for.
        """
        from supernode.hardware.discover import discover

        return cls(machine=discover(cards=cards, device=device))

    @classmethod
    def named(cls, name: str) -> SuperNode:
        """Return one of the machines of the catalogue, such as `supernode-512`; `local` is this computer.

        Raises:
            SpecError: there is none of that name; the hint lists them.
        """
        from supernode.advice.local import LOCAL, this_computer
        from supernode.hardware.assemble import predefined

        return cls(machine=this_computer() if str(name).lower() == LOCAL else predefined(name))

    @property
    def pool(self) -> Pool:
        """Who holds which cards."""
        if self._pool is None:
            from supernode.scheduling.pool import Pool

            self._pool = Pool(self.machine)
        return self._pool

    def sheet(self) -> MachineSheet:
        """Return memory, FLOP/s, bandwidth, watts and cost of the machine, all derived from its parts."""
        from supernode.hardware.sheet import machine_sheet

        return machine_sheet(self.machine)

    def allocate(
        self, gpu_memory: str | float = 0, inter_bandwidth: str | float = 0, *, cards: int | None = None,
        shape: tuple[int, ...] = (), share: float = 1.0,
    ) -> Allocation:  # fmt: skip
        """Hand out a slice of close cards whose memory and bandwidth nobody else can take.

        Args:
            gpu_memory: on each card: MB (2**20 bytes) as a number, or "80GiB".
            inter_bandwidth: from each card to the others of the slice, one direction: GB/s as a number, or "400GB/s".
            cards: how many; by default those of one node, or of `shape`.
            shape: block of the torus to form, such as (4, 2, 1).
            share: part of each card, above 0 and at most 1.

        Raises:
            CapacityError: the machine has less left; the message names what is short and the largest that would fit.
            SpecError: an argument is wrong.
        """
        from supernode.control.allocation import Allocation

        memory = parse_bytes(gpu_memory, bare=2**20, key="gpu_memory")
        bandwidth = parse_bandwidth(inter_bandwidth, bare=1e9, key="inter_bandwidth")
        if cards is None:
            cards = min(self.machine.node_cards, self.machine.card_count)
            if shape and all(isinstance(side, int) and side > 0 for side in shape):
                cards = math.prod(shape)
        request = Request(cards=cards, memory=memory, bandwidth=bandwidth, shape=tuple(shape), share=share)
        return Allocation(self.pool, self.pool.allocate(request))

    def release(self, allocation: Allocation) -> None:
        """Give a slice back; once more does nothing."""
        allocation.release()

    def plan(self, job: Job) -> Plan:
        """Lay a job out on the free cards: degrees checked, layers cut over stages, memory and time estimated.

        Your own module is traced in a process of its own, which takes some seconds.

        Raises:
            SpecError: the job is wrong, or does not fit the degrees that it names.
            ModelError: your own module fails, or cannot be cut as the job wants.
            CapacityError: a card's memory is too small.
        """
        from supernode.control.trace import plan_with_trace

        return plan_with_trace(as_job(job), self.machine)

    def search(
        self, job: Job, *, objective: str = "time", top: int = 5, runnable: bool = False, cards: int | None = None,
        price: float | None = None,
    ) -> Plans:  # fmt: skip
        """Return the best few ways to spread a job over this machine, why each wins or loses, and the Pareto front.

        Args:
            job: its own `parallelism` is not looked at.
            objective: what is to be least: time, memory, energy or cost.
            top: how many, each of other degrees.
            runnable: only what our own trainer can run; on CPU cores that is so wherever it can train the model.
            cards: how many of the machine's; by default all that the batch divides by.
            price: USD for a card and hour; by default the machine is owned.

        Raises:
            SpecError: the job is wrong, its model the user's own, or cost is to be least and the hardware has no price.
            CapacityError: nothing fits.
        """
        return self.advise(job, objective=objective, top=top, runnable=runnable, cards=cards, price=price)[1]

    def advise(
        self, asked: Job | Question, *, objective: str = "time", top: int = 5, runnable: bool = False,
        cards: int | None = None, price: float | None = None,
    ) -> tuple[Question, Plans]:  # fmt: skip
        """Do likewise for a question, which may be about a model that our trainer cannot build; return it besides."""
        from supernode.advice.question import Question, question_of
        from supernode.advice.question import search as answer

        question = asked if isinstance(asked, Question) else question_of(as_job(asked))
        plans = answer(
            question, self.machine, objective=objective, top=top, runnable=runnable, cards=cards,
            price=None if price is None else price / 3600,
        )  # fmt: skip
        return question, plans

    def forecast(
        self, job: Job | Question, *, tokens: str | float = 0, steps: int = 0, mtbf: str | float = 0,
        save: str | float | None = None, restart: str | float | None = None, price: float | None = None,
        grid: float | None = None, overhead: float | None = None,
    ) -> Project:  # fmt: skip
        """Return what training takes from start to end: days, restarts, energy, cost and carbon, each with a range.

        A job's own degrees are taken if it has any, else the best plan that a search finds.

        Args:
            job: or a question about a public model.
            tokens: to train on, as a number or "1.4T"; by default the job's steps are taken.
            steps: likewise.
            mtbf: mean time between failures of one card, in seconds or "5000h"; by default as Llama 3's training met.
            save: that a checkpoint stops training, in seconds or "30s"; by default what writing it takes.
            restart: from a failure until work goes on, in seconds or "10min".
            price: USD for a card and hour; by default the machine is owned.
            grid: kg of CO2 per kWh; by default the United States' of 2022.
            overhead: time of the whole over that of its best steps; by default as published projects took.

        Raises:
            SpecError: the job is wrong, or how much to train is open.
            CapacityError: nothing fits, or failures leave no time to work.
        """
        from supernode.advice.project import forecast
        from supernode.advice.question import Question, question_of
        from supernode.advice.terms import GRID, Terms
        from supernode.units import parse_count, parse_seconds

        question = job if isinstance(job, Question) else question_of(as_job(job))
        terms = Terms(
            tokens=parse_count(tokens, key="tokens"), steps=steps, mtbf=parse_seconds(mtbf, key="mtbf"),
            save=None if save is None else parse_seconds(save, key="save"),
            restart=None if restart is None else parse_seconds(restart, key="restart"),
            price=None if price is None else price / 3600, grid=GRID if grid is None else grid / 3.6e6,
            overhead=overhead,
        )  # fmt: skip
        return forecast(question, self.machine, terms)

    def simulate(self, job: Job, *, mtbf: float = float("inf"), seed: int = 0) -> Simulation:
        """Play a job in virtual time: one step event by event, then the whole run with failures.

        Args:
            mtbf: mean time between failures of one card, in seconds.
            seed: of the failures.
        """
        from supernode.control.simulate import simulate

        return simulate(self.plan(job), self.machine, mtbf=mtbf, seed=seed)

    def availability(
        self, *, spares: int = 4, without: tuple[str, ...] = (), pause: float = 10.0, by_hand: float = 3 / 419,
        parameters: float = 70e9, step: float = 10.0, days: float = 0.0, seed: int = 0,
    ) -> Availability:  # fmt: skip
        """Reckon how often this machine fails a job on all its cards, for how long, and what redundancy changes.

        Args:
            spares: nodes beside those that the job fills.
            without: redundancies that it lacks: supplies, paths, cooling, control, feeds, disks.
            pause: seconds from a failure until ranks compute again.
            by_hand: part of recoveries that need people; by default as in Llama 3's training.
            parameters: of the model in training.
            step: seconds of a step.
            days: to play event by event as well; 0 for none.
            seed: of the failures that are played.

        Raises:
            SpecError: a number is outside its limits, or the machine is this computer, whose rates nobody knows.
            CapacityError: failures leave no time to work.
        """
        from supernode.control.availability import availability

        return availability(
            self.machine, spares=spares, without=without, pause=pause, by_hand=by_hand, parameters=parameters,
            step=step, days=days, seed=seed,
        )  # fmt: skip

    def run(self, job: Job, *, folder: str | Path | None = None, watch: Watch | None = None) -> Report:
        """Train on this computer's cards until the job is done; failed ranks are replaced on the way.

        Args:
            folder: where the run lives; by default `runs/NAME`, with a number behind it where that is taken.
            watch: told each event and the state after it.

        Raises:
            SupernodeError: job, model or data is wrong, or the machine cannot run it; what began can be resumed.
            MachineError: this is not the machine of `discover`, so it can be planned and simulated only.
        """
        from supernode.control.training import start

        return start(self.pool, as_job(job), folder=folder, watch=watch)

    def resume(
        self, run: str | Path, *, checkpoint: str = "", overrides: Mapping[str, Any] | None = None,
        cards: int | None = None, watch: Watch | None = None,
    ) -> Report:  # fmt: skip
        """Go on with a run from its newest whole checkpoint, on the cards that this machine has.

        Args:
            run: its folder.
            checkpoint: name of an older checkpoint to go on from; newer ones are renamed `aside-…`.
            overrides: changed keys of the job by dotted name, such as {"parallelism.data": 1}; they stay changed.
            cards: how many to go on with, this time; degrees are then fitted to them.
        """
        from supernode.control.training import resume

        return resume(self.pool, run, checkpoint=checkpoint, overrides=overrides or {}, cards=cards, watch=watch)

    @staticmethod
    def status(run: str | Path) -> RunState:
        """Return how a run stands; its controller may be at work, done or dead."""
        from supernode.control.training import status

        return status(run)

    @staticmethod
    def report(run: str | Path) -> Report:
        """Write `report.html` and `report.json` into a run's folder and return what they say."""
        from supernode.control.training import write_report

        return write_report(run)

    def __repr__(self) -> str:
        return f"SuperNode({self.machine.name}: {self.machine.card_count} × {self.machine.card.name})"


def as_job(job: Job) -> JobSpec:
    """Return the job that a value, a mapping or a file describes.

    Relative paths start at the file's folder, those of a value or a mapping where this process is now: a later resume
    may be elsewhere.
    """
    from supernode.advice.question import refuse_model_name
    from supernode.intake.jobfile import anchored, job_from, load_job

    if isinstance(job, JobSpec):
        # Python checks no kinds: a value made by hand is read as a mapping is.
        return anchored(job_from(asdict(job)), Path.cwd())
    if isinstance(job, Mapping):
        return anchored(job_from(job), Path.cwd())
    if isinstance(job, (str, Path)):
        if not Path(job).exists():
            refuse_model_name(str(job))
        return load_job(Path(job))
    raise SpecError(
        f"a job is a file, a mapping or a JobSpec, not a {type(job).__name__}", hint="see `supernode plan --help`."
    )
