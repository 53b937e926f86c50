"""Which ranks share a host, from what they tell."""

from __future__ import annotations

import torch
import torch.distributed as dist

from supernode.ways.hosts import find_hosts, group_by_host, identity, limit_of, subgroup

A, B, C = ("boot", "a", 1), ("boot", "b", 1), ("boot", "a", 2)


def test_hosts_come_in_the_order_of_their_first_ranks_and_the_order_goes_host_by_host():
    hosts = group_by_host([B, A, B, C, A], me=4)

    assert hosts.groups == ((0, 2), (1, 4), (3,))
    assert hosts.order == (0, 2, 1, 4, 3)
    assert hosts.host == 1
    assert hosts.mine == (1, 4)
    assert not hosts.are_in_order
    assert group_by_host([A, A, B], me=0).are_in_order


def test_another_network_on_the_same_machine_is_another_host():
    assert group_by_host([A, C], me=0).sizes == (1, 1)


def test_each_part_has_one_keeper_on_each_host_and_each_rank_keeps_a_part():
    hosts = group_by_host([A, A, A, B, C, C], me=0)

    assert hosts.keepers() == ((0, 3, 4), (1, 3, 4), (2, 3, 5))
    assert {rank for keepers in hosts.keepers() for rank in keepers} == set(range(6))


def test_ranks_find_their_host_and_make_groups_in_another_order(together):
    def rank(number: int) -> tuple[object, ...]:
        hosts = find_hosts(dist.group.WORLD)
        backwards = subgroup(dist.group.WORLD, (2, 0), f"{hosts.token}-some") if number != 1 else None
        told = []
        if backwards is not None:
            parts = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(parts, torch.tensor([float(number)]), group=backwards)
            told = [part.item() for part in parts]
            assert limit_of(backwards) == limit_of(dist.group.WORLD)
        return hosts.groups, hosts.token, identity(), told

    first, *others = together(rank, ranks=3)

    assert first[0] == ((0, 1, 2),)
    assert all(other[:3] == first[:3] for other in others)
    assert first[3] == others[1][3] == [2.0, 0.0]
