"""How much of gradient synchronisation hides behind backward, on a link that is really slow?

Two emulated hosts of one rank each train by the product's own step over a link whose rate is limited in the kernel. The
rate follows from a first measurement: communication shall be a stated share of the step that does not overlap. Then all
variants take turns, each a few steps, in every round: with overlap, without, compute alone (every sum is skipped),
communication alone (no passes), and PyTorch DDP on the same model and link. Ratios are taken within a round; reported
is their median over the rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first optimizer step would import it, for seconds.
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import harness
import resnet_job
from hosts import MBIT, Hosts, emulated
from supernode.data.sampler import Sampler
from supernode.hardware.assemble import build_machine
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.parallel.tensor import IGNORED, cross_entropy
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Parallelism
from supernode.syncing.buckets import all_reduce
from supernode.training.data import Feed, TokenWindows, open_feed
from supernode.training.optimizer import build_optimizer
from supernode.training.step import Stepper
from supernode.ways.meeting import Done

RANKS = 2
LIMIT = 480.0
"""Seconds in all after which no round begins that would pass them."""
LEAST_ROUNDS = 3
STEPS = 2
"""Steps of a variant in one turn."""
START_SHARE = 0.35
"""Part of the step without overlap that communicates at the start (the claim that is tested: 35% become 12%)."""
RESNET = Path(__file__).with_name("resnet_job.py")
SHAPE = DecoderShape(layers=6, width=384, heads=6, vocabulary=256, tied=False)
SEQUENCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the part of its step without overlap that communicates."""

    model: str
    share: float
    weight: float
    """Of its time in the whole."""
    only_full: bool = False

    @property
    def over_compute(self) -> float:
        """Communication over compute."""
        return self.share / (1 - self.share)


CASES = (
    Case(model="resnet152", share=START_SHARE, weight=1.4),
    Case(model="decoder", share=START_SHARE, weight=1.0),
    Case(model="resnet152", share=0.5, weight=0.6),
    Case(model="decoder", share=0.65, weight=0.5, only_full=True),
)


def plan_for(model: str) -> Plan:
    """Return the plan of a model's training on two ranks that hold copies."""
    sgd = OptimizerSpec(name="sgd", learning_rate=1e-4, momentum=0.9, weight_decay=1e-4, clip=1.0, decay="none")
    both = Parallelism(data=RANKS)
    if model == "decoder":
        job = JobSpec(
            model=SHAPE, batch=32, data=DataSpec(tokens="noise", sequence=SEQUENCE), parallelism=both, optimizer=sgd
        )
    else:
        job = JobSpec(
            model=f"{RESNET}:model",
            batch=192,
            data=DataSpec(dataset=f"{RESNET}:images"),
            parallelism=both,
            optimizer=sgd,
        )
    machine = build_machine(card_count=RANKS, card="H100")
    return make_plan(job, machine, vocabulary=SHAPE.vocabulary if model == "decoder" else 0)


def feed_for(plan: Plan, rank: int) -> Feed:
    """Return a rank's data: noise, since a step's time does not depend on it."""
    if plan.job.data.dataset:
        return open_feed(plan, None, rank)
    tokens = np.random.default_rng(0).integers(0, plan.vocabulary, 4096 * SEQUENCE + 1)
    return Feed(
        plan=plan, data=rank, train=TokenWindows(tokens, SEQUENCE), held_out=None,
        sampler=Sampler(4096, plan.job.batch, plan.job.seed, drop_last=True), loss=cross_entropy,
        count=lambda target: int((target != IGNORED).sum()), pads=True,
    )  # fmt: skip


class Bench:
    """One rank's models and the variants that it can take a step by."""

    def __init__(self, case: Case, rank: int) -> None:
        plan = plan_for(case.model)
        self.rank, self.step = rank, 0
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        self.feed = feed_for(plan, rank)
        spec = plan.job.optimizer
        optimizer = build_optimizer(spec, [p for _, p in parts.parameters()])
        self.stepper = Stepper(plan, place, parts, self.feed, optimizer, self.feed.loss)
        assert self.stepper.replicas is not None
        self.sync = self.stepper.replicas
        self._sum = all_reduce(place.group("copies"))
        twin: nn.Module = assemble(plan, place).modules[0]
        # As its users are told to for speed; ours sends no buffers of batch norms either.
        self.ddp = DistributedDataParallel(twin, gradient_as_bucket_view=True, forward_sync_buffers=False)
        self.ddp_optimizer = build_optimizer(spec, list(twin.parameters()))
        self.variants: dict[str, Callable[[], float]] = {
            "with": lambda: self._ours(overlap=True),
            "without": lambda: self._ours(overlap=False),
            "compute": lambda: self._ours(overlap=False, sums=False),
            "communication": self._communicate,
            "ddp": self._ddp,
        }

    def _ours(self, *, overlap: bool, sums: bool = True) -> float:
        self.sync.overlap = overlap
        self.sync.start = self._sum if sums else lambda flat, key: Done()
        self.step += 1
        return self.stepper.train(self.step).parts["sync"]

    def _communicate(self) -> float:
        self.sync.start = self._sum
        self.sync.begin()
        return self.sync.finish()

    def _ddp(self) -> float:
        self.step += 1
        batch = self.feed.training(self.step)
        loss = self.feed.loss(self.ddp(batch.inputs[0]), batch.targets[0]) / self.feed.count(batch.targets[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.ddp_optimizer.step()
        self.ddp_optimizer.zero_grad(set_to_none=True)
        loss.item()  # as a loop that shows its loss would
        return 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of gradients that meet in a step."""
        return sum(bucket.nbytes for bucket in self.sync.buckets)

    def turn(self, name: str, steps: int = STEPS) -> dict[str, float]:
        """Take some steps by a variant; returns seconds, CPU seconds and waiting of a step, the mean over the ranks."""
        dist.barrier()
        busy, spent, begun = _busy_seconds(), time.process_time(), time.perf_counter()
        waited = sum(self.variants[name]() for _ in range(steps)) / steps
        wall, spent = time.perf_counter() - begun, time.process_time() - spent
        told = torch.tensor([wall / steps, spent / steps, waited], dtype=torch.float64)
        total = torch.tensor([spent], dtype=torch.float64)
        dist.all_reduce(told)
        dist.all_reduce(total)
        seconds, cpu, sync = (told / RANKS).tolist()
        others = max(0.0, _busy_seconds() - busy - float(total)) / (wall * (os.cpu_count() or 1))
        return {"seconds": seconds, "cpu": cpu, "waited": sync, "others_share": others}


def _busy_seconds() -> float:
    """Return the seconds that all cores have worked."""
    columns = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, columns)
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


Round = dict[str, dict[str, float]]


def set_rate(bench: Bench, hosts: Hosts, case: Case) -> float:
    """Limit the link so that communication takes its share; returns bytes per second."""

    def limit(rate: float) -> None:
        if bench.rank == 0:
            hosts.limit(rate)
        dist.barrier()

    target = case.over_compute * statistics.median(bench.turn("compute", 1)["seconds"] for _ in range(3))
    rate = 1.1 * bench.nbytes / target  # Each of two ranks sends all of it once, and headers.
    for _ in range(2):
        limit(rate)
        bench.turn("communication", 1)  # tbf lets its burst through first
        rate *= bench.turn("communication", 1)["seconds"] / target
    limit(rate)
    return rate


def measure(case: Case, hosts: Hosts, rank: int, *, until: float, most: int) -> dict[str, Any]:
    """Return the rounds of one case, and what was measured beside them."""
    bench = Bench(case, rank)
    for name in ("compute", "without", "ddp", "ddp"):  # The buckets of both are known after that.
        bench.turn(name, 1)
    rate = set_rate(bench, hosts, case)
    names = list(bench.variants)
    for name in names:
        bench.turn(name, 1)
    rounds: list[Round] = []
    payload = 0
    longest = 0.0
    while True:
        go = len(rounds) < LEAST_ROUNDS or (len(rounds) < most and time.monotonic() + longest < until)
        agreed = torch.tensor([float(go)])
        dist.broadcast(agreed, 0)  # Rank 0's clock decides.
        if not agreed:
            break
        begun, first = time.monotonic(), len(rounds) % len(names)
        one: Round = {}
        for name in names[first:] + names[:first]:
            before = hosts.counts()[0] if rank == 0 else None
            one[name] = bench.turn(name)
            if name == "with" and before is not None:
                payload = (hosts.counts()[0] - before).payload // STEPS
        rounds.append(one)
        longest = max(longest, time.monotonic() - begun)
    return {
        "rounds": rounds, "rate": rate, "gradients": bench.nbytes, "payload": payload,
        "buckets": [bucket.nbytes for bucket in bench.sync.buckets],
    }  # fmt: skip


def compare(case: Case, told: dict[str, Any]) -> dict[str, Any]:
    """Return a case's figures: ratios within each round, then their median."""
    rounds: list[Round] = told["rounds"]

    def median(of: Callable[[Round], float], digits: int = 3) -> float:
        return round(statistics.median(map(of, rounds)), digits)

    def seconds(name: str) -> Callable[[Round], float]:
        return lambda turn: turn[name]["seconds"]

    def bound(turn: Round) -> float:
        return max(turn["compute"]["seconds"], turn["communication"]["seconds"])

    def exposed(name: str) -> Callable[[Round], float]:
        return lambda turn: 1 - turn["compute"]["seconds"] / turn[name]["seconds"]

    return {
        "model": case.model,
        "share_aimed_at": round(case.share, 2),
        "link_mbit_s": round(told["rate"] / MBIT),
        "over_bound": median(lambda turn: turn["with"]["seconds"] / bound(turn)),
        "with_over_without": median(lambda turn: turn["with"]["seconds"] / turn["without"]["seconds"]),
        "throughput_gain": median(lambda turn: turn["without"]["seconds"] / turn["with"]["seconds"]),
        "throughput_bound": median(lambda turn: turn["without"]["seconds"] / bound(turn)),
        "exposed_share_before": median(exposed("without")),
        "exposed_share_after": median(exposed("with")),
        "exposed_share_ddp": median(exposed("ddp")),
        "waited_share_before": median(lambda turn: turn["without"]["waited"] / turn["without"]["seconds"]),
        "waited_share_after": median(lambda turn: turn["with"]["waited"] / turn["with"]["seconds"]),
        "communication_over_compute": median(
            lambda turn: turn["communication"]["seconds"] / turn["compute"]["seconds"]
        ),
        "over_ddp": median(lambda turn: turn["with"]["seconds"] / turn["ddp"]["seconds"]),
        "seconds_a_step": {name: median(seconds(name), 4) for name in rounds[0]},
        "cpu_seconds_a_step": {name: median(lambda turn, n=name: turn[n]["cpu"], 4) for name in rounds[0]},  # type: ignore[misc]
        "cpu_of_communication_share": median(lambda turn: turn["with"]["cpu"] / turn["compute"]["cpu"] - 1),
        "others_share": round(statistics.median(t["others_share"] for turn in rounds for t in turn.values()), 3),
        "gradient_bytes": told["gradients"],
        "bytes_sent_a_step": told["payload"],
        "bucket_bytes": told["buckets"],
        "rounds": len(rounds),
    }


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    begun, cases = time.monotonic(), []
    left = [case for case in CASES if flags.full or not case.only_full]
    limit = LIMIT * (4 if flags.full else 1)
    while left:
        case = left.pop(0)
        now = time.monotonic()
        until = now + (begun + limit - now) * case.weight / (case.weight + sum(other.weight for other in left))
        with emulated(RANKS) as hosts:
            told = hosts.run(
                lambda rank, case=case, hosts=hosts, until=until: measure(  # type: ignore[misc]
                    case, hosts, rank, until=until, most=40 if flags.full else 12
                ),
                range(RANKS),
                patience=2 * limit,
            )
        cases.append(compare(case, told[0]))
        said = cases[-1]
        harness.say(
            f"{case.model}, {said['link_mbit_s']} Mbit/s: exposed {said['exposed_share_before']:.0%} →"
            f" {said['exposed_share_after']:.0%} (DDP {said['exposed_share_ddp']:.0%}), {said['over_bound']:.2f} of the"
            f" bound, {said['throughput_gain']:.2f}x of at most {said['throughput_bound']:.2f}x,"
            f" {said['rounds']} rounds, others take {said['others_share']:.0%}"
        )
    start = [said for said in cases if said["share_aimed_at"] == START_SHARE]
    result = {
        "over_bound": max(said["over_bound"] for said in start),
        "exposed_share_before": min(said["exposed_share_before"] for said in start),
        "exposed_share_after": max(said["exposed_share_after"] for said in start),
        "over_ddp": max(said["over_ddp"] for said in start),
        "resnet_throughput_gain": {
            str(said["share_aimed_at"]): said["throughput_gain"] for said in cases if said["model"] == "resnet152"
        },
        "what_is_exposed": "the part of a step that compute alone would not take: waiting, and the time that sending"
        " takes from the cores; `waited` is the waiting alone, as the step's own `sync` tells it",
        "bound": "the larger of compute alone and communication alone; a step must compute its forward pass before it"
        " has anything to send, so where communication is the larger no step that ends with its own update reaches it",
        "cases": cases,
        "setting": {
            "hosts": RANKS, "ranks_a_host": 1, "steps_a_turn": STEPS,
            "resnet152": {
                "pixels": resnet_job.PIXELS, "width": resnet_job.WIDTH, "classes": resnet_job.CLASSES,
                "samples_a_rank": plan_for("resnet152").job.batch // RANKS,
            },
            "decoder": {
                "layers": SHAPE.layers, "width": SHAPE.width, "sequence": SEQUENCE,
                "samples_a_rank": plan_for("decoder").job.batch // RANKS,
            },
        },
        "seconds": round(time.monotonic() - begun, 1),
        "machine": harness.machine("torch"),
    }  # fmt: skip
    harness.finish(result, flags)


if __name__ == "__main__":
    main()
