"""A rank that is alone sends nothing, so nothing of its gradients is rounded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from supernode.compressing.choose import compressor
from supernode.schema.spread import Communication
from supernode.syncing.compressed import Compressed


def test_a_rank_that_is_alone_compresses_nothing(together):
    def rank(number: int) -> list[tuple[bool, bool, int]]:
        told = []
        own = [dist.new_group([other]) for other in range(2)][number]
        groups = len(c10d._world.pg_map)
        for group in (own, dist.group.WORLD):
            made = compressor(Communication(compress="onebit"))
            assert made is not None
            way = Compressed(made, group, slow_only=False)
            gradient = torch.linspace(-1, 1, 64 * 64)
            summed = gradient.clone()
            way.prepare([("k", [("a", (64, 64))], summed)])
            way.start(summed, "k").wait()
            dist.barrier()
            way.close()
            is_whole = torch.equal(summed, gradient * group.size())
            told.append((way.travels, is_whole, len(c10d._world.pg_map) - groups))
        return told

    assert together(rank) == [[(False, True, 0), (True, False, 0)]] * 2
