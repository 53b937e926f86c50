"""Which ranks share a host? Told by the ranks themselves; and groups whose order goes host by host."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_CARD_BYTES = 512
"""Room for what a rank tells of itself, as JSON; host names have 64 bytes at most (POSIX HOST_NAME_MAX on Linux)."""


PEER_GONE = re.compile(
    r"\bgloo\b|connection (closed|reset|refused) by|connection was closed|broken pipe|wait timeout", re.IGNORECASE
)
"""What the text of an error says where a peer is gone: gloo's own errors are plain RuntimeErrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Who is where, in the numbers of one process group.

    Attributes:
        groups: ranks of each host, ascending; hosts in the order of their first ranks.
        me: this rank.
        token: a word that all ranks of the group share and nobody else knows.
    """

    groups: tuple[tuple[int, ...], ...]
    me: int
    token: str

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, host by host."""
        return tuple(rank for group in self.groups for rank in group)

    @property
    def host(self) -> int:
        """Number of this rank's host."""
        return next(number for number, group in enumerate(self.groups) if self.me in group)

    @property
    def mine(self) -> tuple[int, ...]:
        """Ranks of this rank's host."""
        return self.groups[self.host]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each host."""
        return tuple(len(group) for group in self.groups)

    @property
    def are_in_order(self) -> bool:
        """Whether the group's own order already goes host by host."""
        return self.order == tuple(range(len(self.order)))

    def keepers(self) -> tuple[tuple[int, ...], ...]:
        """Return for each part of a vector the rank of each host that looks after it.

        There are as many parts as the largest host has ranks; a smaller host's ranks look after several each, as in
        `collectives.grid.unequal`.
        """
        parts = max(self.sizes)
        return tuple(tuple(group[part * len(group) // parts] for group in self.groups) for part in range(parts))


def identity() -> tuple[str, str, int]:
    """Return what two processes have in common if they can share memory and local sockets: boot, name, network.

    Containers of one machine with networks of their own count as hosts of their own. Where the system tells no boot,
    every process is its own host.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return secrets.token_hex(16), socket.gethostname(), 0
    return boot, socket.gethostname(), network


def find_hosts(group: dist.ProcessGroup) -> Hosts:
    """Return who is where; all ranks of the group call this at the same time."""
    words = json.dumps({"host": identity(), "token": secrets.token_hex(8)}).encode()
    cards = [torch.zeros(_CARD_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    own = torch.frombuffer(bytearray(words.ljust(_CARD_BYTES)), dtype=torch.uint8)
    dist.all_gather(cards, own, group=group)
    told = [json.loads(bytes(card.tolist())) for card in cards]
    return group_by_host([tuple(one["host"]) for one in told], me=group.rank(), token=told[0]["token"])


def group_by_host(identities: Sequence[tuple[object, ...]], *, me: int, token: str = "") -> Hosts:
    """Return who is where, from what each rank told."""
    hosts: dict[tuple[object, ...], list[int]] = {}
    for rank, where in enumerate(identities):
        hosts.setdefault(where, []).append(rank)
    return Hosts(groups=tuple(map(tuple, hosts.values())), me=me, token=token)


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of this group may take."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def subgroup(group: dist.ProcessGroup, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Return a gloo group of some ranks of another, numbered in the order given; only they call this.

    `dist.new_group` wants either all processes of the job to take part, or equal counts of groups on all members, and
    a member of several parts has more groups than others.

    Args:
        ranks: in the numbers of `group`.
        name: the same on all members, and never used before in this job.
    """
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    limit = limit_of(group)
    made, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        c10d.Backend(c10d.Backend.GLOO),
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(members)}
    return made


def leave(group: dist.ProcessGroup) -> None:
    """Let go of a group that `subgroup` made, and of its connections; all members do, and nothing is under way in it.

    After the end of the whole job's group it is gone already.
    """
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)
