"""What does a search say? The best few plans, why each wins or loses, the front, what binds; as words and as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from supernode.advice.question import Question
from supernode.placing.where import Where, where
from supernode.planning.planner import ranges
from supernode.search.best import Plans, figures, words
from supernode.search.search import Choice
from supernode.search.why import Why, against
from supernode.units import count_of, show, show_bytes, show_seconds
from supernode.workload.strategy import PRECISIONS

FRONT_ROWS = 12
GROUPS = 4
# Below this part of a step, a difference is not worth words.
WORTH_SAYING = 0.002


def rows(question: Question, plans: Plans) -> Iterator[tuple[str, str]]:
    """Yield a search's answer as rows for people, a title and one or more lines each."""
    found, machine = plans.found, plans.machine
    yield (
        "asked",
        (
            f"{question.name}: {question.batch:,} samples of {question.sequence:,} tokens in {question.precision} "
            f"on {count_of(int(plans.best.axes['cards']), 'card')} of {machine.name}"
        ),
    )
    yield "searched", f"{found.strategies:,} strategies, of which {found.fitting:,} fit; least {plans.objective} first"
    for place, choice in enumerate(found.best):
        reason = plans.reasons[place]
        lines = [words(choice), figures(choice), speed(question, plans, choice), _parts(reason), _held(reason)]
        lines += [versus(plans, place), sensitivity(reason, most=3), _runs(plans.obstacles[place])]
        yield f"plan {place + 1}", "\n".join(lines)
    yield "what binds", f"in plan 1 {plans.reasons[0].binds}; {sensitivity(plans.reasons[0], most=99)}"
    yield "where plan 1 lies", _lies(place_of(plans))
    front = found.front
    step = max(1, -(-len(front) // FRONT_ROWS))
    lines = [f"{figures(choice)}: {words(choice)}" for choice in front[::step]]
    yield "front", "\n".join([f"{len(front)} plans that none beats in {measures(plans)} at once; of them", *lines])
    for note in (*question.notes, *plans.notes):
        yield "note", note


def place_of(plans: Plans) -> Where:
    """Return where the best plan lies best."""
    space, best = plans.space, plans.best
    return where(space.model, best.ways(space), plans.card, best.software(space), plans.machine)


def _lies(lies: Where) -> str:
    """Return in words in which order the axes lie, which cards tensor groups are, and what that saves."""
    if lies.cards.size == 1:
        return "on one card"
    lines = [f"{'dims of the torus' if lies.is_torus else 'axes, innermost first'}: {', '.join(lies.order)}"]
    if lies.tensor > 1:
        some = " | ".join(ranges(tuple(group)) for group in lies.groups[:GROUPS].tolist())
        rest = f" | … ({len(lies.groups):,} in all)" if len(lies.groups) > GROUPS else ""
        lines.append(f"tensor groups of cards {some}{rest}")
    gain = f"{lies.saved:.1%} of the step saved" if lies.saved > WORTH_SAYING else "nothing saved"
    return "\n".join([*lines, f"{gain} over ranks in order on cards in order, which the times above take"])


def measures(plans: Plans) -> str:
    """Return in words what plans are compared in: cost only where there is a price."""
    return "time, memory and energy" if plans.best.cost is None else "time, memory, energy and cost"


def speed(question: Question, plans: Plans, choice: Choice) -> str:
    """Return how fast a choice is, in words."""
    rate = question.tokens / choice.time
    return f"{show(rate, 'token/s')}, {utilisation(question, plans, choice):.1%} of the peak FLOP/s"


def utilisation(question: Question, plans: Plans, choice: Choice) -> float:
    """Return the model's FLOP/s over the dense peak of the cards (MFU)."""
    peak = plans.card.peaks[PRECISIONS.index(question.precision)]
    return question.flops / choice.time / (choice.axes["cards"] * peak)


def versus(plans: Plans, place: int) -> str:
    """Return why a plan wins or loses, in words."""
    best, objective = plans.found.best, plans.objective
    if place == 0:
        if len(best) == 1:
            return f"takes the least {objective}"
        more = getattr(best[1], objective) / getattr(best[0], objective) - 1
        gains = _apart(plans, 1, sign=1)
        return f"wins by {more:.1%} over the next: {gains or 'in no part by much'}"
    choice, first = best[place], best[0]
    more = getattr(choice, objective) / getattr(first, objective) - 1
    lost = _apart(plans, place, sign=1) or "no part differs by much"
    won = _apart(plans, place, sign=-1)
    held = ""
    if objective != "memory" and abs(apart := choice.memory - first.memory) > 2**28:
        held = f"; holds {show_bytes(abs(apart))} {'more' if apart > 0 else 'less'}"
    return f"loses {more:.1%} of {objective}: {lost}" + (f"; gains {won}" if won else "") + held


def _apart(plans: Plans, place: int, *, sign: int) -> str:
    """Return in words in which parts a plan takes more (or, with sign -1, less) than the first."""
    first, other = plans.reasons[0], plans.reasons[place]
    if plans.objective == "memory":
        least = WORTH_SAYING * plans.best.memory
        named = [(name, show_bytes(nbytes * sign)) for name, nbytes in against(first.held, other.held)
                 if nbytes * sign > least]  # fmt: skip
        return ", ".join(f"{shown} {name}" for name, shown in named[:3])
    least = WORTH_SAYING * sum(first.parts.values())
    waits = [(name, show_seconds(seconds * sign)) for name, seconds in against(first.parts, other.parts)
             if seconds * sign > least]  # fmt: skip
    return ", ".join(f"{shown} {_waits(name)}" for name, shown in waits[:3])


def _held(reason: Why) -> str:
    """Return what a card holds, by part."""
    parts = sorted(reason.held.items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in parts if nbytes > 0)
    away = -reason.held["on the host"]
    return said + (f", of which {show_bytes(away)} lie with the host" if away else "")


def _waits(name: str) -> str:
    return {"compute": "computing", "offload": "waiting for what is offloaded"}.get(name, f"waiting for {name}")


def _parts(reason: Why) -> str:
    whole = sum(reason.parts.values())
    shares = sorted(reason.parts.items(), key=lambda item: -item[1])
    said = [f"{_waits(name)} {seconds / whole:.1%}" for name, seconds in shares if seconds > WORTH_SAYING * whole]
    return ", ".join(said)


def sensitivity(reason: Why, *, most: int) -> str:
    """Return what 10% more of each resource brings, the most first."""
    order = sorted(reason.saved.items(), key=lambda item: -item[1])[:most]
    useful = [f"{name} {saved:.1%}" for name, saved in order if saved > 0.0005]
    return f"10% more of it saves: {', '.join(useful)}" if useful else "10% more of no resource saves time"


def _runs(obstacles: tuple[str, ...]) -> str:
    return f"forecast only: our trainer lacks {', '.join(obstacles)}" if obstacles else "our trainer can run it"


def as_plain(question: Question, plans: Plans) -> dict[str, Any]:
    """Return a search's answer as JSON has it; SI units and bytes."""
    best = [
        {
            **point(choice), "parts": dict(reason.parts), "held": dict(reason.held),
            "saved_by_10_percent": dict(reason.saved),
            "binds": reason.binds, "runnable": not obstacles, "obstacles": list(obstacles),
            "tokens_per_second": question.tokens / choice.time, "mfu": utilisation(question, plans, choice),
            "why": versus(plans, place),
        }
        for place, (choice, reason, obstacles) in enumerate(
            zip(plans.found.best, plans.reasons, plans.obstacles, strict=True)
        )
    ]  # fmt: skip
    return {
        "name": question.name, "machine": plans.machine.name, "batch": question.batch, "sequence": question.sequence,
        "precision": question.precision, "objective": plans.objective, "strategies": plans.found.strategies,
        "fitting": plans.found.fitting, "best": best, "front": [point(choice) for choice in plans.found.front],
        "placement": _placement(place_of(plans)), "notes": [*question.notes, *plans.notes],
    }  # fmt: skip


def _placement(lies: Where) -> dict[str, Any]:
    """Return where the best plan lies; of the tensor groups the first few."""
    return {
        "order": list(lies.order), "tensor_groups": lies.groups[:GROUPS].tolist(), "saved": lies.saved,
    }  # fmt: skip


def point(choice: Choice) -> dict[str, Any]:
    """Return a choice with what it comes to: seconds, bytes, joules, USD."""
    return {
        "words": words(choice), "axes": {name: int(value) for name, value in choice.axes.items()},
        "seconds": choice.time, "bytes": choice.memory, "joules": choice.energy, "usd": choice.cost,
    }  # fmt: skip
