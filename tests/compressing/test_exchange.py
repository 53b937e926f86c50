"""What a compressor holds back arrives later, ranks end alike, and its state is all that the next step needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from supernode.compressing.choose import COMPRESSORS, compressor
from supernode.compressing.compressor import Compressor
from supernode.errors import SpecError
from supernode.schema.spread import Communication

Together = Callable[..., list[Any]]

BUCKET = [("a", (68, 40)), ("norm", (40,)), ("b", (30, 90)), ("tiny", (3, 3)), ("c", (80, 33))]
"""Matrices of a block of any codec at least."""
SIZES = [68 * 40, 40, 30 * 90, 9, 80 * 33]
NUMBERS = sum(SIZES)
KINDS = list(COMPRESSORS)


def made(kind: str, **said: Any) -> Compressor[Any]:
    found = compressor(Communication(compress=kind, **{"density": 0.1, "rank": 3} | said), seed=5)  # type: ignore[arg-type]
    assert found is not None
    return found


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(100 * step + rank))


def held_back(one: Compressor[Any], key: str) -> Tensor:
    """Return this rank's feedback, laid out as the bucket is."""
    entry, lost = one.entries[key], torch.zeros(NUMBERS)
    kept = entry.kept["feedback"].clone()
    if "feedback_of_sums" in entry.kept:
        share, me = entry.share, dist.get_rank()
        sums = entry.kept["feedback_of_sums"]
        mine = kept[share * me : share * (me + 1)]
        mine.add_(sums[: len(mine)])
    entry.lay.put(lost, kept, torch.zeros(entry.lay.exact))
    return lost


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_was_sent_and_what_is_held_back_add_up_to_the_gradients(together: Together, ranks: int) -> None:
    steps = 6

    def train(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        group, found = dist.group.WORLD, {}
        assert group is not None
        for kind in KINDS:
            one, sent = made(kind), torch.zeros(NUMBERS)
            one.prepare("k", BUCKET, group)
            for step in range(steps):
                flat = gradient(rank, step)
                one.exchange(flat, group, "k")
                sent += flat
            found[kind] = sent, held_back(one, "k")
        return found

    everyone = together(train, ranks=ranks)

    true = torch.stack([gradient(rank, step) for rank in range(ranks) for step in range(steps)]).sum(0)
    for kind in KINDS:
        sent = everyone[0][kind][0]
        for other in everyone[1:]:
            assert torch.equal(sent, other[kind][0]), f"{kind}: ranks ended apart"
        left = torch.stack([one[kind][1] for one in everyone]).sum(0)
        torch.testing.assert_close(sent + left, true, rtol=0, atol=1e-3, msg=kind)
        assert float(left.abs().max()) > 1e-4, f"{kind} held nothing back, so nothing was shown"


def test_equal_gradients_repeated_arrive_in_the_mean(together: Together) -> None:
    def train(rank: int) -> dict[str, list[float]]:
        group, found = dist.group.WORLD, {}
        assert group is not None
        true = gradient(0, 0) + gradient(1, 0)
        for kind in KINDS:
            one, sent, found[kind] = made(kind), torch.zeros(NUMBERS), []
            one.prepare("k", BUCKET, group)
            for step in range(160):
                flat = gradient(rank, 0)
                one.exchange(flat, group, "k")
                sent += flat
                if step + 1 in (20, 160):
                    found[kind].append(float((sent / (step + 1) - true).norm() / true.norm()))
        return found

    for kind, (early, late) in together(train)[0].items():
        # The residual is bounded, so after eight times as many steps the mean is off by an eighth. Numbers far above
        # the mean of their block wait longer for their bits, and thin matrices turn to new directions first.
        assert late < {"powersgd": 0.6, "onebit": 0.5, "levels7": 0.45}.get(kind, 0.25) * early, kind


def test_vectors_arrive_as_they_are_and_so_does_all_in_the_warm_up(together: Together) -> None:
    def train(rank: int) -> dict[str, list[Tensor]]:
        group, found = dist.group.WORLD, {}
        assert group is not None
        for kind in KINDS:
            one, found[kind] = made(kind, warmup=1), []
            one.prepare("k", BUCKET, group)
            for step in range(2):
                one.step = step
                flat = gradient(rank, step)
                one.exchange(flat, group, "k")
                found[kind].append(flat)
        return found

    for kind, (warm, cold) in together(train)[0].items():
        assert torch.equal(warm, gradient(0, 0) + gradient(1, 0)), kind
        true = gradient(0, 1) + gradient(1, 1)
        for got, wanted, name in zip(cold.split(SIZES), true.split(SIZES), (n for n, _ in BUCKET), strict=True):
            assert torch.equal(got, wanted) == (name in ("norm", "tiny")), (kind, name)


def test_gradients_of_low_rank_arrive_whole(together: Together) -> None:
    left, right = torch.randn(50, 3), torch.randn(3, 70)

    def train(rank: int) -> Tensor:
        assert dist.group.WORLD is not None
        one = made("powersgd")
        one.prepare("k", [("m", (50, 70))], dist.group.WORLD)
        flat = (left * (rank + 1) @ right).reshape(-1)
        one.exchange(flat, dist.group.WORLD, "k")
        return flat.view(50, 70)

    torch.testing.assert_close(together(train)[0], 3 * left @ right, rtol=1e-4, atol=1e-4)


def test_bases_are_alike_where_processors_round_otherwise(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.linalg.qr

    def train(rank: int) -> Tensor:
        if rank == 1:  # As far apart as can be: an orthogonal basis that points the other way.
            monkeypatch.setattr(torch.linalg, "qr", lambda p: type(exact(p))((-exact(p).Q, -exact(p).R)))
        assert dist.group.WORLD is not None
        one = made("powersgd")
        one.prepare("k", BUCKET, dist.group.WORLD)
        flat = gradient(0, 0)
        one.exchange(flat, dist.group.WORLD, "k")
        return flat

    first, second = together(train)
    assert torch.equal(first, second)
    assert float(first[: SIZES[0]] @ gradient(0, 0)[: SIZES[0]]) > 0


def test_what_is_sent_of_a_parameter_does_not_depend_on_its_bucket(together: Together) -> None:
    def train(rank: int) -> list[str]:
        group, differing = dist.group.WORLD, []
        assert group is not None
        for kind in KINDS:
            one = made(kind)
            one.prepare("whole", BUCKET, group)
            for name, shape in BUCKET:
                one.prepare(name, [(name, shape)], group)
            for step in range(3):
                whole, parts = gradient(rank, step), gradient(rank, step).split(SIZES)
                one.exchange(whole, group, "whole")
                for (name, _), part, wanted in zip(BUCKET, parts, whole.split(SIZES), strict=True):
                    one.exchange(part, group, name)
                    if not torch.equal(part, wanted):
                        differing.append(f"{kind} {name} {step}")
        return differing

    assert together(train) == [[], []]


def test_shards_of_a_bucket_are_summed_each_on_its_own(together: Together) -> None:
    cut = 68 * 40 + 40 + 7 * 90 + 11  # In the middle of a row of `b`.

    def train(rank: int) -> dict[str, Tensor]:
        group, found = dist.group.WORLD, {}
        assert group is not None
        for kind in KINDS:
            one, sent = made(kind), torch.zeros(NUMBERS + 5)  # The last shard is padded.
            one.prepare("0", BUCKET, group, start=0, length=cut)
            one.prepare("1", BUCKET, group, start=cut, length=NUMBERS + 5 - cut)
            for _ in range(30):
                flat = torch.cat((gradient(rank, 0), torch.zeros(5)))
                one.exchange(flat[:cut], group, "0")
                one.exchange(flat[cut:], group, "1")
                sent += flat / 30
            found[kind] = sent
        return found

    true = gradient(0, 0) + gradient(1, 0)
    for kind, sent in together(train)[0].items():
        assert torch.equal(sent[NUMBERS:], torch.zeros(5)), kind
        assert float((sent[:NUMBERS] - true).norm() / true.norm()) < (0.7 if kind == "powersgd" else 0.3), kind


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_is_not_finite_is_told_to_all_and_leaves_no_trace(together: Together, ranks: int) -> None:
    def train(rank: int) -> dict[str, tuple[bool, bool]]:
        group, found = dist.group.WORLD, {}
        assert group is not None
        for kind in KINDS:
            one = made(kind)
            one.prepare("k", BUCKET, group)
            one.exchange(gradient(rank, 0), group, "k")
            before = {name: tensor.clone() for name, tensor in one.state().items()}
            flat = gradient(rank, 1)
            flat[100] = float("inf") if rank == 1 else flat[100]
            one.exchange(flat, group, "k")
            same = all(torch.equal(tensor, before[name]) for name, tensor in one.state().items())
            found[kind] = bool(flat.isfinite().all()), same
        return found

    for told in together(train, ranks=ranks):
        assert told == dict.fromkeys(KINDS, (False, True))


def test_a_loaded_state_goes_on_to_the_bit_and_one_of_other_buckets_is_refused(together: Together) -> None:
    def train(rank: int) -> list[str]:
        group, wrong = dist.group.WORLD, []
        assert group is not None
        for kind in KINDS:
            one, two, other = made(kind), made(kind), made(kind)
            one.prepare("k", BUCKET, group)
            two.prepare("k", BUCKET, group)
            other.prepare("k", [("a", (40, 68)), *BUCKET[1:]], group)
            one.exchange(gradient(rank, 0), group, "k")
            saved = {name: tensor.clone() for name, tensor in one.state().items()}
            if not two.load(saved):
                wrong.append(f"{kind}: not loaded")
            unbroken, resumed = gradient(rank, 1), gradient(rank, 1)
            one.exchange(unbroken, group, "k")
            two.exchange(resumed, group, "k")
            if not torch.equal(unbroken, resumed):
                wrong.append(f"{kind}: another number")
            if other.load(saved):
                wrong.append(f"{kind}: loaded what is of other shapes")
        return wrong

    assert together(train) == [[], []]


def test_feedback_follows_the_scale_of_the_loss(together: Together) -> None:
    def train(rank: int) -> list[bool]:
        group = dist.group.WORLD
        assert group is not None
        alike = []
        for kind in KINDS:
            plain, scaled = made(kind), made(kind)
            plain.prepare("k", BUCKET, group)
            scaled.prepare("k", BUCKET, group)
            plain.exchange(gradient(rank, 0), group, "k")
            scaled.exchange(gradient(rank, 0) * 1024, group, "k")
            scaled.scale(1 / 4)
            one, other = gradient(rank, 1), gradient(rank, 1) * 256
            plain.exchange(one, group, "k")
            scaled.exchange(other, group, "k")
            alike.append(torch.allclose(one, other / 256, atol=1e-4))
        return alike

    assert together(train) == [[True] * len(KINDS)] * 2


def test_halves_come_back_as_halves(together: Together) -> None:
    def train(rank: int) -> list[torch.dtype]:
        assert dist.group.WORLD is not None
        found = []
        for kind in KINDS:
            one, flat = made(kind), gradient(rank, 0).bfloat16()
            one.prepare("k", BUCKET, dist.group.WORLD)
            one.exchange(flat, dist.group.WORLD, "k")
            found.append(flat.dtype if bool(flat.isfinite().all()) else torch.bool)
        return found

    assert together(train) == [[torch.bfloat16] * len(KINDS)] * 2


def test_a_key_must_be_announced() -> None:
    with pytest.raises(SpecError, match="bucket `k`"):
        made("int8").exchange(torch.zeros(3), None, "k")  # type: ignore[arg-type]


def test_in_the_warm_up_a_key_need_not_be_announced(together: Together) -> None:
    def train(rank: int) -> list[list[float]]:
        found = []
        for kind in KINDS:
            one, flat = made(kind, warmup=1), torch.full((2,), rank + 1.0)
            one.exchange(flat, dist.group.WORLD, "k")  # type: ignore[arg-type]
            found.append(flat.tolist())
        return found

    assert together(train) == [[[3.0, 3.0]] * len(KINDS)] * 2


def test_no_compressor_is_made_where_none_is_wanted() -> None:
    assert compressor(Communication()) is None
