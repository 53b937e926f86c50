"""Saves come as often as their cost and failures make best, from the first measured one on."""

from __future__ import annotations

from supernode.training.pacing import FIRST, Pace


def test_the_interval_follows_what_is_seen() -> None:
    pace = Pace(between_failures=10_000.0, step=3)
    for _ in range(FIRST):
        pace.stepped(0.5)

    due = [step for step in range(4, 40) if pace.is_due(step)]
    assert due == [13, 23, 33]
    pace.saved(stall=0.05, took=2.0)
    # √(2 · 0.05 · 10⁴) = 31.6 s, in steps of half a second.
    assert pace.every == 63
    assert [step for step in range(40, 170) if pace.is_due(step)] == [96, 159]
    pace.saved(stall=0.05, took=58.0)
    assert pace.every == 116  # A disk too slow for that: one save after the other.
    for _ in range(200):
        pace.stepped(5.0)
    assert pace.every == 12
