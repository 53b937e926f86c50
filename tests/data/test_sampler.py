from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supernode.data.sampler import Sampler
from supernode.errors import DataError

lengths = st.integers(1, 200)
batches = st.integers(1, 50)
ORDER_OF_EIGHT = [3, 2, 1, 6, 0, 7, 4, 5]


@given(length=lengths, batch=batches, seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_an_epoch_holds_every_sample_once(length: int, batch: int, seed: int, epoch: int) -> None:
    sampler = Sampler(length=length, batch=batch, seed=seed, drop_last=False)

    first = epoch * sampler.steps_per_epoch
    dealt = np.concatenate([sampler.indices(first + step) for step in range(sampler.steps_per_epoch)])

    assert sorted(dealt) == list(range(length))


@given(length=lengths, batch=batches, steps=st.lists(st.integers(0, 60), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_step_holds_the_same_samples_whatever_was_asked_before(length: int, batch: int, steps: list[int]) -> None:
    asked = Sampler(length=length, batch=batch, seed=7, drop_last=False)

    for step in steps:
        fresh = Sampler(length=length, batch=batch, seed=7, drop_last=False)
        assert asked.indices(step).tolist() == fresh.indices(step).tolist()


@given(length=lengths, batch=batches, drop_last=st.booleans(), steps=st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_samples_before_a_step_are_those_that_the_steps_held(
    length: int, batch: int, drop_last: bool, steps: int
) -> None:
    batch = min(batch, length) if drop_last else batch
    sampler = Sampler(length=length, batch=batch, seed=1, drop_last=drop_last)

    held = sum(len(sampler.indices(step)) for step in range(steps))

    assert sampler.samples_before(steps) == held


def test_the_last_batch_of_an_epoch_is_short_unless_it_is_dropped() -> None:
    kept = Sampler(length=10, batch=4, seed=0, drop_last=False)
    dropped = Sampler(length=10, batch=4, seed=0, drop_last=True)

    assert [len(kept.indices(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [len(dropped.indices(step)) for step in range(4)] == [4, 4, 4, 4]
    assert (kept.steps_per_epoch, dropped.steps_per_epoch) == (3, 2)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    one = Sampler(length=100, batch=100, seed=0, drop_last=False)
    other = Sampler(length=100, batch=100, seed=1, drop_last=False)

    orders = [one.indices(0).tolist(), one.indices(1).tolist(), other.indices(0).tolist()]

    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] != list(range(100))


def test_the_order_is_that_of_other_machines_and_versions() -> None:
    sampler = Sampler(length=8, batch=8, seed=0, drop_last=False)

    # Written down once: a checkpoint must find its place under another NumPy.
    assert sampler.indices(0).tolist() == ORDER_OF_EIGHT


def test_changing_a_batch_leaves_the_order_alone() -> None:
    sampler = Sampler(length=8, batch=8, seed=0, drop_last=False)

    sampler.indices(0)[:] = 0

    assert sampler.indices(0).tolist() == ORDER_OF_EIGHT


@pytest.mark.parametrize(("length", "drop_last", "named"), [(3, True, "`batch`"), (0, False, "no sample")])
def test_too_few_samples_are_a_data_error(length: int, drop_last: bool, named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        Sampler(length=length, batch=4, seed=0, drop_last=drop_last)

    assert caught.value.hint
