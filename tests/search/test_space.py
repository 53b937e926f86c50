"""Does a space hold every valid strategy once, and no other?"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.errors import SpecError
from supernode.search.exhaustive import every_strategy
from supernode.search.space import AXES, Space, divisors, row_table
from supernode.workload.shape import ModelShape, gpt_shape, make_shape
from supernode.workload.strategy import Software

SMALL = gpt_shape(layers=4, width=64, heads=4, vocabulary=256, positions=512)
MIXTURE = make_shape(
    width=64, vocabulary=256, attentions=3, heads=4, key_value_heads=2, head_width=16, mixtures=3, experts=4, routed=2,
    expert_width=32, gated=1, mlps=0, mlp_width=0,
)  # fmt: skip


def small_space(
    model: ModelShape = SMALL, *, cards: tuple[int, ...] = (4,), batch: int = 4, **options: object
) -> Space:
    """Return a space of a few hundred strategies."""
    return Space(model=model, cards=cards, batch=batch, sequence=512, **{"offloads": (0, 2), **options})  # type: ignore[arg-type]


def listed(space: Space) -> Counter[tuple[float, ...]]:
    """Return how often each strategy appears in a space's blocks."""
    seen: Counter[tuple[float, ...]] = Counter()
    for block in space.blocks(size=7):
        for option in block.offloads:
            for place in range(block.strategies // len(block.offloads)):
                axes = block.pick(option, place)
                seen[tuple(axes[name] for name in AXES)] += 1
    return seen


@pytest.mark.parametrize("model", [SMALL, MIXTURE], ids=["dense", "mixture"])
def test_every_valid_strategy_appears_exactly_once(model: ModelShape) -> None:
    space = small_space(model, cards=(2, 4), overlaps=(False, True))
    seen = listed(space)

    wanted = {tuple(axes[name] for name in AXES) for axes in every_strategy(space)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}
    assert space.strategies == len(wanted)


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 6), cards=st.sampled_from([1, 2, 3, 4, 6]), batch=st.integers(1, 6), spare=st.integers(0, 2),
    flash=st.booleans(),
)  # fmt: skip
def test_a_space_is_what_plain_loops_find(layers: int, cards: int, batch: int, spare: int, flash: bool) -> None:
    model = gpt_shape(layers=layers, width=48, heads=6, vocabulary=64, positions=512)
    software = Software(flash=flash)
    space = small_space(model, cards=(cards,), batch=batch, spare=spare, software=software, offloads=(0,))

    wanted = Counter(tuple(axes[name] for name in AXES) for axes in every_strategy(space))
    assert listed(space) == wanted


def test_degrees_multiply_to_the_cards_and_divide_what_they_spread() -> None:
    model = gpt_shape(layers=96, width=12288, heads=96, vocabulary=51200, positions=2048)
    table = row_table(Space(model=model, cards=(512,), batch=512, sequence=2048))

    product = table["tensor"] * table["context"] * table["pipeline"] * table["data"]
    assert np.all(product == 512)
    assert np.all(96 % table["tensor"] == 0)
    assert np.all(512 % (table["data"] * table["micro_batch"]) == 0)
    is_interleaved = table["interleave"] > 1
    many = 512 / table["data"] / table["micro_batch"]
    assert np.all(many[is_interleaved] % table["pipeline"][is_interleaved] == 0)


def test_an_embedding_and_a_head_may_stand_for_layers() -> None:
    model = gpt_shape(layers=126, width=128, heads=8, vocabulary=256, positions=512)
    stages = {
        spare: set(row_table(Space(model=model, cards=(16,), batch=16, sequence=512, spare=spare))["pipeline"])
        for spare in (0, 2)
    }

    assert 16.0 not in stages[0]
    assert 16.0 in stages[2]


def test_a_space_without_cards_is_refused() -> None:
    with pytest.raises(SpecError, match="cards"):
        Space(model=SMALL, cards=(), batch=1, sequence=1)


def test_divisors_of_a_prime_are_one_and_itself() -> None:
    assert divisors(13) == [1, 13]
    assert divisors(16) == [1, 2, 4, 8, 16]
