"""Does compression of gradients save bytes and time on a slow link, and what does it cost in loss?

Two emulated hosts. Runs of the product's step on the Python standard library's sources, one rank a host, each with the
same seed, on links without a limit (losses and bytes do not depend on the rate); then, in turns, a few steps of each
with two ranks a host on a link so slow that an uncompressed step waits for it. Bytes are what the hosts' cards count,
start-up aside. What looks good is run with other seeds, too, and judged by the mean: one run's loss moves by 0.3% when
first values change in the last digits. What does not look good after a tenth of the steps is not run to their end.
Beside them PyTorch's own hooks, under DistributedDataParallel on the same model, data, optimizer and clipping.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import harness
from hosts import Hosts, emulated
from supernode.data.corpus import Corpus, prepare
from supernode.hardware.assemble import build_machine
from supernode.parallel.assemble import assemble
from supernode.parallel.mesh import place_of
from supernode.planning.planner import make_plan
from supernode.schema.job import DataSpec, EvaluateSpec, JobSpec, OptimizerSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan
from supernode.schema.spread import Communication, Parallelism
from supernode.training.data import open_feed
from supernode.training.optimizer import build_optimizer, learning_rate, set_rate
from supernode.training.step import Stepper
from supernode.ways.hierarchy import Hierarchy
from supernode.ways.hosts import find_hosts

PLACEMENT = (0, 0, 1, 1)
LEARNING = (0, 1)
"""Where the ranks of the whole runs lie: what is sent between hosts is as much."""
SHAPE = DecoderShape(layers=2, width=128, heads=4)
SEQUENCE, BATCH, HELD_OUT = 64, 8, 1024
STEPS, FULL_STEPS = 3000, 6000
SEEDS, FULL_SEEDS = (1, 2, 3), (1, 2, 3, 4, 5)
TRIED_SHARE = 0.1
"""Of the steps, after which it shows who is run to the end."""
WARMUP = 2
"""Steps that travel whole at the start, all compressors and PyTorch's PowerSGD alike."""
LIMIT = 300.0
"""Seconds of whole runs after which no further seed is begun."""
WAIT_SHARE = 0.75
"""Part of an uncompressed step on the slow link that the link takes."""
ROUNDS, TIMED, UNTIMED = 3, 6, 3
MOST_BYTES, MOST_LOSS = 0.10, 0.005
"""Of the uncompressed bytes, and above the uncompressed loss: what a good compressor leaves."""

OURS: dict[str, Communication] = {
    "none": Communication(),
    "int8": Communication(compress="int8"),
    "float8": Communication(compress="float8"),
    "topk": Communication(compress="topk", density=0.06),
    "powersgd": Communication(compress="powersgd", rank=2),
    "levels5": Communication(compress="levels5"),
    "levels7": Communication(compress="levels7"),
    "onebit": Communication(compress="onebit"),
}
POWERSGD_RANK = 2


def _torch_powersgd(model: DistributedDataParallel, warmup: int) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=max(2, warmup),
        min_compression_rate=2,
    )  # fmt: skip
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


PEERS: dict[str, Callable[[DistributedDataParallel, int], None]] = {
    "torch_ddp": lambda model, warmup: None,
    "torch_powersgd": _torch_powersgd,
    "torch_fp16": lambda model, warmup: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "torch_bf16": lambda model, warmup: model.register_comm_hook(None, default_hooks.bf16_compress_hook),
}


def job_of(said: Communication, steps: int, *, seed: int = 1, ranks: int = len(PLACEMENT)) -> JobSpec:
    """Return the run of so many steps; nothing is clipped, since a norm of what was held back says little."""
    return JobSpec(
        name="compress", model=SHAPE, batch=BATCH, steps=steps, seed=seed, threads=1, communication=said,
        data=DataSpec(sequence=SEQUENCE), parallelism=Parallelism(data=ranks),
        optimizer=OptimizerSpec(learning_rate=1e-3, warmup=steps // 50, decay="cosine", final_ratio=0.02),
        evaluate=EvaluateSpec(batches=HELD_OUT // BATCH),
    )  # fmt: skip


def plan_of(name: str, corpus: Corpus, steps: int, warmup: int, *, seed: int = 1, ranks: int = len(PLACEMENT)) -> Plan:
    """Return the plan of a variant's run."""
    said = OURS.get(name, Communication())
    if said.compress != "none":
        said = replace(said, warmup=warmup)
    machine = build_machine(card_count=ranks, card="H100")
    return make_plan(job_of(said, steps, seed=seed, ranks=ranks), machine, vocabulary=corpus.vocabulary)


class Ours:
    """The product's own step on this rank."""

    def __init__(self, plan: Plan, corpus: Corpus, rank: int) -> None:
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        self.model, self.feed = parts.modules[0], open_feed(plan, corpus, place.data)
        optimizer = build_optimizer(plan.job.optimizer, [p for _, p in parts.parameters()])
        self._stepper = Stepper(plan, place, parts, self.feed, optimizer, self.feed.loss)
        self._ways: list[Any] = list(self._stepper.sending.ways.values())
        if not self._ways:
            # Uncompressed gradients take the way with the fewest bytes between hosts, too.
            way = Hierarchy(place.group("copies"), find_hosts(place.group("copies")), "benchmark")
            assert self._stepper.replicas is not None
            self._stepper.replicas.start = way.start
            self._ways = [way]

    def train(self, step: int) -> None:
        """Take a step."""
        self._stepper.train(step)

    def close(self) -> None:
        """End the threads."""
        for way in self._ways:
            way.close()


class Theirs:
    """A step under DistributedDataParallel with one of PyTorch's hooks; model, data and optimizer are the product's."""

    def __init__(self, name: str, plan: Plan, corpus: Corpus, rank: int) -> None:
        place = place_of(plan.layout, rank)
        parts = assemble(plan, place)
        self.model, self.feed, self._job = parts.modules[0], open_feed(plan, corpus, place.data), plan.job
        self._held = [p for _, p in parts.parameters()]
        self._optimizer = build_optimizer(plan.job.optimizer, self._held)
        # PyTorch's PowerSGD sums from callbacks, whose order differs between ranks as soon as there are two buckets.
        whole = 64 if name == "torch_powersgd" else None
        self._ddp = DistributedDataParallel(self.model, bucket_cap_mb=whole)
        self._ranks = plan.ranks
        PEERS[name](self._ddp, WARMUP)

    def train(self, step: int) -> None:
        """Take a step."""
        batch = self.feed.training(step)
        self._optimizer.zero_grad(set_to_none=True)
        (inputs,), (targets,) = batch.inputs, batch.targets
        loss = self.feed.loss(self._ddp(inputs), targets)
        loss.backward()
        positions = torch.tensor(float(self.feed.count(targets)))
        dist.all_reduce(positions)
        for parameter in self._held:  # DDP divides by ranks; what the loss is divided by is positions.
            assert parameter.grad is not None
            parameter.grad.mul_(self._ranks / float(positions))
        set_rate(self._optimizer, learning_rate(self._job.optimizer, step, self._job.steps))
        self._optimizer.step()

    def close(self) -> None:
        """Nothing is left to end."""


def trainer(name: str, plan: Plan, corpus: Corpus, rank: int) -> Ours | Theirs:
    return Ours(plan, corpus, rank) if name in OURS else Theirs(name, plan, corpus, rank)


@torch.no_grad()
def held_out_loss(made: Ours | Theirs) -> float:
    """Return the mean loss over the held-out batches of all ranks."""
    made.model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for number in range(made.feed.evaluation_batches):
        batch = made.feed.evaluation(number)
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            total += torch.tensor([float(made.feed.loss(made.model(inputs), targets)), made.feed.count(targets)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def whole_run(hosts: Hosts, name: str, corpus: Corpus, steps: int, *, seed: int) -> dict[str, float]:
    """Return the held-out loss, the bytes a host sent in all steps, and the parameters, of one variant."""
    plan = plan_of(name, corpus, steps, WARMUP, seed=seed, ranks=len(LEARNING))

    def live(rank: int) -> dict[str, float]:
        made = trainer(name, plan, corpus, rank)
        dist.barrier()
        before = hosts.counts()
        for step in range(steps):
            made.train(step)
        dist.barrier()
        sent = max((after - early).sent for after, early in zip(hosts.counts(), before, strict=True))
        loss = held_out_loss(made)
        made.close()
        return {"loss": loss, "bytes": sent, "parameters": float(plan.parameters)}

    return hosts.run(live, LEARNING)[0]


def some_steps(hosts: Hosts, name: str, corpus: Corpus) -> dict[str, float]:
    """Return seconds and bytes sent by a host of a step past its warm-up, the median and the mean over a few."""
    plan = plan_of(name, corpus, 20 * UNTIMED, 1)

    def live(rank: int) -> dict[str, float]:
        made = trainer(name, plan, corpus, rank)
        seconds = []
        for step in range(UNTIMED + TIMED):
            if step == UNTIMED:
                dist.barrier()
                before = hosts.counts()
            begun = time.perf_counter()
            made.train(step)
            seconds.append(time.perf_counter() - begun)
        dist.barrier()
        sent = max((after - early).sent for after, early in zip(hosts.counts(), before, strict=True))
        made.close()
        return {"seconds": statistics.median(seconds[UNTIMED:]), "bytes": sent / TIMED}

    return hosts.run(live, PLACEMENT)[0]


def why_not(hosts: Hosts, name: str, corpus: Corpus) -> str:
    """Return why PyTorch refuses a hook here; empty if it does not."""
    plan = plan_of(name, corpus, 20, 1)

    def live(rank: int) -> str:
        try:
            Theirs(name, plan, corpus, rank)
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error).splitlines()[0]
        return ""

    return hosts.run(live, PLACEMENT)[0]


def learn(
    hosts: Hosts, corpus: Corpus, names: list[str], steps: int, seeds: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first tenth of a run of each variant, and whole runs by seed of those that look good by then."""
    tried = {name: {seeds[0]: told(hosts, name, corpus, round(TRIED_SHARE * steps), seed=seeds[0])} for name in names}
    runs: dict[str, dict[int, dict[str, float]]] = {name: {} for name in ("none", *promising(tried))}
    begun = time.monotonic()
    for seed in seeds:
        taken = time.monotonic() - begun
        if taken * (1 + bool(seed != seeds[0])) > LIMIT * (steps / STEPS):
            break
        for name in runs:
            runs[name][seed] = told(hosts, name, corpus, steps, seed=seed)
    return tried, runs


def told(hosts: Hosts, name: str, corpus: Corpus, steps: int, *, seed: int) -> dict[str, float]:
    """Return a run, and say how it went."""
    at = time.monotonic()
    run = whole_run(hosts, name, corpus, steps, seed=seed)
    sent = run["bytes"] / run["parameters"] / 4 / steps
    took = time.monotonic() - at
    harness.say(f"{name:14} seed {seed} steps {steps} loss {run['loss']:.4f} sent/float32 {sent:.3f} in {took:.0f} s")
    return run


def promising(tried: dict[str, Any]) -> list[str]:
    """Return the variants of ours that may end with few enough bytes and a good enough loss.

    Warm-up and start weigh more in a part of a run, and losses differ by more before learning rates fall.
    """
    first = next(iter(tried["none"]))
    none = tried["none"][first]
    return [
        name for name in OURS
        if name != "none" and tried[name][first]["bytes"] <= 1.2 * MOST_BYTES * none["bytes"]
        and tried[name][first]["loss"] <= (1 + 10 * MOST_LOSS) * none["loss"]
    ]  # fmt: skip


def gap(runs: dict[str, Any], name: str) -> float:
    """Return the mean over seeds of a variant's loss over the uncompressed one's, less 1."""
    seeds = [seed for seed in runs[name] if seed in runs["none"]]
    return statistics.mean(runs[name][seed]["loss"] / runs["none"][seed]["loss"] - 1 for seed in seeds)


def measure(hosts: Hosts, corpus: Corpus, steps: int, rounds: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Run everything; returns the raw figures."""
    missing = {name: reason for name in PEERS if (reason := why_not(hosts, name, corpus))}
    names = [*OURS, *(name for name in PEERS if name not in missing)]
    quick = [some_steps(hosts, "none", corpus) for _ in range(2)][-1]
    rate = quick["bytes"] * (1 - WAIT_SHARE) / (WAIT_SHARE * quick["seconds"])
    hosts.limit(rate)
    turns: list[dict[str, float]] = []
    for turn in range(rounds):
        at = turn % len(names)
        turns.append({name: some_steps(hosts, name, corpus)["seconds"] for name in names[at:] + names[:at]})
        words = (f"{name} {seconds * 1000:.0f}" for name, seconds in turns[-1].items())
        harness.say(f"slow link, ms a step: {', '.join(words)}")
    hosts.limit(None)
    tried, runs = learn(hosts, corpus, names, steps, seeds)
    return {"tried": tried, "runs": runs, "turns": turns, "quick": quick, "rate": rate, "missing": missing}


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what the raw figures show."""
    tried, runs, turns = raw["tried"], raw["runs"], raw["turns"]
    ratio = {name: statistics.median(turn["none"] / turn[name] for turn in turns) for name in tried}
    table = {}
    for name in tried:
        of = runs if name in runs else tried
        shares = [run["bytes"] / of["none"][seed]["bytes"] for seed, run in of[name].items()]
        table[name] = {
            "whole_runs": name in runs,
            "bytes_share": round(statistics.mean(shares), 4),
            "loss": {seed: round(run["loss"], 5) for seed, run in of[name].items()},
            "loss_over_none": round(gap(of, name), 5),
            "ms_a_step_slow_link": round(1000 * statistics.median(turn[name] for turn in turns), 2),
            "speedup_slow_link": round(ratio[name], 3),
        }
    good = [
        name for name in runs
        if name != "none" and table[name]["bytes_share"] <= MOST_BYTES and table[name]["loss_over_none"] <= MOST_LOSS
    ]  # fmt: skip
    uncompressed = statistics.median(turn["none"] for turn in turns)
    wire = raw["quick"]["bytes"] / raw["rate"]
    return {
        "good_compressors": len(good),
        "speedup_slow_link": round(max((ratio[name] for name in good), default=0.0), 3) or None,
        "good": good,
        "variants": table | dict.fromkeys(raw["missing"]),
        "missing": raw["missing"],
        "slow_link": {
            "mbit_a_second": round(raw["rate"] * 8 / 1e6, 1),
            "uncompressed_ms": round(1000 * uncompressed, 2),
            "bytes_a_step_over_rate_ms": round(1000 * wire, 2),
            "share_of_the_link": round(min(1.0, wire / uncompressed), 3),
            "share_of_the_rest": round(max(0.0, 1 - wire / uncompressed), 3),
            "unlimited_ms": round(1000 * raw["quick"]["seconds"], 2),
        },
        "turns": turns,
    }


def main() -> None:
    """Measure and print."""
    flags = harness.parser(__doc__).parse_args()
    steps = FULL_STEPS if flags.full else STEPS
    with harness.scratch() as folder, emulated(max(PLACEMENT) + 1) as hosts:
        corpus = prepare(job_of(Communication(), steps), folder)
        seeds = FULL_SEEDS if flags.full else SEEDS
        raw = measure(hosts, corpus, steps, 3 * ROUNDS if flags.full else ROUNDS, seeds)
    shown = summary(raw) | {
        "what_counts_as_good": f"at most {MOST_BYTES:.0%} of the bytes on the hosts' cards, warm-up included, and at"
        f" most {MOST_LOSS:.1%} more held-out loss than uncompressed, the mean over seeds",
        "uncompressed": "the product's own sum in two tiers, which sends the fewest bytes; torch_ddp is gloo's ring",
        "speedup": "of a step past the warm-up, as the ratio within each turn, then the median over turns",
        "setting": {
            "parameters": raw["runs"]["none"][SEEDS[0]]["parameters"], "sequence": SEQUENCE, "batch": BATCH,
            "steps": steps,
            "steps_of_those_not_run_to_the_end": round(TRIED_SHARE * steps),
            "warmup_steps": WARMUP, "placement": PLACEMENT,
            "placement_of_whole_runs": LEARNING, "held_out_samples": HELD_OUT,
            "compressors": {name: {"density": said.density, "rank": said.rank} for name, said in OURS.items()},
            "torch_powersgd_rank": POWERSGD_RANK,
        },
        "machine": harness.machine("torch", "numpy"),
    }  # fmt: skip
    harness.finish(shown, flags)


if __name__ == "__main__":
    main()
