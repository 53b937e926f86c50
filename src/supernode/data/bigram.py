"""How well does counting pairs of tokens predict the text? The baseline that a trained model has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from supernode.data.corpus import Corpus, load_tokens

DENSE_VOCABULARY = 1024
"""Up to here all pairs are counted in one table (8 MB)."""
ADDED = 0.1
"""Added to every count, so that what was never seen stays possible."""
PRIOR = 100.0
"""Occurrences of a token at which its own followers weigh as much as the frequencies of all tokens."""
_AT_ONCE = 2**22

Counts = np.ndarray[Any, np.dtype[np.int64]]
Tokens = np.ndarray[Any, Any]


def bigram_loss(corpus: Corpus, *, tokens: int = 0) -> float:
    """Return the held-out loss of a smoothed bigram model of the training tokens, in nats per token.

    A vocabulary of at most 1024 has (count + 0.1) / (total + 0.1 × vocabulary). A larger one mixes the counts of pairs
    with the frequencies of single tokens, which weigh as 100 more occurrences would.

    Args:
        tokens: of the held-out text, from its start, that the model is judged on; 0 for all.

    Source: MacKay and Peto, "A hierarchical Dirichlet language model", Natural Language Engineering 1(3), 1995.
    """
    train = load_tokens(corpus.train, corpus.dtype)
    held_out = load_tokens(corpus.held_out, corpus.dtype)[: tokens or None]
    loss = _dense if corpus.vocabulary <= DENSE_VOCABULARY else _sparse
    return loss(train, held_out, corpus.vocabulary)


def _dense(train: Tokens, held_out: Tokens, vocabulary: int) -> float:
    counts = _table(train, vocabulary)
    totals = counts.sum(axis=1, keepdims=True)
    log_likelihood = np.log(counts + ADDED) - np.log(totals + ADDED * vocabulary)
    return float(-(_table(held_out, vocabulary) * log_likelihood).sum() / (len(held_out) - 1))


def _table(tokens: Tokens, vocabulary: int) -> Counts:
    """Return how often each token (row) is followed by each (column)."""
    counts = np.zeros(vocabulary**2, np.int64)
    for pairs in _pairs(tokens, vocabulary):
        counts += np.bincount(pairs, minlength=vocabulary**2)
    return counts.reshape(vocabulary, vocabulary)


def _pairs(tokens: Tokens, vocabulary: int) -> Iterator[Tokens]:
    """Yield every pair of neighbours as one number, some millions at a time."""
    for start in range(0, len(tokens) - 1, _AT_ONCE):
        part = tokens[start : start + _AT_ONCE + 1].astype(np.uint32)
        yield part[:-1] * np.uint32(vocabulary) + part[1:]


def _sparse(train: Tokens, held_out: Tokens, vocabulary: int) -> float:
    singles = np.bincount(train, minlength=vocabulary)
    frequencies = (singles + ADDED) / (len(train) + ADDED * vocabulary)
    firsts = singles - np.bincount(train[-1:], minlength=vocabulary)  # the last token has no follower
    ordered = np.sort(np.concatenate(list(_pairs(train, vocabulary))))
    wanted, times = np.unique(np.concatenate(list(_pairs(held_out, vocabulary))), return_counts=True)
    counts = np.searchsorted(ordered, wanted, "right") - np.searchsorted(ordered, wanted, "left")
    first, second = np.divmod(wanted.astype(np.int64), vocabulary)
    likelihood = (counts + PRIOR * frequencies[second]) / (firsts[first] + PRIOR)
    return float(-(times * np.log(likelihood)).sum() / times.sum())
