"""S18: how long does a whole project take, planned and recovered well, beside a plain one?"""

from __future__ import annotations

from supernode.claims.claim import Setting, Shown
from supernode.claims.cluster import trillion
from supernode.claims.plain import DATA_ONLY, Job, beside, best, swept
from supernode.hardware.assemble import build_machine
from supernode.hardware.machine import Machine
from supernode.search.best import words
from supernode.simulation.completion import Rhythm, expected_seconds
from supernode.simulation.goodput import LLAMA_RATE
from supernode.workload.shape import ModelShape, make_shape

PLAIN_DAYS = 45.0
"""Of the claim: what the project took before."""
CARDS = 1024
HOUR = 3600.0
SAVE = 5.0  # seconds that a checkpoint stops either; an estimate
RESTART = 120.0  # seconds to find a failure and go on from memory or disk; an estimate
MANY_STEPS = 10_000  # of which both sides take as many; only the ratio counts
PORTS = (50.0, 25.0, 12.5, 6.25)


def days(setting: Setting) -> Shown:
    """Return the days of the trillion-parameter project that takes 45 when trained plainly."""
    job = Job(model=trillion(), batch=2048, sequence=2048)

    rate = LLAMA_RATE * CARDS
    by_hand = Rhythm(mtbf=1 / rate, save=SAVE, restart=HOUR, interval=HOUR)
    by_itself = Rhythm(mtbf=1 / rate, save=SAVE, restart=RESTART)

    def ours(port: float) -> float:
        machine = _machine(setting, port)
        steps = MANY_STEPS
        before = expected_seconds(steps * best(job, machine, **DATA_ONLY).time, by_hand)
        return PLAIN_DAYS * expected_seconds(steps * best(job, machine).time, by_itself) / before

    plain = best(job, _machine(setting, PORTS[0]), **DATA_ONLY)
    return Shown(
        ours=ours(PORTS[0]),
        baseline=f"sharded copies alone ({words(plain)}), a checkpoint each hour, an hour to recover by hand",
        sweep=swept("GB/s of each card between nodes", PORTS, ours),
        assumptions=(
            f"{float(job.model.parameters) / 1e12:.2f} T parameters on {CARDS} H100, {job.batch:,} samples of 2,048 "
            "tokens a step; as many tokens as the plain project has trained on after 45 days.",
            f"Ours: the best plan, checkpoints by Daly's rule, {RESTART / 60:.0f} minutes to recover; saving stops "
            f"either for {SAVE:.0f} s. These times are estimates.",
            "Cards fail as often as Llama 3 405B's (arXiv:2407.21783).",
        ),
        by="search over all strategies, failures by closed form",
    )


def mixture_rate(setting: Setting) -> Shown:
    """Return the training rate of a mixture of 1.75 T parameters over that of plain data parallelism."""
    job = Job(model=mixture(), batch=CARDS, sequence=2048)

    def gain(port: float) -> float:
        machine = _machine(setting, port, "B200")
        return best(job, machine, **DATA_ONLY).time / best(job, machine).time

    plain = best(job, _machine(setting, PORTS[0], "B200"), **DATA_ONLY)
    return Shown(
        ours=gain(PORTS[0]),
        baseline=f"copies sharded over all cards, all experts gathered layer by layer: {words(plain)}",
        sweep=swept("GB/s of each card between nodes", PORTS, gain),
        assumptions=(
            f"{float(job.model.parameters) / 1e12:.2f} T parameters in mixtures of experts, 2 of 96 visited by each "
            f"token, on {CARDS} B200, whose memory holds a layer gathered whole; a sample of 2,048 tokens a card.",
        ),
        by="search over all strategies",
    )


def mixture() -> ModelShape:
    """Return a mixture of 1.75 T parameters; the size of Wu Dao 2.0, whose shape is not published, so assumed."""
    return make_shape(
        width=8192, vocabulary=51_200, attentions=56, heads=64, key_value_heads=64, head_width=128, mixtures=56,
        experts=96, routed=2, expert_width=19_456,
    )  # fmt: skip


def _machine(setting: Setting, port: float, card: str = "H100") -> Machine:
    return beside(build_machine(CARDS, "Hybrid", card=card), network=setting.network * port / PORTS[0])
