"""A training run from accepted job to report: prepare, drive, sum up; and the same again after a stop."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supernode.backends.fork_client import ForkServer
from supernode.backends.local import LocalBackend
from supernode.control import runs
from supernode.control.cards import cards_to_train_on, fitting, held
from supernode.control.drive import check_in, drive, others_in
from supernode.control.journal import Journal
from supernode.control.signals import interrupts, signals_as_ctrl_c
from supernode.control.trace import trace_of
from supernode.data.corpus import Corpus, open_corpus, prepare
from supernode.errors import (
    BY_NAME,
    CheckpointError,
    DataError,
    MachineError,
    ModelError,
    RunError,
    SpecError,
    SupernodeError,
)
from supernode.files import write_whole
from supernode.foreign.match import check_weights
from supernode.intake.jobfile import job_from, job_to_dict, overridden
from supernode.pages.report import make_report, report_html, report_json
from supernode.planning.layout import fit_layout, resolve_layout
from supernode.planning.planner import make_plan
from supernode.planning.rebalance import judge
from supernode.scheduling.controller import Controller
from supernode.scheduling.recovery import Fit
from supernode.schema.event import Ended, Event, Started
from supernode.schema.job import JobSpec
from supernode.schema.plan import Layout
from supernode.schema.report import Report, RunState
from supernode.schema.trace import ModelTrace
from supernode.storing.saves import Saves, saves_of, step_of

if TYPE_CHECKING:
    from supernode.hardware.machine import Machine
    from supernode.scheduling.pool import Pool

Watch = Callable[[Event, RunState], None]
LOCAL = "local"
"""Name of the machine that `discover` describes: this computer."""
RANKS_PER_CORE = 32  # each takes about 25 MB and a turn on the core; far beyond, nothing else on the computer moves
CHANGEABLE = (
    "parallelism.", "balance.", "communication.algorithm", "communication.bucket", "gradient_accumulation",
    "checkpoint.", "recovery.", "evaluate.", "sample.", "drill.", "rendezvous", "threads", "steps",
    "optimizer.most_skips",
)  # fmt: skip
"""Keys that a resumed run may have otherwise; the others would make it another run."""


def start(
    pool: Pool, job: JobSpec, *, folder: str | Path | None = None, watch: Watch | None = None,
    server: ForkServer | None = None, progress: Callable[[str, float], None] | None = None,
    placed: Callable[[Path], None] | None = None,
) -> Report:  # fmt: skip
    """Run a job to its end on this computer.

    Args:
        pool: the cards of this computer; those of the run are taken from it meanwhile.
        server: a fork server started earlier; it is ended with the run.
        progress: told what is being prepared and how much of it is done, 0 to 1.
        placed: told the folder once it is made.
    """
    with _serving(server), signals_as_ctrl_c():
        _check_computer(job, pool.machine)
        spares = job.recovery.spares
        # Before anything is written.
        layout = resolve_layout(job, cards_to_train_on(job, pool.machine.card_count))
        _check_crowd(layout.ranks)
        _check_drill(job, layout)
        check_weights(job)
        with held(pool, layout.ranks, spares) as (cards, others):
            trace = _trace_to_cut(job, len(cards))
            make_plan(job, pool.machine, cards, trace=trace)
            run = runs.create(Path(folder) if folder is not None else runs.next_free(job.name), job)
            try:
                if placed is not None:
                    placed(run.path)
                corpus = None if job.data.dataset else prepare(job, run.path / runs.DATA, progress=progress)
                plan = make_plan(job, pool.machine, cards, vocabulary=corpus.vocabulary if corpus else 0, trace=trace)
                plan = replace(plan, trace=None)  # Ranks need the cut alone.
                check_weights(job, vocabulary=plan.vocabulary)
                return _drive(
                    run, Started(plan=plan, spares=others), corpus, None, fit=fitting(pool.machine, trace),
                    machine=pool.machine, watch=watch, server=server,
                )  # fmt: skip
            except BaseException:  # Ctrl-C too
                run.forget_unstarted()
                raise
            finally:
                run.release()


def resume(
    pool: Pool, folder: str | Path, *, overrides: Mapping[str, Any], checkpoint: str = "",
    cards: int | None = None, watch: Watch | None = None, server: ForkServer | None = None,
) -> Report:  # fmt: skip
    """Go on with a run.

    Args:
        pool: as for `start`.
        overrides: changed keys by dotted name. They stay for later resumes, as if the job had been written so.
        cards: how many to go on with; the layout is then fitted to them, this time only.
    """
    with _serving(server), signals_as_ctrl_c():
        run = runs.find(Path(folder)).hold()
        try:
            job = asked = changed(run.job(), overrides)
            _check_computer(job, pool.machine)
            corpus = None if job.data.dataset else _own_corpus(run, job)
            state = run.state()
            if state.outcome == "finished" and state.step >= job.steps:
                raise RunError(
                    f"the run in {run.path} is finished: {state.step} of {job.steps} steps are done",
                    hint="see `supernode report`, or train on with `--set steps=N`.",
                )
            saves = saves_of(job.checkpoint, run.checkpoints)
            runs.claim(run, saves)
            if step_of(checkpoint) >= 0:
                saves.verify(checkpoint)
            found = runs.checkpoints_to_go_on_from(saves, state, wanted=checkpoint)
            if state.checkpoints and not found:
                raise CheckpointError(
                    f"every checkpoint is gone from {run.checkpoints}; the newest was {state.checkpoints[-1][1]}",
                    hint="put the folder back as it was, or start a new run.",
                )
            if found and not checkpoint:
                _explain_damage(saves, found)
            if cards is not None:
                job = fit_layout(job, cards)
            layout = resolve_layout(job, cards_to_train_on(job, pool.machine.card_count) if cards is None else cards)
            _check_crowd(layout.ranks)
            if not state.drilled:
                _check_drill(job, layout)
            with held(pool, layout.ranks, job.recovery.spares) as (chosen, others):
                trace = _trace_to_cut(job, len(chosen))
                plan = make_plan(
                    job, pool.machine, chosen, vocabulary=corpus.vocabulary if corpus else 0, trace=trace
                )  # fmt: skip
                plan = replace(plan, trace=None)
                # Nothing refuses to go on any more.
                if overrides:
                    run.write_job(asked)
                if checkpoint:
                    runs.set_newer_aside(saves, checkpoint)
                return _drive(
                    run, Started(plan=plan, checkpoints=found, spares=others), corpus, state,
                    fit=fitting(pool.machine, trace), machine=pool.machine, watch=watch, server=server,
                )  # fmt: skip
        finally:
            run.release()


def _trace_to_cut(job: JobSpec, cards: int) -> ModelTrace | None:
    """Return the trace of the user's own module where it is cut into stages; else nothing waits for one.

    A module that cannot be traced is cut by its parameters, and one that cannot be cut is told of by the ranks.
    """
    stages = job.parallelism.pipeline * job.parallelism.interleave
    if stages == 1:
        return None
    try:
        found = trace_of(job, cards)
    except (ModelError, DataError):
        return None
    return found if found is not None and found.blocks >= stages else None


def status(folder: str | Path) -> RunState:
    """Return how a run stands; a run whose controller is dead is `lost`."""
    run = runs.find(Path(folder))
    state = run.state()
    if state.outcome == "running" and not run.is_held:
        return replace(state, outcome="lost", message="its controller is gone", hint="`supernode resume` goes on.")
    return state


def write_report(folder: str | Path) -> Report:
    """Write a run's report beside its journal; returns it."""
    run = runs.find(Path(folder))
    state = status(run.path)
    report = replace(make_report(state), folder=str(run.path))
    for name, text in (("report.html", report_html(report, state)), ("report.json", json.dumps(report_json(report)))):
        try:
            write_whole(run.path / name, text)
        except OSError as error:
            raise MachineError(
                f"{run.path / name} cannot be written: {error.strerror}",
                hint="free some space on its disk, or see to its permissions, then `supernode report`.",
            ) from error
    return report


def _drive(
    run: runs.RunFolder, started: Started, corpus: Corpus | None, state: RunState | None, *, fit: Fit,
    machine: Machine, watch: Watch | None, server: ForkServer | None,
) -> Report:  # fmt: skip
    plan = started.plan
    saves = saves_of(plan.job.checkpoint, run.checkpoints)
    runs.claim(run, saves)
    journal = Journal(run.path / runs.JOURNAL)
    run.keep()
    said = plan.job.recovery
    backend = LocalBackend(run.path, silence=said.silence, frozen=said.frozen, server=server)
    controller = Controller(state, judge=partial(judge, machine=machine), fit=fit)
    try:
        with interrupts() as asked:
            ended = drive(
                started, controller=controller, backend=backend,
                record=journal, check=check_in(saves), others=others_in(saves), watch=watch,
                asked=asked,
            )  # fmt: skip
    except SupernodeError as error:
        ended = Ended(outcome="failed", message=error.message, hint=error.hint, kind=type(error).__name__)
        with suppress(SupernodeError):  # Where the journal itself is what failed, the error tells it all.
            journal.append(ended, backend.now())
        raise
    finally:
        backend.close()
        journal.close()
        saves.sweep()
    if ended.outcome == "failed":
        with suppress(MachineError, RunError):  # Why the run failed matters more.
            write_report(run.path)
        raise BY_NAME.get(ended.kind, RunError)(ended.message, hint=ended.hint)
    if not journal.path.exists():
        raise RunError(
            f"the run {ended.outcome}, and its journal {journal.path} was removed meanwhile: there is no report",
            hint=f"its checkpoints are in {run.checkpoints}; let nothing be removed from the folder of a run.",
        )
    return write_report(run.path)


def _own_corpus(run: runs.RunFolder, job: JobSpec) -> Corpus:
    """Return the tokens that the run has trained on: its own copy, whatever has become of their source since."""
    try:
        return open_corpus(run.path / runs.DATA)
    except DataError:
        return prepare(job, run.path / runs.DATA)


def _explain_damage(saves: Saves, found: tuple[tuple[int, str], ...]) -> None:
    """Check the newest checkpoint before a person goes on from it: whether to lose the steps since is theirs to say."""
    try:
        saves.verify(found[-1][1])
    except CheckpointError as error:
        older = found[-2][1] if len(found) > 1 else ""
        hint = (
            f"go on from an older one: `--checkpoint {older}`." if older else "there is no older one; start a new run."
        )
        raise CheckpointError(error.message, hint=hint) from error


@contextmanager
def _serving(server: ForkServer | None) -> Iterator[None]:
    """End a server that was started early whatever happens; ending it twice does nothing."""
    try:
        yield
    finally:
        if server is not None:
            server.close()


def _check_drill(job: JobSpec, layout: Layout) -> None:
    if (job.drill.kill_step or job.drill.slowness > 1 or job.drill.flip_step) and job.drill.rank >= layout.ranks:
        raise SpecError(
            f"`drill.rank` is {job.drill.rank}, and the layout has {layout.ranks} ranks",
            hint=f"choose 0 to {layout.ranks - 1}, or leave `drill` out.",
        )


def _check_crowd(ranks: int) -> None:
    cores = len(os.sched_getaffinity(0))
    if ranks > cores * RANKS_PER_CORE:
        raise MachineError(
            f"{ranks} ranks are too many for {cores} cores of this computer",
            hint=f"use at most {cores * RANKS_PER_CORE}: lower `parallelism` or `--cards`.",
        )


def _check_computer(job: JobSpec, machine: Machine) -> None:
    if machine.name != LOCAL:
        raise MachineError(
            f"training runs on this computer, and {machine.name} is another machine: it can be planned and simulated",
            hint="run on `SuperNode.discover()`, which describes this computer.",
        )
    if importlib.util.find_spec("torch") is None:
        raise MachineError(
            "torch is not installed, and training needs it",
            hint="install it with `pip install 'supernode-sdk[train]'`.",
        )
    if job.rendezvous:
        host, _, port = job.rendezvous.rpartition(":")
        try:
            with socket.create_server((host, int(port)), reuse_port=False):
                pass
        except OSError as error:
            raise MachineError(
                f"`rendezvous` {job.rendezvous} cannot be used: {error.strerror}",
                hint="choose a free port, or leave `rendezvous` out to meet through a file.",
            ) from error


def changed(job: JobSpec, overrides: Mapping[str, Any]) -> JobSpec:
    """Return the job of a run that has begun after values by dotted key are put into it.

    Raises:
        SpecError: a key or a value is wrong, or cannot change any more.
    """
    if not overrides:
        return job
    plain = job_to_dict(job)
    for key in overrides:
        if not key.startswith(CHANGEABLE):
            raise SpecError(
                f"`{key}` cannot change in a run that has begun",
                hint=f"these can: {', '.join(CHANGEABLE)}; or start a new run.",
            )
    return job_from(overridden(plain, overrides))
