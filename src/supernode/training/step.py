"""One optimizer step on one rank: micro-batches through the stages, gradients met, scaled once, clipped, applied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from supernode.axes.sequence import TokenSync
from supernode.errors import ModelError, RunError
from supernode.parallel.assemble import Parts
from supernode.parallel.chance import seed_for, seed_generators
from supernode.parallel.mesh import Place
from supernode.parallel.mixture import is_spread
from supernode.parallel.tensor import local
from supernode.passes.pace import PassClock
from supernode.passes.sync import TieSync, copies
from supernode.precision.optimizer import LowPrecision
from supernode.schema.plan import Plan
from supernode.syncing.buckets import ReplicaSync, all_reduce, settle
from supernode.syncing.shards import ShardSync
from supernode.training.data import Batch, Feed
from supernode.training.early import EarlyUpdates
from supernode.training.optimizer import learning_rate, set_rate
from supernode.training.sending import Sending

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step came to, the same on every rank.

    Attributes:
        loss: mean over the positions that count.
        norm: of the whole gradient, before clipping.
        rate: learning rate.
        parts: seconds by part on this rank.
        stop: a rank was asked to stop after this step.
        busy: seconds of each rank's passes; empty where nobody asks for them.
        votes: sum over ranks of what `Stepper.before_update` returned.
        skipped: float16 overflowed, so nothing was updated.
    """

    loss: float
    norm: float
    rate: float
    parts: dict[str, float]
    stop: bool
    busy: tuple[float, ...] = ()
    votes: float = 0.0
    skipped: bool = False


class Stepper:
    """Runs steps on one rank. All scaling of losses and gradients happens here, in `_meet`.

    Args:
        loss: (output, target) to the sum of the losses; used where the model's end is.
    """

    def __init__(
        self, plan: Plan, place: Place, parts: Parts, feed: Feed, optimizer: torch.optim.Optimizer, loss: Loss
    ) -> None:
        self.scaling = optimizer.scaling if isinstance(optimizer, LowPrecision) else None
        loss = self.scaling.scaled(loss) if self.scaling is not None else loss
        self.plan, self.place, self.parts, self.feed, self.optimizer, self.loss = (
            plan, place, parts, feed, optimizer, loss,
        )  # fmt: skip
        self.trained = [parameter for _, parameter in parts.parameters() if parameter.requires_grad]
        held = copies(parts, place)
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._idle: set[nn.Parameter] = set()
        self._by_copies: dict[int, list[nn.Parameter]] = {}
        for parameter in self.trained:
            self._by_copies.setdefault(held[parameter], []).append(parameter)
        self.tokens = TokenSync(self.trained if place.layout.sequence else (), place.group("tensor"))
        self.ties = TieSync(parts, place)
        self.sending = Sending(plan, place, parts)
        self.replicas: ReplicaSync | None = None
        self.experts: ReplicaSync | None = None
        layout = place.layout
        sums = layout.copies > 1 and layout.sharding == "replicas"
        if sums and not plan.job.optimizer.in_backward:
            said = plan.job.communication
            travels = [parameter for parameter in self.trained if not is_spread(parameter)]
            start, filled = self.sending.way(place.group("copies"), "copies")
            self.replicas = ReplicaSync(
                travels, self._uses(), place.group("copies"), start=start, filled=filled, bucket_bytes=said.bucket,
                overlap=said.overlap, near=self.sending.is_near,
            )  # fmt: skip
            if layout.expert > 1:  # A rank's experts have fewer copies than all else.
                start, filled = self.sending.way(place.group("expert_copies"), "experts")
                self.experts = ReplicaSync(
                    [parameter for parameter in self.trained if is_spread(parameter)], self._uses(),
                    place.group("expert_copies"), start=start, filled=filled, bucket_bytes=said.bucket,
                    overlap=said.overlap, near=self.sending.is_near,
                )  # fmt: skip
        self.sharded = [m for module in parts.modules for m in module.modules() if isinstance(m, FSDPModule)]
        self.shards = ShardSync(self.sharded, overlap=plan.job.communication.overlap)
        self.early: EarlyUpdates | None = None
        if plan.job.optimizer.in_backward:
            assert isinstance(optimizer, LowPrecision)
            # FSDP tells of a gradient once it has summed it, after the last micro-batch.
            self.early = EarlyUpdates(
                optimizer, self.trained, uses=dict.fromkeys(self.trained, 1) if self.sharded else self._uses(),
                held=held, late=(*self.tokens.parameters, *self.ties.parameters),
                start=all_reduce(place.group("copies")) if sums else None,
            )  # fmt: skip
        meets = layout.tensor > 1 or layout.context > 1 or layout.expert > 1 or bool(self.sharded)
        drill = plan.job.drill
        self.passes = PassClock(meets=meets, slowness=drill.slowness if place.rank == drill.rank else 1.0)
        self.schedule = _schedule(plan, place, parts, loss, self.passes) if layout.pipeline > 1 else None
        # One copy of each sample's loss: the last stage of one tensor rank.
        ends = any(stage.index == len(plan.stages) - 1 for stage, _ in parts.stages)
        self.before_update: Callable[[], float] = lambda: 0.0
        """Called in each step once its passes are over and before ranks meet, who then know the sum of what it returns;
        nothing is updated yet, unless `in_backward`."""
        self.judges = ends and place.tensor == 0
        self.ends = ends

    def _uses(self) -> dict[nn.Parameter, int]:
        uses = dict.fromkeys(self.trained, 0)
        for module in self.parts.modules:
            for parameter in module.parameters():
                if parameter in uses:
                    uses[parameter] += self.plan.share(self.place.data)
        return uses

    def train(self, step: int, *, stop: bool = False) -> Outcome:
        """Take one step, counted from 0.

        Raises:
            RunError: the loss or the gradient is not finite; the weights are as before the step, save with
                `optimizer.in_backward` (`training.early`).
        """
        clock = _Clock()
        batch = self.feed.training(step)
        # Dropout and the user's modules draw by step and place; tensor ranks that hold the same tokens draw alike.
        seed_generators(seed_for(self.plan.job.seed, "step", step, *self.place.tokens))
        rate = learning_rate(self.plan.job.optimizer, step, self.plan.job.steps)
        set_rate(self.optimizer, rate)
        clock.lap("data")
        if self.early is not None:
            self.early.begin(1.0 / self._positions(batch))
        elif self.replicas is not None:
            self.sending.begin(step, self.scaling)
            self.replicas.begin()
            if self.experts is not None:
                self.experts.begin()
        else:
            self.optimizer.zero_grad(set_to_none=True)
        self.shards.begin()
        self._norms.clear()
        loss = self._forward_backward(batch)
        clock.lap("compute", waited=self.shards.finish())
        if self.replicas is not None:
            # Norms of what has arrived are taken while the rest travels; only waiting counts as `sync`.
            waited = self.replicas.finish(self._measure)
            waited += self.experts.finish(self._measure) if self.experts is not None else 0.0
            clock.lap("compute", waited=waited)
        if self.early is not None:
            self.early.finish()
        for parameter in (*self.tokens(), *self.ties()):
            self._norms.pop(parameter, None)
        clock.lap("sync")
        if self.early is not None:
            self.early.rest()
            clock.lap("optimizer")
        votes = self.before_update()  # Before ranks meet: once they have, all of them are done with it.
        clock.lap("save")
        met = self._meet(loss, batch, step, stop=stop, votes=votes)
        clock.lap("wait")
        if self.early is None and not met.skipped:
            self.optimizer.step()
        clock.lap("optimizer")
        return replace(met, rate=rate, parts=clock.parts)

    def _positions(self, batch: Batch) -> float:
        """Return the positions that count on all ranks, before backward: what an update on the way must divide by."""
        counted = sum(self.feed.count(target) for target in batch.targets) if self.judges else 0
        positions = torch.tensor(float(counted), dtype=torch.float64)
        dist.all_reduce(positions)
        return max(float(positions), 1.0)

    def _forward_backward(self, batch: Batch) -> float:
        losses: list[Tensor] = []
        if self.schedule is not None:
            self._run_schedule(self.schedule.step, batch, losses)
        else:
            model = self.parts.modules[0]
            for micro, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
                last = micro == len(batch.inputs) - 1
                for module in self.sharded:
                    module.set_requires_gradient_sync(last, recurse=False)
                    module.set_is_last_backward(last)
                with self.passes():
                    value = self.loss(model(inputs), targets)
                    if not value.requires_grad:
                        raise ModelError(
                            "the loss does not depend on any parameter that trains",
                            hint="look in the model and in `data.loss` for `detach`, `no_grad`, `item` or integers.",
                        )
                    value.backward()
                losses.append(value.detach())
        return float(torch.stack([value.detach() for value in losses]).double().sum()) if losses else 0.0

    def _run_schedule(self, run: Callable[..., object], batch: Batch, losses: list[Tensor]) -> None:
        inputs = (torch.cat(batch.inputs),) if self.parts.stages[0][0].index == 0 else ()
        target = torch.cat(batch.targets) if self.ends else None
        run(*inputs, target=target, losses=losses if self.ends else None, return_outputs=False)

    def _meet(self, loss: float, batch: Batch, step: int, *, stop: bool, votes: float = 0.0) -> Outcome:
        """Learn the step's loss, positions and gradient norm from all ranks, then scale the gradients once."""
        counted = sum(self.feed.count(target) for target in batch.targets) if self.judges else 0
        looks = self.place.layout.ranks if self.plan.job.balance.every else 0
        mine = torch.zeros(5 + looks, dtype=torch.float64)
        own = [loss if self.judges else 0.0, counted, self._squares(), stop, votes]
        mine[:5] = torch.tensor(own, dtype=torch.float64)
        if looks:
            mine[5 + self.place.rank] = self.passes.take()
        dist.all_reduce(mine)
        total, positions, squares, stopping, voted, *busy = mine.tolist()
        positions = max(positions, 1.0)
        inflated = self.scaling.scale if self.scaling is not None else 1.0
        mean, norm = total / inflated / positions, math.sqrt(squares) / inflated / positions
        is_finite = math.isfinite(mean) and math.isfinite(norm)
        # Every rank judges the same sums, so all skip a step or none does.
        skipped = self.scaling is not None and not self.scaling.judge(is_finite=is_finite)
        if self.scaling is not None:
            self.sending.rescale(self.scaling)
        if self.scaling is not None and self.scaling.is_lost:
            raise RunError(
                f"step {step + 1}: float16 overflowed {self.scaling.row} times in a row, last at a loss of {mean:g}",
                hint="start a new run with a lower `optimizer.learning_rate` or with `precision` bfloat16, or go on "
                "from the last checkpoint: `supernode resume RUN --set optimizer.most_skips=N`.",
            )
        if not is_finite and not skipped:
            raise RunError(
                f"step {step + 1}: the loss is {mean:g} and the gradient's norm {norm:g}",
                hint="start a new run with a lower `optimizer.learning_rate` or with `optimizer.clip`; the last "
                "checkpoint is untouched.",
            )
        if not skipped and self.early is None:
            clip = self.plan.job.optimizer.clip
            self._scale((min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / positions / inflated)
        return Outcome(
            loss=mean, norm=norm, rate=0.0, parts={}, stop=stopping > 0, busy=tuple(busy), skipped=skipped,
            votes=voted,
        )  # fmt: skip

    def _squares(self) -> float:
        """Return this rank's part of the squared norm of the whole gradient."""
        if self.early is not None:
            return self.early.squares
        self._measure([parameter for parameter in self.trained if parameter not in self._norms])
        squares = 0.0
        for held, parameters in self._by_copies.items():
            norms = torch.stack([self._norms[parameter] for parameter in parameters])
            squares += float(norms.double().square().sum()) / held
        return squares

    def _scale(self, factor: float) -> None:
        """Multiply the gradients; what reads them in float32 anyway does it on the way, without rounding them."""
        if isinstance(self.optimizer, LowPrecision):
            self.optimizer.factor = factor
        elif grads := [local(p.grad) for p in self.trained if p.grad is not None]:
            torch._foreach_mul_(grads, factor)

    def _measure(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the norm of each gradient that is a sum by now; stages that share a parameter have yet to add theirs."""
        for parameter in parameters:
            settle(parameter)
            if parameter.grad is None:
                self._idle.add(parameter)
                parameter.grad = torch.zeros_like(parameter)
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if grads:
            norms = torch._foreach_norm(grads, dtype=torch.float32)
            self._norms.update(zip(parameters, (norm.float() for norm in norms), strict=True))

    @property
    def unused(self) -> list[str]:
        """Names of trained parameters that some step's backward did not come to on any copy; they only decay."""
        idle = self._idle.union(*(one.unused for one in (self.replicas, self.experts) if one is not None))
        return [name for name, parameter in self.parts.parameters() if parameter in idle]

    @torch.no_grad()
    def evaluate(self, beat: Callable[[], None] = lambda: None) -> float:
        """Return the mean loss over the job's batches of held-out data.

        Args:
            beat: called after each batch, as a sign of life.
        """
        for module in self.parts.modules:
            module.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for number in range(self.feed.evaluation_batches):
            batch = self.feed.evaluation(number)
            losses: list[Tensor] = []
            if self.schedule is not None:
                self._run_schedule(self.schedule.eval, batch, losses)
            else:
                for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                    losses.append(self.loss(self.parts.modules[0](inputs), targets))
            if self.judges:
                total[0] += float(torch.stack(losses).double().sum())
                total[1] += sum(self.feed.count(target) for target in batch.targets)
            beat()
        for module in self.sharded:
            module.reshard()  # Without a backward pass the root would keep its gathered weights in the shards' place.
        for module in self.parts.modules:
            module.train()
        self.passes.take()  # A schedule's stages count these passes, too, which are no step's.
        dist.all_reduce(total)
        inflated = self.scaling.scale if self.scaling is not None else 1.0
        return float(total[0] / inflated / max(1.0, float(total[1])))


def _schedule(plan: Plan, place: Place, parts: Parts, loss: Loss, passes: PassClock) -> Any:
    # Here and not above: it costs half a second that a run without a pipeline need not wait for.
    from supernode.passes.pipeline import build_schedule

    return build_schedule(plan, place, parts, loss, passes)


class _Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str, *, waited: float = 0.0) -> None:
        """Count the seconds since the last lap to a part; those of them that were waited count to `sync`."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last - waited
        if waited:
            self.parts["sync"] = self.parts.get("sync", 0.0) + waited
        self._last = now
