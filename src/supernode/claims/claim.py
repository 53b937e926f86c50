"""What is a claim, and when does it hold? The nouns of the table, and the one rule that judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

How = Literal["run", "replay", "model"]
"""Real processes here; a real trace or published table; computed by the model that replays confirm."""
Goal = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all claims stand on, so that one can see them move.

    Attributes:
        network: bandwidth between nodes (or supernodes), as a part of what each claim assumes.
        radix: cards on a leaf switch, or along an edge of a torus, where a claim is of the fabric alone; 0 for its own.
        failures: of all parts and software, as a part of what each claim of reliability assumes.
    """

    network: float = 1.0
    radix: int = 0
    failures: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is claimed.

    Attributes:
        id: system and number, such as `S3.1`.
        says: in words.
        figure: that is claimed, in `unit`.
        goal: whether more or less is better.
        unit: `%` (the figure is a part of 1), `×` or another word.
    """

    id: str
    says: str
    figure: float
    goal: Goal
    unit: str

    def met(self, figure: float) -> bool:
        """Return whether a figure is as good as the claim, the rounding of its last digit granted."""
        return figure >= self.figure * 0.995 if self.goal == "at least" else figure <= self.figure * 1.005

    def words(self, figure: float) -> str:
        """Return a figure with its unit.

        >>> Claim(id="S0.1", says="", figure=0.3, goal="at least", unit="%").words(0.2525)
        '25.2%'
        """
        if self.unit == "%":
            return f"{100 * figure:,.3g}%" if figure < 10 else f"{100 * figure:,.0f}%"
        return f"{figure:.3g}×" if self.unit == "×" else f"{figure:.3g} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The same figure under other assumptions.

    Attributes:
        over: what is varied, with its unit.
        points: what it is, and the figure there; in order.
    """

    over: str
    points: tuple[tuple[float | str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the product computes for a claim.

    Attributes:
        ours: the figure, in the claim's unit.
        baseline: what it is compared with, in words.
        assumptions: what it rests on, one sentence each.
        how: how it was shown.
        by: what computed it.
    """

    ours: float
    baseline: str
    sweep: Sweep
    assumptions: tuple[str, ...] = ()
    how: How = "model"
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a claim holds: `holds`, `holds under` other assumptions, or `does not hold`, with the nearest figure."""

    word: Literal["holds", "holds under", "does not hold"]
    detail: str = ""


Show = Callable[[Setting], Shown]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the table."""

    claim: Claim
    shown: Shown
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", judge(self.claim, self.shown))


def judge(claim: Claim, shown: Shown) -> Verdict:
    """Return whether what is shown meets what is claimed, where, and else what comes nearest."""
    if claim.met(shown.ours):
        return Verdict(word="holds")
    good = [at for at, figure in shown.sweep.points if claim.met(figure)]
    if good:
        said = [at if isinstance(at, str) else f"{at:,.4g}" for at in good]
        shortened = said if len(said) <= 4 else [*said[:2], "…", said[-1]]
        return Verdict(word="holds under", detail=f"{shown.sweep.over}: {', '.join(shortened)}")
    every = [("as assumed", shown.ours), *shown.sweep.points]
    at, best = (max if claim.goal == "at least" else min)(every, key=lambda point: point[1])
    where = at if isinstance(at, str) else f"{shown.sweep.over} {at:,.4g}"
    return Verdict(word="does not hold", detail=f"nearest {claim.words(best)} ({where})")
