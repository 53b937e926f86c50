"""`supernode checkpoint`: what lies on a run's disks, whether it is whole, and the ways in and out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supernode.cli.flags import Json
from supernode.errors import CheckpointError

if TYPE_CHECKING:
    from supernode.control.checkpoints import Checked

checkpoint = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="List, verify, repair, compare, export and import checkpoints."
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Folder of a run, its name below runs/, or a folder or URL of checkpoints.",
        show_default=False,
    ),
]  # fmt: skip
Which = Annotated[
    str, typer.Option("--checkpoint", help="Which one, such as step-00000050 or 50; by default the newest.")
]
OneOrAll = Annotated[str, typer.Option("--checkpoint", help="Which one, such as step-00000050 or 50; by default all.")]


@checkpoint.command("list")
def list_(run: Where, as_json: Json = False) -> None:
    """Show all checkpoints: bytes that are new in each and of all its tensors, how long training stood still, disks."""
    from supernode.cli import show
    from supernode.control.checkpoints import listed
    from supernode.schema.codec import to_plain
    from supernode.units import show_bytes, show_seconds

    found = listed(run)
    if as_json:
        show.print_json([to_plain(one) for one in found])
        return
    rows: list[tuple[str, ...]] = [
        (
            one.name, show_bytes(one.new), show_bytes(one.whole),
            "–" if one.seconds is None else show_seconds(one.seconds),
            one.trouble or ", ".join(one.disks),
        )
        for one in found
    ]  # fmt: skip
    show.grid("checkpoints", ("name", "new", "tensors", "stood still", "where"), rows)


@checkpoint.command()
def verify(run: Where, checkpoint: OneOrAll = "", as_json: Json = False) -> None:
    """Compare every byte on every disk with what was written; exit code 2 where something is not."""
    from supernode.control import checkpoints

    with _progress(as_json) as progress:
        found = checkpoints.verify(run, checkpoint, progress=progress)
    _tell(found, as_json=as_json, done="whole")
    lost = [one for one in found if one.lost]
    gaps = sum(len(one.gaps) for one in found)
    if as_json and (lost or gaps):
        raise typer.Exit(CheckpointError.exit_code)  # What is wrong is said in the JSON.
    if lost:
        raise CheckpointError(
            f"{lost[0].name} cannot be read: {lost[0].lost}",
            hint="bring back a disk that is missing, or resume from another checkpoint with `--checkpoint`.",
        )
    if gaps:
        raise CheckpointError(
            f"{gaps} of the files on disks are missing or damaged; all can be made whole from the others",
            hint=f"run `supernode checkpoint repair {run}`.",
        )


@checkpoint.command()
def repair(run: Where, checkpoint: OneOrAll = "", as_json: Json = False) -> None:
    """Write again what a disk has lost, from the other disks."""
    from supernode.control import checkpoints

    with _progress(as_json) as progress:
        found = checkpoints.repair(run, checkpoint, progress=progress)
    _tell(found, as_json=as_json, done="nothing was missing")


@checkpoint.command()
def diff(
    run: Where,
    older: Annotated[str, typer.Option("--from", help="Checkpoint to start from, such as 50.", show_default=False)],
    newer: Annotated[str, typer.Option("--to", help="Checkpoint to compare with; by default the newest.")] = "",
    as_json: Json = False,
) -> None:
    """Show which tensors changed between two checkpoints, and in how many numbers."""
    from supernode.cli import show
    from supernode.control import checkpoints
    from supernode.schema.codec import to_plain

    found = checkpoints.diff(run, older, newer)
    if as_json:
        show.print_json([to_plain(one) for one in found])
        return
    rows: list[tuple[str, ...]] = [
        (one.name, f"{one.what}: {one.differing:,} of {one.numbers:,} numbers") for one in found
    ]
    show.grid(f"{len(found)} tensors differ", ("tensor", "what"), rows)


@checkpoint.command()
def export(
    run: Where,
    out: Annotated[Path, typer.Option("--out", help="New folder for the files.", show_default=False)],
    checkpoint: Which = "",
    format_: Annotated[
        str, typer.Option("--format", help="safetensors, or dcp for a checkpoint of torch.distributed.checkpoint.")
    ] = "safetensors",
    names: Annotated[
        str, typer.Option("--names", help="Whose names: ours, llama (transformers) or titan (torchtitan).")
    ] = "ours",
    everything: Annotated[
        bool, typer.Option("--everything", help="The optimizer's state and the rest as well, for `import`.")
    ] = False,
    shard: Annotated[str, typer.Option("--shard", help="Size of a file above which there are several.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights as safetensors or as a checkpoint of PyTorch, for other trainers."""
    from supernode.cli import show
    from supernode.control import leaving
    from supernode.units import parse_bytes

    most = parse_bytes(shard, key="--shard")
    with _progress(as_json) as progress:
        files = leaving.export(
            run, out, checkpoint, format=format_, names=names, everything=everything, most=most, progress=progress
        )
    if as_json:
        show.print_json({"files": [str(file) for file in files]})
        return
    show.say(tuple(files))


@checkpoint.command("import")
def import_(
    run: Where,
    files: Annotated[
        Path, typer.Option("--files", help="What `export --everything` wrote.", show_default=False)
    ],
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a checkpoint of a run of what was exported with everything."""
    from supernode.cli import show
    from supernode.control import checkpoints

    name = checkpoints.bring_back(run, files)
    if as_json:
        show.print_json({"checkpoint": name})
        return
    show.talk(f"{name}; go on from it with `supernode resume {run} --checkpoint {name}`")


def _tell(found: list[Checked], *, as_json: bool, done: str) -> None:
    from supernode.cli import show
    from supernode.schema.codec import to_plain

    if as_json:
        show.print_json([to_plain(one) for one in found])
        return
    rows: list[tuple[str, ...]] = []
    for one in found:
        rows += [(one.name, where, file, what) for where, file, what in one.gaps]
        if one.lost:
            rows.append((one.name, "", "", one.lost))
        elif not one.gaps:
            rows.append((one.name, "", "", done))
    show.grid("checkpoints", ("name", "disk", "file", "state"), rows)


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """Show how many bytes are done, to people at a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("read", total=None)
        yield lambda nbytes: progress.advance(task, nbytes)
