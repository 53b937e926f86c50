"""`supernode calibrate`: progress while ranks measure, what came of it as a table or JSON, and the file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from supernode.cli.flags import Json

if TYPE_CHECKING:
    from supernode.hardware.calibration import Calibration

Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", metavar="FILE", help="Where to write; by default where `plan` looks.", show_default=False),
]
Ranks = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--cards", help="Most ranks whose exchanges are measured; by default 8.", show_default=False),
]
Device = Annotated[str, typer.Option("--device", help="`cpu`, which ranks train on, or `cuda` for the GPUs.")]
DISTURBED = 0.05
"""Part of all cores that others may take before a measurement is called disturbed."""


def calibrate(out: Out = None, cards: Ranks = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Measure what this computer gives ranks: products, memory, steps, collectives. Plans for it then rest on that."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from supernode.cli import show
    from supernode.control import calibrate as control
    from supernode.errors import MachineError
    from supernode.files import alone, check_writable
    from supernode.hardware.calibration import default_path
    from supernode.schema.codec import to_plain

    path = out if out is not None else default_path(device)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn()
    with ExitStack() as held:
        try:  # Measuring takes minutes: whether its outcome can be kept is found out before.
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone(path, hint="wait for it: two calibrations at once would measure each other."))
            check_writable(path)
        except OSError as error:
            raise MachineError(
                f"{path} cannot be written: {error.strerror}", hint="name another with `--out`."
            ) from error
        with Progress(*columns, console=console, disable=as_json or not console.is_terminal) as progress:
            task = progress.add_task("starting", total=1.0)
            found = control.calibrate(
                cards=cards,
                device=device,
                progress=lambda what, done: progress.update(task, description=what, completed=done),
            )
        control.write(found, path)
    if as_json:
        show.print_json({"file": str(path), **to_plain(found)})
        return
    show.table("calibration", _rows(found))
    show.talk(str(path))


def _rows(found: Calibration) -> list[tuple[str, str]]:
    from supernode.units import show, show_seconds

    host = found.host
    rows = [("measured on", f"{host.cpu}, {host.cores} cores, torch {host.torch}, {', '.join(host.gpus) or 'no GPU'}")]
    for each in found.compute:
        told = [f"float32 products {show(each.products, 'FLOP/s')}", f"copies {show(each.copy, 'B/s')}"]
        if found.device == "cpu":
            told += [f"attention {show(each.scores, 'FLOP/s')}", f"kernel {show_seconds(each.operation)}"]
        rows.append((f"{each.processes} at once, each", ", ".join(told)))
    for curve in found.curves:
        if curve.kind in ("all_reduce", "send"):
            name = f"{curve.kind.replace('_', '-')}, {curve.cards} of {curve.ranks} ranks"
            rows.append((name, f"{show_seconds(curve.seconds[0])} for {show(curve.nbytes[0], 'B')}, "
                               f"{show_seconds(curve.seconds[-1])} for {show(curve.nbytes[-1], 'B')}"))  # fmt: skip
    shares = [sample.others for sample in found.samples]
    disturbed = sum(share > DISTURBED for share in shares)
    if disturbed:
        rows.append(("note", f"other programs disturbed {disturbed} of {len(shares)} measurements; "
                             "calibrate again when less runs here."))  # fmt: skip
    return rows
