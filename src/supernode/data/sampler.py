"""Which samples does a global batch hold? A function of step and seed alone, so that a restart finds its place."""

from __future__ import annotations

from typing import Any

import numpy as np

from supernode.errors import DataError

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Sampler:
    """Deals the samples out in batches; every epoch deals each sample once, in an order of its own.

    The order comes from the raw bits of PCG64, which NumPy keeps the same for all versions (its `permutation` it does
    not), so a checkpoint may go on under another NumPy.

    Args:
        length: samples in the data set.
        batch: samples in one step, over all cards.
        drop_last: leave out the short batch at the end of an epoch; other samples miss out in each epoch.

    Raises:
        DataError: there is no sample, or not one whole batch with `drop_last`.
    """

    def __init__(self, length: int, batch: int, seed: int, drop_last: bool) -> None:
        if length < 1:
            raise DataError("the training data holds no sample", hint="give more data, or lower `data.sequence`.")
        if drop_last and length < batch:
            raise DataError(
                f"the training data holds {length} samples, fewer than one `batch` of {batch}",
                hint=f"set `batch` to {length} or less, or `data.drop_last` to false.",
            )
        self.length, self.batch, self.seed = length, batch, seed
        self._kept = length - length % batch if drop_last else length
        self._epoch = -1
        self._order: Indices = np.empty(0, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every sample was dealt once."""
        return -(-self._kept // self.batch)

    def samples_before(self, step: int) -> int:
        """Return how many samples the steps before `step` held."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * self._kept + rest * self.batch

    def indices(self, step: int) -> Indices:
        """Return the samples of one step, counted from 0; the last step of an epoch may hold fewer than `batch`."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.length)
            self._epoch, self._order = epoch, np.argsort(bits, kind="stable")
        return self._order[place * self.batch : min((place + 1) * self.batch, self._kept)].copy()
