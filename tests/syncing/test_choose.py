"""Which way is taken: as predicted, as measured, as the job says; the same on all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from supernode.collectives.grid import flat, hierarchical
from supernode.errors import SpecError
from supernode.ways.choose import Choice, Predicted, choose, compressed
from supernode.ways.describe import between_hosts, described
from supernode.ways.hosts import group_by_host

TABLE = Predicted(
    sizes=(1e4, 1e6, 1e8),
    times={"flat_ring": (1e-4, 1e-3, 9e-1), "ring": (2e-4, 1e-2, 1e-1), "multi_ring": (9.0, 9.0, 9.0)},
)
KIB, MIB = 2**10, 2**20


def _hosts(places: str, me: int, token: str):
    return group_by_host([(letter,) for letter in places], me=me, token=token)


def test_a_prediction_is_read_at_the_nearest_size():
    assert TABLE.seconds("ring", 9e5) == 1e-2
    assert TABLE.seconds("ring", 5e9) == 1e-1
    assert TABLE.seconds("unheard of", 1) == math.inf
    assert TABLE.is_near_best("ring")
    assert not TABLE.is_near_best("multi_ring")


def test_a_choice_is_told_with_what_was_only_expected():
    choice = Choice(
        sizes=(MIB, 16 * MIB), seconds={"ordered": (0.02, 0.3), "hierarchical": (0.03, 0.2)}, measured=(True, False),
        taken=("ordered", "hierarchical"), spent=0.5,
    )  # fmt: skip

    assert choice.way(3 * MIB) == "ordered"
    assert choice.way(5 * MIB) == "hierarchical"
    assert choice.way(0) == "ordered"
    way, ordered, tiers = choice.text().splitlines()
    assert way.split() == ["way", "1", "MiB", "16", "MiB"]
    assert ordered.split() == ["ordered", "20*", "~300"]
    assert tiers.split() == ["hierarchical", "30", "~200*"]


def test_descriptions_are_those_of_the_hosts():
    even, uneven = _hosts("AABB", 0, ""), _hosts("AAAB", 0, "")

    assert described("flat_ring", even).sent().tolist() == flat("all_reduce", 4).sent().tolist()
    assert described("halving", even).sent().tolist() == hierarchical("all_reduce", (2, 2)).sent().tolist()
    assert described("ring", uneven).ranks == 4
    with pytest.raises(SpecError, match="3, 1 ranks"):
        described("multi_ring", uneven)


def test_bytes_between_hosts_are_counted_on_the_descriptions():
    interleaved, uneven = _hosts("ABAB", 0, ""), _hosts("AAAB", 0, "")

    # A ring of four sends 2 · 3/4 of the tensor over each of its edges, of which all four or two go between hosts.
    assert between_hosts("given", interleaved) == pytest.approx(4 * 1.5)
    assert between_hosts("ordered", interleaved) == pytest.approx(2 * 1.5)
    # In tiers each of h hosts sends 2 (h - 1) / h, however many ranks it has.
    assert between_hosts("hierarchical/1", interleaved) == pytest.approx(2 * 1.0)
    assert between_hosts("hierarchical", uneven) == pytest.approx(2 * 1.0)
    assert between_hosts("hierarchical", _hosts("AABBCC", 0, "")) == pytest.approx(3 * 4 / 3)


def test_ranks_agree_on_ways_that_all_give_the_plain_sum(together):
    def rank(number: int) -> dict[str, object]:
        world = dist.group.WORLD
        told: dict[str, object] = {}
        groups = len(c10d._world.pg_map)
        meetings = {
            "auto": choose(world, [4 * KIB, MIB], budget=0.2, hosts=_hosts("ABAB", number, "auto")),
            "predicted": choose(
                world, [10_000, MIB, 10**8], budget=0, predicted=TABLE, hosts=_hosts("ABAB", number, "predicted")
            ),
            "unpredicted": choose(world, [MIB], budget=0, hosts=_hosts("AABB", number, "unpredicted")),
            "flat": choose(world, [MIB], algorithm="flat", hosts=_hosts("ABBA", number, "flat")),
            "hierarchical": choose(world, [MIB], algorithm="hierarchical", hosts=_hosts("AAAB", number, "tiers")),
            "torus": choose(world, [MIB], algorithm="torus", hosts=_hosts("ABBA", number, "torus")),
            "real": choose(world, [MIB], budget=0.05),
        }
        for name, meeting in meetings.items():
            right = True
            for elements in (1, 1000, MIB // 4):
                tensors = [torch.zeros(elements), meeting.empty(elements)]
                for tensor in tensors:
                    tensor += torch.arange(elements).remainder(7) * (number + 1)
                for work in [meeting.start(tensor, str(elements)) for tensor in tensors]:
                    work.wait()
                right &= all(torch.equal(tensor, torch.arange(elements).remainder(7) * 10.0) for tensor in tensors)
            choice = meeting.choice
            told[name] = (right, choice.taken, choice.sizes, dict(choice.seconds), choice.measured, choice.spent)
            dist.barrier()
            meeting.close()
        with pytest.raises(SpecError, match="algorithm"):
            choose(world, [1], algorithm="spiral")
        assert len(c10d._world.pg_map) == groups, "groups are left of ways that were closed, or not taken"
        return told

    first, *others = together(rank, ranks=4)

    assert all(other == first for other in others)
    assert all(right for right, *_ in first.values())
    assert (
        first["predicted"][1] == ("given", "hierarchical", "hierarchical") or first["predicted"][1][0] != "hierarchical"
    )
    assert first["predicted"][1] == ("ordered", "ordered", "hierarchical")
    assert first["unpredicted"][1] == ("ordered",)
    assert first["flat"][1] == ("ordered",)
    assert first["hierarchical"][1] == ("hierarchical",)
    assert first["torus"][1] == ("multi_ring",)
    taken, sizes, seconds, measured, spent = first["auto"][1:]
    assert set(seconds) == {"given", "ordered", "hierarchical", "hierarchical/1"}
    assert measured[0]
    for at in range(len(sizes)):
        # Within what counts as alike, the quickest is taken.
        assert seconds[taken[at]][at] <= (1.03 if measured[at] else 1.15) * min(row[at] for row in seconds.values())
    assert spent > 0


def test_a_compressor_takes_the_place_of_the_sum_between_hosts(together):
    def rank(number: int) -> tuple[list[float], list[str]]:
        keys = []

        def nothing(shard: torch.Tensor, group: dist.ProcessGroup, key: str) -> None:
            keys.append(key)

        meeting = compressed(dist.group.WORLD, nothing, hosts=_hosts("AABB", number, "nothing"))
        tensor = torch.full((64,), float(number))
        meeting.start(tensor, "weights").wait()
        dist.barrier()
        meeting.close()
        return tensor.unique().tolist(), keys

    # Each host keeps its own sum, as nothing was exchanged.
    assert together(rank, ranks=4) == [
        ([1.0], ["weights.0.0"]), ([1.0], ["weights.0.1"]), ([5.0], ["weights.0.0"]), ([5.0], ["weights.0.1"]),
    ]  # fmt: skip
