"""What can be done with a run's checkpoints besides going on from them: list, verify, repair, compare, carry away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from supernode.control import runs
from supernode.control.journal import read
from supernode.converting import carry
from supernode.converting.difference import Difference, differences
from supernode.converting.wholes import Wholes
from supernode.errors import CheckpointError, RunError
from supernode.schema.event import Saved
from supernode.storing import mending
from supernode.storing.manifests import MANIFEST
from supernode.storing.saves import ASIDE, Saves, name_of, saves_of, step_of
from supernode.storing.spread import Spread, disk_of

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint as a list shows it.

    Attributes:
        whole: bytes of all its tensors.
        new: bytes that were written for it and no checkpoint before; what compression saved is left out.
        on_disk: bytes that it needs, shared ones among them, without copies and shares.
        seconds: that training stood still for it, where the journal knows.
        disks: that have it, as paths or URLs.
        layout: that wrote it.
        trouble: why it cannot be told more about; empty where it can.
    """

    name: str
    step: int
    whole: int = 0
    new: int = 0
    on_disk: int = 0
    seconds: float | None = None
    disks: tuple[str, ...] = ()
    layout: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is not as it was written of a checkpoint.

    Attributes:
        gaps: (disk, file, `missing` or `damaged`).
        lost: why it cannot be read; empty where it can all the same.
    """

    name: str
    gaps: tuple[tuple[str, str, str], ...] = ()
    lost: str = ""


def saves_at(where: str | Path) -> Saves:
    """Return the checkpoints of a run, or those of a folder or URL that has some itself.

    Raises:
        RunError: there is neither.
    """
    if "://" in str(where):
        return Saves(Spread(disks=(disk_of(str(where)),)))
    folder = Path(where)
    if not (folder / runs.JOB).is_file() and folder.is_dir():
        saves = Saves(Spread(disks=(disk_of(folder),)))
        if any(saves.disks[0].size(f"{name}/{MANIFEST}") >= 0 for _, name in saves.all()):
            return saves
    run = runs.find(folder)
    return saves_of(run.job().checkpoint, run.checkpoints)


def listed(where: str | Path) -> list[Listed]:
    """Return all checkpoints, oldest first, those that are set aside at the end."""
    saves = saves_at(where)
    times = _seconds(where)
    names = [name for _, name in saves.all()]
    aside = {name for disk in saves.disks for name in disk.names("") if name.startswith(ASIDE)}
    return [_listed(saves, name, times) for name in (*names, *sorted(aside))]


def _listed(saves: Saves, name: str, times: dict[str, float]) -> Listed:
    disks = tuple(disk.where for disk in saves.disks if disk.size(f"{name}/{MANIFEST}") >= 0)
    try:
        manifest = saves.manifest(name)
        whole = sum(
            piece.nbytes for writer in saves.writers(manifest) for piece in saves.part(name, manifest, writer).pieces
        )
    except CheckpointError as error:
        return Listed(name=name, step=max(step_of(name), 0), disks=disks, trouble=error.message)
    parts = sum(size for size, _ in manifest.files.values())
    # A pack is named after the step that wrote it.
    own = [pack.nbytes for file, pack in manifest.packs.items() if file.startswith(f"packs/{manifest.step:08d}-")]
    return Listed(
        name=name, step=manifest.step, whole=whole, new=sum(own) + parts,
        on_disk=sum(pack.nbytes for pack in manifest.packs.values()) + parts, seconds=times.get(name), disks=disks,
        layout=manifest.layout,
    )  # fmt: skip


def _seconds(where: str | Path) -> dict[str, float]:
    try:
        journal = runs.find(Path(where)).path / runs.JOURNAL
        return {event.checkpoint: event.seconds for _, event in read(journal) if isinstance(event, Saved)}
    except (RunError, OSError):
        return {}


def chosen(saves: Saves, wanted: str) -> str:
    """Return the name of a checkpoint that a person means by it, or by its step; the newest where they say nothing.

    Raises:
        CheckpointError: there is none.
    """
    names = [name for _, name in saves.all()]
    if not wanted and names:
        return names[-1]
    name = name_of(int(wanted)) if wanted.isascii() and wanted.isdigit() and len(wanted) < 13 else wanted
    if name in names or (name.startswith(ASIDE) and any(name in disk.names("") for disk in saves.disks)):
        return name
    raise CheckpointError(
        f"there is no checkpoint `{wanted}` in {saves.disks[0].where}" if wanted
        else f"there are no checkpoints in {saves.disks[0].where}",
        hint=f"there are: {', '.join(names)}." if names else "see that all of `checkpoint.disks` are there.",
    )  # fmt: skip


def verify(where: str | Path, checkpoint: str = "", *, progress: Progress = lambda nbytes: None) -> list[Checked]:
    """Compare every byte of every disk with what was written, of one checkpoint or of all."""
    saves = saves_at(where)
    names = [chosen(saves, checkpoint)] if checkpoint else [name for _, name in saves.all()] or [chosen(saves, "")]
    return [_checked(saves, name, progress) for name in names]


def _checked(saves: Saves, name: str, progress: Progress) -> Checked:
    try:
        found = mending.gaps(saves, name, progress=progress)
    except CheckpointError as error:
        return Checked(name=name, lost=error.message)
    lost = ""
    if found:
        try:
            saves.verify(name)
        except CheckpointError as error:
            lost = error.message
    return Checked(name=name, gaps=_told(saves, found), lost=lost)


def repair(where: str | Path, checkpoint: str = "", *, progress: Progress = lambda nbytes: None) -> list[Checked]:
    """Make disks whole again from the others; returns what was missing or damaged.

    Raises:
        CheckpointError: a checkpoint cannot be made whole; those before it are.
        RunError: the run is going on.
    """
    with _held(where):
        saves = saves_at(where)
        names = [chosen(saves, checkpoint)] if checkpoint else [name for _, name in saves.all()] or [chosen(saves, "")]
        return [Checked(name=name, gaps=_told(saves, mending.repair(saves, name, progress=progress))) for name in names]


def _told(saves: Saves, gaps: list[mending.Gap]) -> tuple[tuple[str, str, str], ...]:
    return tuple((saves.disks[gap.disk].where, gap.file, gap.what) for gap in gaps)


def diff(where: str | Path, older: str, newer: str = "") -> list[Difference]:
    """Return the tensors that differ between two checkpoints.

    Raises:
        CheckpointError: one is not there or damaged.
    """
    saves = saves_at(where)
    return differences(Wholes(saves, chosen(saves, older)), Wholes(saves, chosen(saves, newer)))


def bring_back(where: str | Path, path: Path) -> str:
    """Make a checkpoint of a run of what was exported with everything; returns its name.

    Raises:
        CheckpointError: it is not that, or there is one of its step.
        RunError: the run is going on.
    """
    with _held(where):
        return name_of(carry.bring_back(saves_at(where), path).step)


@contextmanager
def _held(where: str | Path) -> Iterator[None]:
    """Hold a run, if it is one, so that nobody trains, prunes or goes on meanwhile."""
    run = None if "://" in str(where) else run_at(Path(where))
    if run is None:
        yield
        return
    run.hold()
    try:
        yield
    finally:
        run.release()


def run_at(folder: Path) -> runs.RunFolder | None:
    """Return the run that a folder is, or is in; None where it is neither."""
    # A run's own folder of checkpoints is the run's, too.
    for place in (folder, folder.resolve().parent):
        try:
            return runs.find(place)
        except RunError:
            continue
    return None
