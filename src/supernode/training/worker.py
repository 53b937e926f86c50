"""A rank's life: meet the others, build, load, step after step, save, tell the controller, leave."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from supernode.checkpoint.snapshot import CHANGED, InMemory, Snapshots
from supernode.checkpoint.source import OnDisk
from supernode.data.bigram import bigram_loss
from supernode.data.corpus import Corpus, open_corpus
from supernode.errors import CheckpointError, SupernodeError
from supernode.foreign.begin import begin_from
from supernode.keeping.client import Keep
from supernode.keeping.slots import NOTHING
from supernode.parallel.assemble import assemble
from supernode.parallel.freeing import Freeing
from supernode.parallel.graphs import loss_of
from supernode.parallel.mesh import Place, meet
from supernode.passes.logical import wholes
from supernode.schema import plain
from supernode.schema.plan import WAYS, Plan
from supernode.storing.saves import name_of, saves_of
from supernode.training.channel import Channel
from supernode.training.checking import Comparison, flip_a_bit
from supernode.training.data import Feed, open_feed, trial_of
from supernode.training.notes import notes_of_all
from supernode.training.optimizer import optimizer_for
from supernode.training.pacing import Pace
from supernode.training.saving import describe_data, make_manifest, restore, tensors
from supernode.training.step import Stepper
from supernode.training.telling import MemoryLostError, tell
from supernode.training.writing import write_sample

_DUE = float(2**44)
"""Added to what ranks sum by the one that decides, to have all save after the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a rank is told when it starts.

    Attributes:
        folder: of the run.
        meeting: empty folder where this incarnation's ranks meet.
        checkpoint: name of the checkpoint to go on from; empty from the start.
        memory: step to go on from instead, whose state the nodes have in memory; -1 for none.
    """

    rank: int
    incarnation: int
    plan: Plan
    folder: Path
    meeting: Path
    checkpoint: str
    threads: int
    memory: int = NOTHING


class _Again(Exception):  # noqa: N818 - not an error
    """The rank is to begin again."""


class _Diverged(Exception):  # noqa: N818 - the controller says what follows
    """Copies of this rank's part of the model differ; it must go no further with it."""


def live(assignment: Assignment, channel: Channel, keep: Keep) -> int:
    """Live one rank's life; returns its exit code. Every error is told to the controller before it ends the rank.

    A rank that loses the others waits for the word to begin again: what it has imported and opened stays as it is.
    """
    torch.set_num_threads(assignment.threads)
    while (code := _try(assignment, channel, keep)) is None:
        told = channel.renewed(wait=True)
        if told is None:
            return 1
        _let_go()
        assignment = replace(
            assignment, incarnation=told["incarnation"], plan=plain.read(Plan, told["plan"]),
            meeting=Path(told["meeting"]), checkpoint=told["checkpoint"], memory=told["memory"],
            threads=told["threads"],
        )  # fmt: skip
        torch.set_num_threads(assignment.threads)
        keep = channel.keep or keep
        if (line := channel.new_keeper()) is not None:
            keep.close()
            channel.keep = keep = Keep(line, assignment.rank)
        channel.send("again")
    return code


def _let_go() -> None:
    """Let go of what the last incarnation met by, and of what it held."""
    with suppress(Exception):  # It may be in any state: it was aborted, or half of it never came to be.
        dist.destroy_process_group()
    gc.collect()


def _try(assignment: Assignment, channel: Channel, keep: Keep) -> int | None:
    """Train in one incarnation; returns the rank's exit code, or None where it is to begin again."""
    try:
        _train(assignment, channel, keep)
    except (KeyboardInterrupt, SystemExit):
        raise
    except _Diverged:
        return None
    except BaseException as error:  # noqa: BLE001 - the last place where it can be told
        return (
            None
            if channel.again is not None
            else tell(error, assignment.plan, assignment.rank, assignment.folder, channel)
        )
    return 0


def _train(assignment: Assignment, channel: Channel, keep: Keep) -> None:
    begun = time.perf_counter()
    plan, job = assignment.plan, assignment.plan.job
    freeing = Freeing()
    channel.free = freeing.free
    place = meet(
        plan.layout, assignment.rank, folder=assignment.meeting, rendezvous=job.rendezvous, silence=job.recovery.silence
    )
    channel.send("met")
    corpus = None if job.data.dataset else open_corpus(assignment.folder / "data", verify=False)
    feed = open_feed(plan, corpus, place.data, place.context)
    parts = assemble(plan, place, trial_of(feed))
    if job.weights and not assignment.checkpoint and assignment.memory == NOTHING:
        parts.notes["weights"] = begin_from(Path(job.weights), plan, parts, place).text()
    for name, value in parts.notes.items() if place.rank == 0 else ():
        channel.send("note", name=name, value=value)
    optimizer = optimizer_for(job, {name: p for name, p in parts.parameters() if p.requires_grad})
    loss = loss_of(plan, place, parts.divided, feed.loss)
    stepper = Stepper(plan, place, parts, feed, optimizer, loss)
    step = 0
    if assignment.memory != NOTHING:
        step = assignment.memory
        try:
            kept = InMemory(keep, step)
        except CheckpointError as error:
            raise MemoryLostError(error.message, hint=error.hint) from error
        expected = make_manifest(plan, step, feed.sampler, describe_data(corpus, feed.sampler))
        try:
            restore(parts, optimizer, place, kept, expected, expected)
            stepper.sending.restore(kept)
        except CheckpointError as error:
            raise MemoryLostError(error.message, hint=error.hint) from error
        del kept  # It maps the memory of other nodes' state.
    elif assignment.checkpoint:
        source = OnDisk(saves_of(job.checkpoint, assignment.folder / "checkpoints"), assignment.checkpoint)
        expected = make_manifest(plan, source.manifest.step, feed.sampler, describe_data(corpus, feed.sampler))
        restore(parts, optimizer, place, source, source.manifest, expected)
        stepper.sending.restore(source)
        step = source.manifest.step
    if place.rank == 0 and (ways := stepper.sending.meetings.note()):
        channel.send("note", name=WAYS, value=ways)
        channel.send("note", name="how gradients meet", value=stepper.sending.meetings.text())
    freeing.learn()
    channel.send("ready", seconds=time.perf_counter() - begun)
    run = _Run(assignment, channel, place, stepper, corpus, keep)
    try:
        run.go(step)
    finally:
        run.snapshots.close()


class _Run:
    """The loop over steps, and what happens between them."""

    def __init__(
        self, assignment: Assignment, channel: Channel, place: Place, stepper: Stepper, corpus: Corpus | None,
        keep: Keep,
    ) -> None:  # fmt: skip
        self.assignment, self.channel, self.place, self.stepper, self.corpus = (
            assignment, channel, place, stepper, corpus,
        )  # fmt: skip
        self.plan, self.job = assignment.plan, assignment.plan.job
        self.saves = saves_of(self.job.checkpoint, assignment.folder / "checkpoints")
        self.is_first = place.rank == 0
        self._busy: list[tuple[float, ...]] = []
        self.snapshots = Snapshots(
            keep, wait=self.job.optimizer.in_backward, restored=assignment.memory, attempt=assignment.incarnation
        )
        stepper.before_update = self._before_update
        self._due = False, False
        self._pace: Pace | None = None
        self._is_announced = False
        self._begun: tuple[int, float, float] | None = None
        self.comparison = Comparison(stepper.parts, stepper.optimizer, place)
        if self.job.recovery.check_every and not self.comparison.is_needed and self.is_first:
            self.channel.send("note", name="copies compared", value="none: no part of the model has two copies")

    def go(self, step: int) -> None:
        """Take the steps that are left."""
        stopping, begun_at = False, step
        if not self.job.checkpoint.every and self.is_first:
            self._pace = Pace(between_failures=self.job.recovery.between_failures, step=step)
        while step < self.job.steps and not stopping:
            begun = time.perf_counter()
            if self.channel.again is not None:
                raise _Again
            asked = self.is_first and self.channel.stop
            self._at = step + 1
            is_due, to_disk = self._due = self._is_due(step + 1)
            outcome = self.stepper.train(step, stop=asked)
            step += 1
            stopping = outcome.stop
            self._is_announced = outcome.votes >= _DUE
            if self._pace is not None:
                self._pace.stepped(time.perf_counter() - begun)
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
            self._drill(step)
            last = step == self.job.steps
            every = self.job.evaluate.every
            if last or (every and step % every == 0):
                self._evaluate(step)
            if begun_at == step - 1:
                self.snapshots.prepare(self._held())
            checks = self.job.recovery.check_every
            if checks and (is_due or stopping or step % checks == 0):
                self._compare(step)
            if is_due or stopping:
                votes = outcome.votes % _DUE if is_due else CHANGED
                self._save(step, votes=votes, disk=to_disk or stopping, must=last or stopping)
        dist.destroy_process_group()
        if self.is_first and step == self.job.steps and self.corpus is not None:
            try:
                self._sum_up(step, self.corpus)
            except (SupernodeError, OSError) as error:  # The training is done and saved, whatever becomes of this.
                self.channel.send("note", name="not summed up", value=str(error))
        self.channel.send("done", step=step)

    def _drill(self, step: int) -> None:
        drill = self.job.drill
        if step == drill.flip_step and self.place.rank == drill.rank and self.assignment.incarnation == 1:
            flip_a_bit(self.stepper.parts)

    def _compare(self, step: int) -> None:
        """Compare copies; what is saved has been compared, so the newest checkpoint is one whose copies agreed."""
        found = self.comparison.look()
        if found is None:
            return
        if self.place.rank == found.among[0]:
            self.channel.send("diverged", step=step, ranks=found.ranks, what=found.text)
        raise _Diverged

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
        beat = lambda: self.channel.send("beat", step=step)  # noqa: E731
        saved = self.snapshots.keep.await_saved(step, beat=beat, limit=self.job.recovery.silence)
        if self.job.sample.tokens and self.job.shape is not None and saved:
            source = OnDisk(self.saves, name_of(step))
            text = write_sample(self.plan, corpus, source, beat=beat)
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

    def _save(self, step: int, *, votes: float, disk: bool, must: bool) -> None:
        """Begin to save; what is left of it is done before the next update.

        Args:
            votes: of all ranks, as `Snapshots.begin` takes them.
            must: wait for room, and until the state is handed over: the rank leaves after this step.
        """
        begun = self.snapshots.begin(
            step, self._held(), votes=votes, disk=disk, limit=self.job.recovery.silence if must else 0.0,
            beat=lambda: self._wait_on(step),
        )  # fmt: skip
        if not begun and self.is_first and disk:
            self.channel.send("unsaved", step=step)
        if must or self.job.optimizer.in_backward:
            self._handed_over()

    def _renew_keep(self) -> None:
        """Take up the line to a new keeper, if there is one."""
        if (line := self.channel.new_keeper()) is not None:
            self.snapshots.keep.close()
            # The next launch in this process goes on with it, too.
            self.channel.keep = self.snapshots.keep = Keep(line, self.place.rank)

    def _wait_on(self, step: int) -> None:
        self.channel.send("beat", step=step)
        self._renew_keep()

    def _before_update(self) -> float:
        self._handed_over()
        announced = _DUE if self._pace is not None and self._is_next_due(self._pace) else 0.0
        if not self._due[0]:
            return announced
        self._renew_keep()
        return announced + self.snapshots.votes()

    def _is_next_due(self, pace: Pace) -> bool:
        """Tell whether all are to save after the next step, on what the last save was seen to cost."""
        keep = self.snapshots.keep
        keep.hear()
        if self._begun is not None and keep.saved >= self._begun[0]:
            _, stall, begun = self._begun
            pace.saved(stall=stall, took=time.monotonic() - begun)
            self._begun = None
        return pace.is_due(self._at + 1)

    def _held(self) -> dict[str, Tensor]:
        held = tensors(self.stepper.parts, self.stepper.optimizer, self.place.data) | self.stepper.sending.state()
        return wholes(held, self.stepper.parts, self.place)

    def _is_due(self, step: int) -> tuple[bool, bool]:
        """Tell whether the state after a step is to be kept, and whether on disk, too."""
        said = self.job.checkpoint
        disk = step == self.job.steps or said.is_due(step) or self._is_announced
        return disk or bool(said.memory_every and step % said.memory_every == 0), disk

    def _handed_over(self) -> None:
        """Hand over what a save has begun to copy, if one has."""
        done = self.snapshots.finish()
        if done is None or not self.is_first:
            return
        step, disk, stall = done
        if disk:
            self._begun = step, stall, time.monotonic()
            feed: Feed = self.stepper.feed
            manifest = make_manifest(self.plan, step, feed.sampler, describe_data(self.corpus, feed.sampler))
            self.channel.send("saving", step=step, manifest=asdict(manifest), stall=stall)
