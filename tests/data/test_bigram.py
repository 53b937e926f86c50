from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from supernode.data.bigram import bigram_loss
from supernode.data.corpus import Corpus


def corpus(folder: Path, train: list[int], held_out: list[int], *, vocabulary: int) -> Corpus:
    dtype = "uint8" if vocabulary <= 256 else "uint16"
    for name, tokens in (("train.bin", train), ("held_out.bin", held_out)):
        np.asarray(tokens, dtype).tofile(folder / name)
    return Corpus(
        train=folder / "train.bin",
        held_out=folder / "held_out.bin",
        dtype=dtype,
        train_tokens=len(train),
        held_out_tokens=len(held_out),
        vocabulary=vocabulary,
        fingerprint="",
        tokenizer=None,
    )


def test_the_loss_of_a_small_vocabulary_is_that_of_added_counts(tmp_path: Path) -> None:
    small = corpus(tmp_path, train=[0, 1, 0, 1, 0, 0], held_out=[0, 1, 1], vocabulary=2)

    loss = bigram_loss(small)

    # Pairs in train: 01 twice, 10 twice, 00 once. p(1|0) = 2.1 / 3.2, p(1|1) = 0.1 / 2.2.
    assert loss == pytest.approx(-(math.log(2.1 / 3.2) + math.log(0.1 / 2.2)) / 2, rel=1e-12)


def test_the_loss_of_a_large_vocabulary_mixes_in_the_frequencies(tmp_path: Path) -> None:
    large = corpus(tmp_path, train=[5, 6, 5, 6, 5, 9], held_out=[5, 6, 7], vocabulary=2000)

    loss = bigram_loss(large)

    # u(t) = (count + 0.1) / (6 + 200). p(6|5) = (2 + 100 u(6)) / (3 + 100); p(7|6) = (0 + 100 u(7)) / (2 + 100).
    first = (2 + 100 * 2.1 / 206) / 103
    second = (100 * 0.1 / 206) / 102
    assert loss == pytest.approx(-(math.log(first) + math.log(second)) / 2, rel=1e-12)


def test_a_uniform_model_is_what_no_knowledge_gives(tmp_path: Path) -> None:
    unseen = corpus(tmp_path, train=[0, 0, 0], held_out=[3, 4, 5], vocabulary=16)

    assert bigram_loss(unseen) == pytest.approx(math.log(16))


def test_probabilities_of_a_large_vocabulary_add_up_to_one(tmp_path: Path) -> None:
    train = np.random.default_rng(0).integers(0, 1025, 4000).tolist()
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    singles = Counter(train)

    def likelihood(first: int, second: int) -> float:
        frequency = (singles[second] + 0.1) / (len(train) + 102.5)
        return (pairs[first, second] + 100 * frequency) / (firsts[first] + 100)

    assert sum(likelihood(train[-1], second) for second in range(1025)) == pytest.approx(1)
    some = corpus(tmp_path, train=train, held_out=[train[-1], 3, 4], vocabulary=1025)
    expected = -(math.log(likelihood(train[-1], 3)) + math.log(likelihood(3, 4))) / 2
    assert bigram_loss(some) == pytest.approx(expected)
