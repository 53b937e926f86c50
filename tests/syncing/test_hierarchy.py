"""Sums in two tiers: the plain sum for any hosts, types and lengths, the same bits on all ranks, no hanging."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from supernode.errors import CapacityError, SpecError
from supernode.ways.hierarchy import Hierarchy, Pending
from supernode.ways.hosts import PEER_GONE, group_by_host
from supernode.ways.shared import _address, _memory, _room

PLACES = {"one host": "AAAAA", "in order": "AABB", "interleaved": "ABAB", "unequal": "AAABB", "alone": "ABC"}
LENGTHS = (0, 1, 3, 50, 70_001, 300_000)


def _hosts(places: str, me: int, token: str):
    return group_by_host([(letter,) for letter in places], me=me, token=token)


def _values(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, whose sums are exact in every type."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-4, 5, elements)).to(dtype)


def test_every_way_of_lying_on_hosts_gives_the_plain_sum(together):
    def rank(number: int) -> list[tuple[str, bool]]:
        done = []
        for name, places in PLACES.items():
            group = dist.new_group(list(range(len(places))))
            if number >= len(places):
                continue
            hierarchy = Hierarchy(group, _hosts(places, number, name), f"test {name}")
            for dtype in (torch.float32, torch.bfloat16):
                for chunks in (1, 12):
                    # Started together: several tensors are under way, and leave in call order.
                    mine = [_values(number, length, dtype) for length in LENGTHS]
                    plain = [one.float().clone() for one in mine]
                    if chunks == 12:
                        # The same from memory that the host shares; its owner may write once its own sum is done.
                        got: list[torch.Tensor] = []
                        lent = [hierarchy.empty(one.numel(), dtype).copy_(one) for one in mine]
                        dist.barrier(group=group)
                        for one, work in [(one, hierarchy.start(one)) for one in lent]:
                            work.wait()
                            got.append(one.float().clone())
                            one.zero_()
                    works = [hierarchy.start(one, chunks=chunks) for one in mine]
                    for one in plain:
                        dist.all_reduce(one, group=group)
                    for work in works:
                        work.wait()
                    right = all(torch.equal(a.float(), b) for a, b in zip(mine, plain, strict=True))
                    if chunks == 12:
                        right = right and all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
                    done.append((f"{name} {dtype} {chunks}", right))
            dist.barrier(group=group)
            hierarchy.close()
        return done

    results = together(rank, ranks=5)

    assert [len(done) for done in results] == [20, 20, 20, 16, 8]
    assert not [name for done in results for name, right in done if not right]


def test_all_ranks_hold_the_same_bits_time_after_time(together):
    def rank(number: int) -> list[bytes]:
        hierarchy = Hierarchy(dist.group.WORLD, _hosts("ABAB", number, "bits"), "test bits")
        sums = []
        for _ in range(3):
            noise = torch.randn(100_003, generator=torch.Generator().manual_seed(number))
            hierarchy.start(noise).wait()
            sums.append(noise.numpy().tobytes())
        dist.barrier()
        hierarchy.close()
        return sums

    results = together(rank, ranks=4)

    assert {bits for sums in results for bits in sums} == {results[0][0]}
    exact = sum(torch.randn(100_003, generator=torch.Generator().manual_seed(number)).double() for number in range(4))
    np.testing.assert_allclose(np.frombuffer(results[0][0], np.float32), exact.numpy(), atol=1e-5)


def test_what_stands_between_hosts_is_handed_the_parts_that_were_told(together):
    def rank(number: int) -> tuple[list[object], list[object], list[object], bool]:
        seen: list[object] = []

        def halve(shard: torch.Tensor, group: dist.ProcessGroup, key: str) -> None:
            seen.append((key, shard.numel(), dist.get_process_group_ranks(group)))
            dist.all_reduce(shard, group=group)
            shard.mul_(0.5)

        hierarchy = Hierarchy(dist.group.WORLD, _hosts("ABAAB", number, "hook"), "test hook", between=halve)
        told: list[object] = []
        spans: list[object] = []
        for key, length in (("x", 1000), ("y", 333)):
            for part in hierarchy.parts(length, 4, key):
                told.append((part.key, part.length, dist.get_process_group_ranks(part.group)))
                spans.append((key, part.start, part.length))
        x, y = _values(number, 1000, torch.float32), _values(number, 333, torch.float32)
        plain = [x.clone(), y.clone()]
        works = [hierarchy.start(x, "x"), hierarchy.start(y, "y")]
        for work in works:
            work.wait()
        for one in plain:
            dist.all_reduce(one)
        right = torch.equal(x, plain[0] / 2) and torch.equal(y, plain[1] / 2)
        dist.barrier()
        hierarchy.close()
        return told, seen, spans, right

    results = together(rank, ranks=5)

    for told, seen, _, right in results:
        assert seen == told
        assert right
    for members, length, key in (((0, 2, 3), 1000, "x"), ((1, 4), 333, "y")):
        covered = sorted(
            element for member in members for name, start, size in results[member][2] if name == key
            for element in range(start, start + size)
        )  # fmt: skip
        assert covered == list(range(length))


def test_a_killed_rank_ends_what_the_others_wait_for(tmp_path):
    """Rank 1 is killed; rank 0 shares its host, rank 2 its part of the vector, and rank 3 hears through them."""

    def rank(number: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 4)
        dist.init_process_group("gloo", store=store, rank=number, world_size=4, timeout=timedelta(seconds=60))
        hierarchy = Hierarchy(dist.group.WORLD, _hosts("AABB", number, "death"), "test death")
        hierarchy.start(torch.ones(10_000)).wait()
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ConnectionError) as caught:
            hierarchy.start(torch.ones(10_000)).wait()
        with pytest.raises(ConnectionError):
            hierarchy.start(torch.ones(1)).wait()
        (tmp_path / f"said-{number}").write_text(str(caught.value))

    begun = time.monotonic()
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                rank(number)
            finally:
                os._exit(sys.exc_info()[0] is not None)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]

    assert codes == [0, -signal.SIGKILL, 0, 0]
    assert time.monotonic() - begun < 30  # half of the limit that a wait without news would have used up
    for number in (0, 2, 3):
        assert re.search(PEER_GONE, (tmp_path / f"said-{number}").read_text())


def test_who_waits_when_all_is_closed_is_told(together):
    def rank(number: int) -> str:
        hierarchy = Hierarchy(dist.group.WORLD, _hosts("AA", number, "closed"), "test closed")
        works = [hierarchy.start(torch.ones(10))] if number == 0 else []  # The other never comes.
        hierarchy.close()
        works.append(hierarchy.start(torch.ones(10)))
        told = []
        for work in works:
            with pytest.raises(ConnectionError) as caught:
                work.wait()
            told.append(str(caught.value))
        return told[-1]

    assert all("closed" in told for told in together(rank, ranks=2))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BrokenPipeError("broken pipe"), ConnectionError),
        (RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer"), ConnectionError),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), RuntimeError),
        (SpecError("a bug of the job"), SpecError),
        (KeyError("a bug of ours"), KeyError),
    ],
)
def test_only_what_tells_of_a_peer_counts_as_a_lost_peer(error, raised):
    work = Pending()
    work.end(error)

    with pytest.raises(raised) as caught:
        work.wait()

    assert type(caught.value) is raised
    assert caught.value is error or caught.value.__cause__ is error


def test_local_addresses_are_short_and_follow_from_the_token():
    many = range(1000)
    first, other = (group_by_host([("A",)] * 1000, me=0, token=token) for token in ("one", "other"))
    name = "-".join(map(str, many))

    assert len({_address(name, hosts, index) for hosts in (first, other) for index in many}) == 2000
    assert all(len(_address(name, first, index).encode()) <= 107 for index in many)  # unix(7): sun_path, less one


def test_memory_that_cannot_be_mapped_is_a_want_of_the_machine():
    with pytest.raises(CapacityError, match="cannot map") as caught:
        _memory({}, 0, 2**47)

    assert "ulimit -v" in caught.value.hint
    assert 8 * _room(8) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def test_memory_is_lent_empty_again_and_what_was_not_lent_is_copied(together):
    def rank(number: int) -> tuple[bool, list[float], list[float]]:
        hierarchy = Hierarchy(dist.group.WORLD, _hosts("AA", number, "again"), "test again")
        first = hierarchy.empty(100)
        first += 7
        dist.barrier()
        hierarchy.take_back()
        second, other = hierarchy.empty(100), hierarchy.empty(10, torch.float64)
        is_same = first.data_ptr() == second.data_ptr()
        was_empty = not second.any() and not other.any()
        # Part of a lent tensor, and a tensor that only looks like one.
        second += number + 1
        mine = torch.full((100,), float(number + 1))
        works = [hierarchy.start(second[20:30]), hierarchy.start(mine), hierarchy.start(other)]
        for work in works:
            work.wait()
        dist.barrier()
        hierarchy.close()
        return is_same and was_empty, second[[0, 19, 20, 29, 30]].tolist(), mine.unique().tolist()

    for number, result in enumerate(together(rank, ranks=2)):
        own = float(number + 1)
        assert result == (True, [own, own, 3.0, 3.0, own], [3.0])


def test_nothing_of_the_memory_has_a_name(together):
    def rank(number: int) -> tuple[bool, set[str]]:
        before = set(os.listdir("/dev/shm"))
        hierarchy = Hierarchy(dist.group.WORLD, _hosts("AA", number, "names"), "test names")
        hierarchy.start(torch.ones(1000)).wait()
        named = {name for name in set(os.listdir("/dev/shm")) - before if "supernode" in name}
        mapped = "memfd:supernode-shared" in Path("/proc/self/maps").read_text()
        dist.barrier()
        hierarchy.close()
        return mapped, named

    assert together(rank, ranks=2) == [(True, set())] * 2
