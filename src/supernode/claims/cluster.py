"""S17: how far does one job scale over supernodes, and how long does a trillion parameters take there?"""

from __future__ import annotations

from dataclasses import replace

from supernode.claims.claim import Setting, Shown, Sweep
from supernode.simulation.completion import Rhythm, expected_seconds
from supernode.simulation.goodput import DAY, LLAMA_RATE
from supernode.simulation.million import SIZES, Tiers, Work, curve, step_at
from supernode.workload.shape import ModelShape, gpt_shape

WEEK = 7 * DAY
TOKENS = 20e12  # 20 for each parameter: Hoffmann et al., arXiv:2203.15556, table 3
BATCH = 64 * 2**20  # tokens of a step; four times Llama 3 405B's last 16 Mi (arXiv:2407.21783, section 3.4.1)
PAUSE = 600.0  # seconds from an interruption to the next useful step; an estimate
SAVE = 60.0  # seconds that a checkpoint stops training; an estimate


def trillion() -> ModelShape:
    """Return SC'21's model of a trillion parameters: Narayanan et al., arXiv:2104.04473, table 1."""
    return gpt_shape(layers=128, width=25_600, heads=160, vocabulary=51_200, positions=2048)


def million_cards(setting: Setting) -> Shown:
    """Return the efficiency of 2,048 supernodes of 512 cards over one's, the work of each card kept."""
    tiers, work = _tiers(setting), Work()
    points = curve(tiers, work, SIZES)
    return Shown(
        ours=points[-1].efficiency,
        baseline="one supernode of 512 cards",
        sweep=Sweep(over="cards", points=tuple((point.cards, point.efficiency) for point in points)),
        assumptions=(
            f"Llama 3 405B, tensor {work.tensor} × pipeline {work.pipeline} in the supernode, data over all; "
            f"{work.micro_batches} samples of {work.sequence:,} tokens on each copy.",
            f"{tiers.between * 8 / 1e9:.0f} Gbit/s of each card between supernodes, not oversubscribed; nodes differ "
            f"by {tiers.spread:.1%}.",
            "Weak scaling, failures left out: whether a model learns from so large a batch is not asked.",
        ),
        by="simulation.million",
    )


def trillion_weeks(setting: Setting) -> Shown:
    """Return the weeks that a trillion parameters take on 512 supernodes, where one takes years."""
    tiers, model = _tiers(setting), trillion()
    sizes = (1, 8, 16, 32, 64, 128, 256, 512)
    weeks = {count * tiers.supernode_cards: _weeks(tiers, model, count) for count in sizes}
    first, last = weeks[tiers.supernode_cards], weeks[tiers.supernode_cards * sizes[-1]]
    return Shown(
        ours=last,
        baseline=f"one supernode of {tiers.supernode_cards} cards: {first / (365 / 7):.1f} years",
        sweep=Sweep(over="cards", points=tuple(weeks.items())),
        assumptions=(
            f"{float(model.parameters) / 1e12:.2f} T parameters (SC'21's), {TOKENS / 1e12:.0f} T tokens, "
            f"{BATCH / 2**20:.0f} Mi tokens a step at every size (strong scaling).",
            f"Cards fail as Llama 3's did; each interruption costs {PAUSE / 60:.0f} minutes and all since the "
            f"last checkpoint; these follow Daly's rule at {SAVE:.0f} s a save. Both are estimates.",
            "`Weeks` is taken as at most eight; `months` is what a sixteenth of the cards need.",
        ),
        by="simulation.million with failures by closed form",
    )


def _tiers(setting: Setting) -> Tiers:
    usual = Tiers()
    return replace(usual, between=usual.between * setting.network)


def _weeks(tiers: Tiers, model: ModelShape, count: int) -> float:
    work = Work(model=model, tensor=8, pipeline=16, interleave=8, sequence=2048)
    copies = count * tiers.supernode_cards // (work.tensor * work.pipeline)
    work = replace(work, micro_batches=max(1, round(BATCH / work.sequence / copies)))
    point = step_at(tiers, work, count)
    rhythm = Rhythm(mtbf=1 / (LLAMA_RATE * point.cards), save=SAVE, restart=PAUSE)
    return expected_seconds(TOKENS / BATCH * point.seconds, rhythm) / WEEK
