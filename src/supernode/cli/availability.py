"""`supernode availability`: how often a machine fails a job, for how long, and what would change that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from supernode.cli.flags import Card, Cards, Cooling, Interconnect, Json, Named

if TYPE_CHECKING:
    from supernode.reliability.answer import Availability

Without = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option("--without", metavar="NAME", show_default=False,
                 help="A redundancy that it lacks: supplies, paths, cooling, control, feeds or disks; repeatable."),
]  # fmt: skip
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", metavar="FOLDER", help="Folder for a page with charts and JSON.", show_default=False),
]


def availability(
    cards: Cards = None, card: Card = "", interconnect: Interconnect = "", cooling: Cooling = "", machine: Named = "",
    spares: Annotated[int, typer.Option("--spares", help="Nodes beside those that the job fills.")] = 4,
    without: Without = None,
    pause: Annotated[str, typer.Option("--pause", help="From a failure until ranks compute again.")] = "10s",
    by_hand: Annotated[
        str, typer.Option("--by-hand", help="Part of recoveries that need people; by default Llama 3's, 3 of 419.")
    ] = "",
    parameters: Annotated[str, typer.Option("--parameters", help="Of the model in training.")] = "70B",
    step: Annotated[str, typer.Option("--step", help="Time of a step.")] = "10s",
    days: Annotated[float, typer.Option("--days", help="Days to play event by event as well.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Other seeds draw other failures.")] = 0,
    out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Reckon a machine's MTBF, availability and goodput from failure rates of its parts."""
    from supernode.cli import show
    from supernode.cli.flags import node
    from supernode.errors import SpecError
    from supernode.pages.availability import write_availability
    from supernode.reliability.answer import plain
    from supernode.reliability.service import BY_HAND
    from supernode.units import parse_count, parse_seconds

    if not (machine or card or cards):
        machine = "supernode-512"
    try:
        part = float(by_hand) if by_hand else BY_HAND
    except ValueError:
        raise SpecError(f"`--by-hand` is {by_hand!r}", hint="write a part of 1, such as 0.007.") from None
    found = node(cards, card, interconnect, cooling, machine, None).availability(
        spares=spares, without=tuple(without or ()), pause=parse_seconds(pause, key="--pause"), by_hand=part,
        parameters=parse_count(parameters, key="--parameters"), step=parse_seconds(step, key="--step"), days=days,
        seed=seed,
    )  # fmt: skip
    files = write_availability(out, found) if out is not None else ()
    if as_json:
        show.print_json(plain(found))
    else:
        _show(found)
    for file in files:
        show.talk(str(file))


def _show(found: Availability) -> None:
    from supernode.cli import show
    from supernode.pages.availability import HOUR, cells
    from supernode.reliability.service import AVAILABILITY, MTBF
    from supernode.units import show_seconds

    one = found.service
    failing = ", ".join(f"{'yes' if met else 'no'}" for met in one.is_as_claimed)
    rows = [
        ("redundancy", one.redundancy.words),
        ("a part fails every", f"{1 / one.parts.failures / HOUR:,.0f} h"),
        ("work is interrupted every", f"{1 / one.interruptions / HOUR:,.0f} h, for {one.pause:g} s"),
        ("outage every", f"{one.outages.mtbf / HOUR:,.0f} h, for {show_seconds(one.outages.outage)}"),
        ("available", f"{one.availability:.4%}"),
        (f"{MTBF / HOUR:,.0f} h between outages, {AVAILABILITY:.3%}", failing),
        ("interruptions as rare as that", f"take parts and software that fail {found.rarer:,.0f} times more rarely"),
        ("goodput while it is up", f"{found.goodput:.3%}"),
    ]
    rows += [
        (f"kept in {tier.name}", f"every {show_seconds(tier.interval)}" if tier.interval else "never needed")
        for tier in found.recovery.tiers
    ]
    if found.played is not None:
        met = sum(found.played.interruptions.values())
        rows.append((f"{found.played.days:.0f} days played", f"{met} interruptions, {found.played.useful:.3%} useful"))
    show.table(f"availability of {one.machine}", rows)
    head = ("", "interrupted every", "outage every", "an outage takes", "available")
    show.grid("by redundancy", head, [(name, *cells(each)) for name, each in found.ladder.items()])
    show.grid("one change at a time", head, [(name, *cells(each)) for name, each in found.levers.items()])
    show.grid(
        "policies, work of the job and per node that is owned", ("policy", "spares", "work", "per node"),
        [
            (name, f"{many}", f"{each.work:.3%}", f"{each.owned:.3%}")
            for name, places in found.policies.items() for many, each in places.items()
        ],
    )  # fmt: skip
