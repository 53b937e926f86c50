"""Which flags do commands share, and which machine do they name?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from supernode.errors import SpecError

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML).", show_default=False)]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or its name below runs/.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cards = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--cards",
        help="How many cards; by default what the job's degrees take, else the cores of this computer, or 512 of a "
        "card of the catalogue.",
        show_default=False,
    ),
]
Here = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--cards",
        help="How many processes stand in for cards; by default what the job's degrees take, or as many as cores.",
        show_default=False,
    ),
]
Set = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the job: --set parallelism.data=2.", show_default=False
    ),
]
Mtbf = Annotated[
    str, typer.Option("--mtbf", help="Mean time between failures of one card, such as 2000h; empty for none.")
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", help="Folder for the step's timeline (SVG) and trace (Perfetto).", show_default=False),
]
Folder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--folder",
        help="Where the run lives; by default runs/NAME, or runs/NAME-2 and so on if taken.",
        show_default=False,
    ),
]
Older = Annotated[str, typer.Option("--checkpoint", help="Older checkpoint to go on from, such as step-00000050.")]
Card = Annotated[
    str,
    typer.Option(
        "--card", help="Card of the catalogue, such as H100; by default `local`, this computer.", show_default=False
    ),
]
Interconnect = Annotated[
    str,
    typer.Option(
        "--interconnect", help="How cards are joined, such as Fat_Tree; by default 3D_Ring.", show_default=False
    ),
]
Named = Annotated[
    str,
    typer.Option("--machine", help="A machine by name: supernode-512, 64xH100, or local; then no other part is named."),
]
Cooling = Annotated[str, typer.Option("--cooling", help="`liquid` or `air`; by default `liquid`.", show_default=False)]


def overrides_of(pairs: list[str] | None) -> dict[str, Any]:
    """Return the keys that `--set` changes, by dotted name."""
    from supernode.intake.jobfile import override_from

    return dict(override_from(pair) for pair in pairs or [])


def local(cards: int | None, job: Any) -> Any:
    """Return this computer with as many cards as the job names, or as it has cores."""
    from supernode.advice.local import this_computer
    from supernode.control.supernode import SuperNode

    return SuperNode(machine=this_computer(job, cards=cards))


def node(cards: int | None, card: str, interconnect: str, cooling: str, machine: str, job: Any) -> Any:
    """Return the machine that the flags describe: by name, of parts, or this computer.

    Raises:
        SpecError: flags contradict each other.
    """
    from supernode.advice.local import LOCAL
    from supernode.control.supernode import SuperNode

    parts = {"--cards": cards, "--card": card, "--interconnect": interconnect, "--cooling": cooling}
    if machine:
        if named := [flag for flag, value in parts.items() if value not in (None, "")]:
            raise SpecError(
                f"`--machine {machine}` is a whole machine, and {_listed(named)} would make it another",
                hint=f"leave out {_listed(named)}, or build a machine of parts without `--machine`.",
            )
        return local(None, job) if machine.lower() == LOCAL else SuperNode.named(machine)
    if card.lower() in ("", LOCAL):
        if named := [flag for flag in ("--interconnect", "--cooling") if parts[flag]]:
            raise SpecError(
                f"{_listed(named)} cannot be chosen for this computer, which is as it is",
                hint=f"name a card of the catalogue, such as `--card H100`, or leave out {_listed(named)}.",
            )
        return local(cards, job)
    if cards is None:
        want = job.parallelism if job is not None else None
        cards = 512 if want is None or not want.data else want.least
    return SuperNode(
        card_count=cards, interconnect=interconnect or "3D_Ring", cooling=cooling or "liquid", card=card
    )  # fmt: skip


def _listed(flags: list[str]) -> str:
    return " and ".join(f"`{flag}`" for flag in flags)
