"""How much do the planner's places, cut and degrees save over naive ones? Models on machines, chosen by rule."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from harness import finish, machine, parser, say
from placement_pairs import Pair, pairs
from supernode.forecast.efficiency import card_model
from supernode.forecast.kernels import pass_times
from supernode.forecast.rates import card_of
from supernode.forecast.times import step_parts
from supernode.placing.balance import balance, slowest_ranks
from supernode.placing.placement import Placed
from supernode.search.best import bill_of, room_of, words
from supernode.search.search import search
from supernode.search.space import Space
from supernode.workload.convolution import CLASSES, RESNETS, resnet, resnet_demand
from supernode.workload.presets import public_model, public_models
from supernode.workload.strategy import Software, make_strategies

CLAIM = 0.30  # SPEC S9: communication −30% by topology-aware partition
SOFTWARE = Software()
MANY = 100  # sets of degrees whose bytes are looked at, fastest first
STAGES = (4, 8)


def measure(pair: Pair) -> dict[str, Any]:
    """Return step time and bytes over the slowest tier: naive, ours at the same degrees, ours at our own."""
    card = card_of(pair.machine)
    naive, ours = pair.naive(pair.ways, SOFTWARE), pair.best(pair.ways, SOFTWARE)
    orders = list(pair.every(pair.ways, SOFTWARE))
    cut = balance(pair.model, pair.ways, card, SOFTWARE)
    equal_time, cut_time = cut.step(naive.time, slowest=cut.equal), cut.step(ours.time, slowest=cut.cut)
    row = {
        "group": pair.group,
        "source": pair.source,
        "cards": pair.cards,
        "naive_seconds": round(equal_time, 4),
        "naive_GB": round(naive.slow_bytes / 1e9, 3),
        "place": " | ".join(ours.order) if pair.machine.topology == "torus" else " < ".join(ours.order),
        "bytes_saved_by_place": saved(naive.slow_bytes, ours.slow_bytes),
        "waiting_saved_by_place": saved(waiting(naive), waiting(ours)),
        "time_saved_by_place": saved(naive.time, ours.time),
        "time_saved_by_cut": saved(equal_time, cut.step(naive.time, slowest=cut.cut)),
        "time_saved_by_place_and_cut": saved(equal_time, cut_time),
        "bytes_saved_over_mean_of_all_places": saved(statistics.mean(o.slow_bytes for o in orders), ours.slow_bytes),
    }
    return row | planned(pair, naive, limit=equal_time)


def planned(pair: Pair, naive: Placed, *, limit: float) -> dict[str, Any]:
    """Return the plan with the fewest bytes over the slowest tier that is no slower than the naive one.

    Of the fastest strategies of the whole space, one for each set of degrees, and the pair's own.

    Args:
        limit: seconds of the naive step.
    """
    made = pair.machine
    space = Space(
        model=pair.model, cards=(pair.cards,), batch=int(pair.ways.batch), sequence=int(pair.ways.sequence),
        software=SOFTWARE, precision=int(pair.ways.precision), offloads=(0,),
    )  # fmt: skip
    found = search(space, card_of(made), room_of(made), bill_of(made), top=MANY, front=False).best
    tried = [("the degrees as they are", pair.ways, SOFTWARE)]
    tried += [(words(choice), choice.ways(space), choice.software(space)) for choice in found]
    places = sorted(
        ((nbytes, index, say_more) for index, (_, ways, software) in enumerate(tried)
         for nbytes, say_more in pair.by_bytes(ways, software)),
        key=lambda one: one[:2],
    )  # fmt: skip
    for nbytes, index, say_more in places:
        told, ways, software = tried[index]
        placed, cut = say_more(), balance(pair.model, ways, card_of(made), software)
        time = cut.step(placed.time, slowest=cut.cut)
        if time <= limit:
            return {
                "planned": told,
                "planned_GB": round(nbytes / 1e9, 3),
                "bytes_saved_by_plan": saved(naive.slow_bytes, nbytes),
                "time_saved_by_plan": saved(limit, time),
            }
    raise AssertionError("the naive degrees in their best place are slower than in rank order")


def waiting(placed: Placed) -> float:
    """Return the seconds that wait for communication."""
    return sum(seconds for part, seconds in placed.parts.items() if part not in ("alone", "bubble"))


def cuts() -> dict[str, dict[str, float]]:
    """Return what the cut saves of the slowest stage and of a step, for every public model and two ResNets on H100."""
    card, found = card_model("H100"), {}
    for name in public_models():
        model = public_model(name)
        for stages in STAGES:
            ways = make_strategies(pipeline=stages, batch=8 * stages, sequence=4096, sharding=1, sequence_parallel=1)
            share = balance(model, ways, card, SOFTWARE)
            whole = float(step_parts(model, ways, card, SOFTWARE).total)
            steps = [share.step(whole, slowest=slowest) for slowest in (share.equal, share.cut)]
            found[f"{name}, {stages} stages"] = {
                "slowest_stage_saved": saved(share.equal, share.cut), "step_saved": saved(*steps)
            }  # fmt: skip
    for depth in (50, 152):
        blocks = resnet_blocks(depth)
        for stages in STAGES:
            shares = slowest_ranks(blocks, pipeline=stages)
            # All micro-batches on the slowest stage, and one on the others.
            steps = [(8 * stages - 1) * slowest + sum(blocks) for slowest in shares]
            found[f"ResNet-{depth}, {stages} stages"] = {
                "slowest_stage_saved": saved(*shares), "step_saved": saved(*steps)
            }  # fmt: skip
    return found


def resnet_blocks(depth: int) -> Sequence[float]:
    """Return the seconds of 32 pictures in the first convolution and in each block, the classifier in the last."""
    layers, ways, card = resnet(depth), make_strategies(micro_batch=32), card_model("H100")
    convolutions = [3 + (block == 0) for blocks in RESNETS[depth] for block in range(blocks)]
    demands = [
        resnet_demand(layers[first:last], ways.micro_batch, classes=CLASSES * (last == len(layers)))
        for first, last in pairwise(accumulate([0, 1, *convolutions]))
    ]
    return [float(pass_times(demand, ways, card, SOFTWARE).total) for demand in demands]


def saved(before: float, after: float) -> float:
    """Return the part that is saved; below 0 where there is more."""
    return round(float(1 - after / before), 4) if before else 0.0


def main() -> None:
    """Measure and print."""
    flags: argparse.Namespace = parser(__doc__).parse_args()
    rows, cut_rows = {}, cuts()
    for name, pair in pairs().items():
        rows[name] = row = measure(pair)
        say(
            f"{row['group']:<9} {name:<50} bytes saved by place {row['bytes_saved_by_place']:>6.1%}, by plan "
            f"{row['bytes_saved_by_plan']:>6.1%}; time saved by place {row['time_saved_by_place']:>6.1%}, by cut "
            f"{row['time_saved_by_cut']:>5.1%}, by plan {row['time_saved_by_plan']:>6.1%}"
        )

    def mean(key: str, *groups: str) -> float:
        return round(float(statistics.mean(row[key] for row in rows.values() if row["group"] in groups)), 4)

    ruled = ("published", "catalogue")

    def median(key: str, *groups: str) -> float:
        return round(float(statistics.median(row[key] for row in rows.values() if row["group"] in groups)), 4)

    keys = [key for key in next(iter(rows.values())) if "saved" in key]
    cut_means = {key: statistics.mean(row[key] for row in cut_rows.values()) for key in next(iter(cut_rows.values()))}
    for key in keys:
        say(f"{key:<38} mean {mean(key, *ruled):>7.1%}, median {median(key, *ruled):>7.1%}, of what was chosen by rule")
    say(f"cut: {cut_means['step_saved']:.1%} of a step over {len(cut_rows)} models and numbers of stages")
    result = {
        "pairs_compared": len(rows),
        "claimed_saving": CLAIM,
        **{f"mean_{key}": mean(key, *ruled) for key in keys},
        **{f"median_{key}": median(key, *ruled) for key in keys},
        **{f"mean_{key}_{group}": mean(key, group) for group in (*ruled, "misfits") for key in keys},
        "met_by_place": mean("bytes_saved_by_place", *ruled) >= CLAIM,
        "met_by_plan": mean("bytes_saved_by_plan", *ruled) >= CLAIM,
        "met_over_mean_of_all_places": mean("bytes_saved_over_mean_of_all_places", *ruled) >= CLAIM,
        "cut_mean_slowest_stage_saved": round(cut_means["slowest_stage_saved"], 4),
        "cut_mean_step_saved": round(cut_means["step_saved"], 4),
        "naive": "ranks in Megatron-LM's order (tensor innermost, pipeline outermost) on cards in theirs, none left "
        "out; the published or habitual degrees; equal layers on each stage",
        "slowest": "the slowest tier that a card sends over; on a torus the busiest link",
        "pairs": rows,
        "cuts": cut_rows,
        "machine": machine("numpy"),
    }
    finish(result, flags)


if __name__ == "__main__":
    main()
