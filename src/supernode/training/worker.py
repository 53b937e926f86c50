"""A rank's life: meet the others, build, load, step after step, save, tell the controller, leave."""

from __future__ import annotations

import json
import re
import socket
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from supernode.checkpoint import state
from supernode.checkpoint.source import OnDisk
from supernode.data.bigram import bigram_loss
from supernode.data.corpus import Corpus, open_corpus
from supernode.errors import SupernodeError
from supernode.foreign.begin import begin_from
from supernode.parallel.assemble import assemble
from supernode.parallel.graphs import loss_of
from supernode.parallel.mesh import Place, meet
from supernode.parallel.usercode import blame
from supernode.passes.logical import wholes
from supernode.schema.plan import WAYS, Plan
from supernode.storing.saves import name_of, saves_of
from supernode.training.data import Feed, open_feed, trial_of
from supernode.training.notes import notes_of_all
from supernode.training.optimizer import optimizer_for
from supernode.training.saving import describe_data, make_manifest, restore, tensors
from supernode.training.step import Stepper
from supernode.training.writing import write_sample
from supernode.units import show_bytes
from supernode.ways.hosts import PEER_GONE

_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|bad_alloc", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a rank is told when it starts.

    Attributes:
        folder: of the run.
        meeting: empty folder where this incarnation's ranks meet.
        checkpoint: name of the checkpoint to go on from; empty from the start. Its bytes are verified.
    """

    rank: int
    incarnation: int
    plan: Plan
    folder: Path
    meeting: Path
    checkpoint: str
    threads: int


class Channel:
    """The line to the controller: one JSON object a line, both ways. A controller that is gone ends the rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(True)

    def send(self, kind: str, **values: Any) -> None:
        """Say something; blocks while the controller is slow to listen."""
        try:
            self._connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")
        except OSError:
            sys.exit(0)  # Nobody is left to report to, and nobody may go on unseen.

    def asked_to_stop(self) -> bool:
        """Tell whether the controller asked to save and leave; does not wait."""
        self._connection.setblocking(False)
        try:
            return bool(self._connection.recv(4096))
        except BlockingIOError:
            return False
        finally:
            self._connection.setblocking(True)


def live(assignment: Assignment, channel: Channel) -> int:
    """Live one rank's life; returns its exit code. Every error is told to the controller before it ends the rank."""
    torch.set_num_threads(assignment.threads)
    try:
        _train(assignment, channel)
    except SupernodeError as error:
        channel.send("failed", error=type(error).__name__, message=error.message, hint=error.hint)
        return error.exit_code
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the last place where it can be told
        traceback.print_exc()
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].split(' This is typically')[0]}"
        job = assignment.plan.job
        theirs = blame(error, (job.module, job.data.dataset, job.data.held_out_dataset, job.data.loss))
        if theirs and not PEER_GONE.search(theirs):
            channel.send("failed", error="ModelError", message=f"your code raised {theirs}", hint="correct that line.")
        elif (short := _no_memory(error)) is not None:
            channel.send("failed", error="CapacityError", **_out_of_memory(assignment, str(short)))
        elif isinstance(error, (dist.DistBackendError, dist.DistNetworkError, ConnectionError)) or (
            isinstance(error, RuntimeError) and PEER_GONE.search(str(error))
        ):
            channel.send("peer_lost", message=text)
        else:
            channel.send(
                "failed", error="RunError", message=f"rank {assignment.rank} stopped: {text}",
                hint=f"see {assignment.folder}/logs/rank-{assignment.rank}.log for where.",
            )  # fmt: skip
        return 1
    return 0


def _no_memory(error: BaseException | None) -> BaseException | None:
    """Return what says that memory is at its end: the error or, the pipeline's runtime wrapping it, a cause of it."""
    while error is not None and not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
        error = error.__cause__
    return error


def _out_of_memory(assignment: Assignment, text: str) -> dict[str, str]:
    """Return the message and the first remedy that costs least speed."""
    plan, layout = assignment.plan, assignment.plan.layout
    asked = re.search(r"allocate (\d+) bytes", text)
    more = f", when it asked for {show_bytes(int(asked[1]))} more" if asked else ""
    is_text = not plan.job.data.dataset
    size = f"{plan.micro_batch} × {plan.job.data.sequence // layout.context} tokens" if is_text else (
        f"{plan.micro_batch} samples"
    )  # fmt: skip
    if plan.micro_batch > 1:
        remedy = f"set `gradient_accumulation` to {2 * plan.job.gradient_accumulation}"
    elif layout.recompute != "full":
        remedy = "set `parallelism.recompute` to full"
    elif plan.job.shape is not None:
        remedy = f"set `parallelism.context` to {2 * layout.context}"
    else:
        remedy = "set `parallelism.pipeline` higher"
    return {
        "message": f"rank {assignment.rank} has no memory left for a micro-batch of {size}{more}",
        "hint": f"{remedy}, or give ranks more memory (`ulimit -d` says what a process may have).",
    }


def _train(assignment: Assignment, channel: Channel) -> None:
    begun = time.perf_counter()
    plan, job = assignment.plan, assignment.plan.job
    place = meet(
        plan.layout, assignment.rank, folder=assignment.meeting, rendezvous=job.rendezvous, silence=job.recovery.silence
    )
    channel.send("met")
    corpus = None if job.data.dataset else open_corpus(assignment.folder / "data", verify=False)
    feed = open_feed(plan, corpus, place.data, place.context)
    parts = assemble(plan, place, trial_of(feed))
    if job.weights and not assignment.checkpoint:
        parts.notes["weights"] = begin_from(Path(job.weights), plan, parts, place).text()
    for name, value in parts.notes.items() if place.rank == 0 else ():
        channel.send("note", name=name, value=value)
    optimizer = optimizer_for(job, {name: p for name, p in parts.parameters() if p.requires_grad})
    loss = loss_of(plan, place, parts.divided, feed.loss)
    stepper = Stepper(plan, place, parts, feed, optimizer, loss)
    step = 0
    if assignment.checkpoint:
        source = OnDisk(saves_of(job.checkpoint, assignment.folder / "checkpoints"), assignment.checkpoint)
        expected = make_manifest(plan, source.manifest.step, feed.sampler, describe_data(corpus, feed.sampler))
        restore(parts, optimizer, place, source, source.manifest, expected)
        stepper.sending.restore(source)
        step = source.manifest.step
    if place.rank == 0 and (ways := stepper.sending.meetings.note()):
        channel.send("note", name=WAYS, value=ways)
        channel.send("note", name="how gradients meet", value=stepper.sending.meetings.text())
    dist.barrier()
    channel.send("ready", seconds=time.perf_counter() - begun)
    _Run(assignment, channel, place, stepper, corpus).go(step)


class _Run:
    """The loop over steps, and what happens between them."""

    def __init__(
        self, assignment: Assignment, channel: Channel, place: Place, stepper: Stepper, corpus: Corpus | None
    ) -> None:
        self.assignment, self.channel, self.place, self.stepper, self.corpus = (
            assignment, channel, place, stepper, corpus,
        )  # fmt: skip
        self.plan, self.job = assignment.plan, assignment.plan.job
        self.saves = saves_of(self.job.checkpoint, assignment.folder / "checkpoints")
        self.is_first = place.rank == 0
        self._busy: list[tuple[float, ...]] = []

    def go(self, step: int) -> None:
        """Take the steps that are left."""
        stopping, begun_at = False, step
        while step < self.job.steps and not stopping:
            begun = time.perf_counter()
            asked = self.is_first and self.channel.asked_to_stop()
            outcome = self.stepper.train(step, stop=asked)
            step += 1
            stopping = outcome.stop
            if self.is_first:
                self.channel.send(
                    "step", step=step, loss=outcome.loss, seconds=time.perf_counter() - begun,
                    tokens=self._tokens(step - 1), norm=outcome.norm, rate=outcome.rate, parts=outcome.parts,
                    skipped=outcome.skipped,
                )  # fmt: skip
            else:
                self.channel.send("beat", step=step)
            for name, value in notes_of_all(self.stepper).items() if begun_at == step - 1 else ():
                self.channel.send("note", name=name, value=value)
            self._look(step, outcome.busy)
            last = step == self.job.steps
            every = self.job.evaluate.every
            if last or (every and step % every == 0):
                self._evaluate(step)
            if last or stopping or step % self.job.checkpoint.every == 0:
                self._save(step)
        dist.destroy_process_group()
        if self.is_first and step == self.job.steps and self.corpus is not None:
            try:
                self._sum_up(step, self.corpus)
            except (SupernodeError, OSError) as error:  # The training is done and saved, whatever becomes of this.
                self.channel.send("note", name="not summed up", value=str(error))
        self.channel.send("done", step=step)

    def _look(self, step: int, busy: tuple[float, ...]) -> None:
        """Tell the controller now and then how long the ranks' passes take."""
        if not self.is_first or not busy:
            return
        self._busy.append(busy)
        if len(self._busy) == self.job.balance.every:
            self.channel.send(
                "timed", step=step, busy=[statistics.median(own) for own in zip(*self._busy, strict=True)]
            )
            self._busy.clear()

    def _sum_up(self, step: int, corpus: Corpus) -> None:
        """Tell what the model is to be held against, on the very text that it was tried on, and let it write some."""
        windows = min(self.stepper.feed.evaluation_batches * self.job.batch, self._held_out_windows(corpus))
        self.channel.send("note", name="bigram_loss", value=bigram_loss(corpus, tokens=windows * self._sequence + 1))
        if self.job.sample.tokens and self.job.shape is not None:
            source = OnDisk(self.saves, name_of(step))
            text = write_sample(self.plan, corpus, source, beat=lambda: self.channel.send("beat", step=step))
            self.channel.send("note", name="sample", value=text)

    @property
    def _sequence(self) -> int:
        return self.job.data.sequence

    def _held_out_windows(self, corpus: Corpus) -> int:
        return (corpus.held_out_tokens - 1) // self._sequence

    def _tokens(self, step: int) -> int:
        samples = len(self.stepper.feed.sampler.indices(step))
        return samples * (1 if self.job.data.dataset else self.job.data.sequence)

    def _evaluate(self, step: int) -> None:
        if not self.stepper.feed.evaluation_batches:
            return
        begun = time.perf_counter()
        loss = self.stepper.evaluate(beat=lambda: self.channel.send("beat", step=step))
        if self.is_first:
            self.channel.send("evaluated", step=step, loss=loss, seconds=time.perf_counter() - begun)

    def _save(self, step: int) -> None:
        begun = time.perf_counter()
        feed: Feed = self.stepper.feed
        self.channel.send("beat", step=step)
        manifest = make_manifest(self.plan, step, feed.sampler, describe_data(self.corpus, feed.sampler))
        held = tensors(self.stepper.parts, self.stepper.optimizer, self.place.data) | self.stepper.sending.state()
        held = wholes(held, self.stepper.parts, self.place)
        nbytes = state.save(held, self.saves, manifest)
        if self.is_first:
            self.saves.prune(keep=self.job.checkpoint.keep, newest=step)
            self.channel.send(
                "saved", step=step, checkpoint=name_of(step), nbytes=nbytes, seconds=time.perf_counter() - begun
            )
