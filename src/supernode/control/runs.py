"""Where a run lives: its folder, who holds it, and what can be read from it.

`job.json` the job as last asked for: with the overrides of every `resume`, without the layout that `--cards` fits ·
`journal.db` what happened · `data/` tokens · `checkpoints/` · `logs/` one file a rank · `report.html`, `report.json` at
the end.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from supernode.control.journal import read
from supernode.errors import CheckpointError, MachineError, RunError, SupernodeError
from supernode.files import DRAFT, write_whole
from supernode.scheduling.state import fold
from supernode.schema.codec import from_json, to_json
from supernode.schema.event import Started
from supernode.schema.job import JobSpec
from supernode.schema.report import RunState
from supernode.storing.saves import OWNER, Saves, step_of

JOURNAL = "journal.db"
JOB = "job.json"
LOGS = "logs"
DATA = "data"
OLD_RANKS_SECONDS = 20.0
LOOK_SECONDS = 0.5
"""How long a folder may seem taken while someone looks whether it is."""
_DATA_FILES = {"train.bin", "held_out.bin", "corpus.json", "tokenizer.json"}


class RunFolder:
    """A run's folder, held by one controller at a time.

    The locks are the kernel's: they end with the processes that hold them, however those end. The controller's is on
    the folder itself, its ranks' on `logs/`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._made: tuple[Path, ...] = ()

    def hold(self) -> RunFolder:
        """Take the folder for this process, once the ranks of a controller that died are gone.

        Raises:
            RunError: another controller has it, or old ranks do not end.
        """
        self._lock = os.open(self.path, os.O_RDONLY)
        if not _locked(self._lock, within=LOOK_SECONDS):
            self.release()
            raise RunError(
                f"another controller is running in {self.path}",
                hint="watch it with `supernode status`, or choose another `--folder`.",
            )
        self._outlive_ranks()
        return self

    def _outlive_ranks(self) -> None:
        """Wait until no rank of an earlier controller is left; one may still be writing a checkpoint."""
        if not (self.path / LOGS).is_dir():
            return
        probe = os.open(self.path / LOGS, os.O_RDONLY)
        try:
            if _locked(probe, within=OLD_RANKS_SECONDS):
                return
        finally:
            os.close(probe)
        self.release()
        raise RunError(
            f"ranks of an earlier controller still live in {self.path} after {OLD_RANKS_SECONDS:g} s",
            hint="end the processes `supernode.backends.forkserver` that `ps` shows, then `supernode resume`.",
        )

    def release(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def keep(self) -> None:
        """Let nothing be removed from here on: the run starts."""
        self._made = ()

    def forget_unstarted(self) -> None:
        """Remove what `create` and preparing made, if the run never started; what was there before stays."""
        if (self.path / JOURNAL).exists():
            return
        for path in self._made:
            if path == self.path:
                with suppress(OSError):  # Something else has come to lie there.
                    path.rmdir()
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def write_job(self, job: JobSpec) -> None:
        """Keep the job; a reader finds the old one or the new one.

        Raises:
            MachineError: it cannot be written.
        """
        try:
            write_whole(self.path / JOB, to_json(job))
        except OSError as error:
            raise MachineError(
                f"cannot write in {self.path}: {error.strerror}",
                hint="free some space on its disk, see to its permissions, or choose another `--folder`.",
            ) from error

    @property
    def is_held(self) -> bool:
        """A controller is at work in the folder."""
        probe = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(probe)
        return False

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def job(self) -> JobSpec:
        """Return the job as it was last asked for.

        Raises:
            RunError: its file is not what was written.
        """
        path = self.path / JOB
        try:
            return from_json(JobSpec, path.read_bytes())
        except (SupernodeError, OSError) as error:
            reason = error.message if isinstance(error, SupernodeError) else error
            raise RunError(
                f"{path} is not the job of a run: {reason}",
                hint="put the file back as it was, or start a new run.",
            ) from error

    def state(self) -> RunState:
        """Return what the journal comes to.

        Raises:
            RunError: the run has not started, or the journal cannot be read.
        """
        events = list(read(self.path / JOURNAL)) if (self.path / JOURNAL).exists() else []
        if events and not isinstance(events[0][1], Started):
            raise RunError(f"{self.path / JOURNAL} has lost its beginning", hint="start a new run.")
        state = fold(events)
        if state is None:
            raise RunError(
                f"the run in {self.path} never started",
                hint=f"start it with `supernode run FILE --folder {self.path}`.",
            )
        return state


def create(folder: Path, job: JobSpec) -> RunFolder:
    """Make a new run's folder and hold it. What a run that was killed before its first event left there is taken over.

    Raises:
        RunError: it holds a run already, or something else.
        MachineError: it cannot be made.
    """
    was_there = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"cannot make {folder}: {error.strerror}", hint="choose another `--folder`.") from error
    run = RunFolder(folder.resolve()).hold()
    try:
        if (folder / JOURNAL).exists() and any(read(folder / JOURNAL)):
            raise RunError(
                f"{folder} already holds a run",
                hint=f"`supernode resume {folder}` goes on, or choose another `--folder`.",
            )
        if others := sorted(entry.name for entry in folder.iterdir()):
            if not never_started(folder):
                raise RunError(
                    f"{folder} is not empty (it holds `{others[0]}`)", hint="choose an empty or new `--folder`."
                )
        else:
            run._made = (run.path / JOB, run.path / DATA, *(() if was_there else (run.path,)))
        run.write_job(job)
    except OSError as error:
        run.release()
        raise MachineError(f"cannot read {folder}: {error.strerror}", hint="choose another `--folder`.") from error
    except SupernodeError:
        run.forget_unstarted()
        run.release()
        raise
    return run


def never_started(folder: Path) -> bool:
    """Tell whether a folder holds what a run leaves that was killed while it prepared, and nothing besides."""
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(DRAFT)}
    if DATA in names and not (folder / DATA).is_dir():
        return False
    data = {entry.name for entry in (folder / DATA).iterdir()} if DATA in names else set()
    if names - {JOB, DATA, JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm"}:
        return False
    if not all(name in _DATA_FILES or name.startswith(DRAFT) for name in data):
        return False
    if (folder / JOURNAL).exists() and any(read(folder / JOURNAL)):
        return False
    try:
        text = (folder / JOB).read_text(encoding="utf-8")
        return to_json(from_json(JobSpec, text)) == text  # As we write it; a job file of the user's own would not be.
    except (SupernodeError, OSError, ValueError):
        return False


def _locked(descriptor: int, *, within: float) -> bool:
    """Take the lock of an open folder as soon as nobody has it; returns whether it could be had in so many seconds."""
    deadline = time.monotonic() + within
    while True:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def find(folder: Path) -> RunFolder:
    """Return the run in a folder, or the only run below it by name.

    Raises:
        RunError: there is none.
    """
    for candidate in (folder, Path("runs") / folder):
        with suppress(OSError):  # A name longer than any file's.
            if (candidate / JOB).is_file():
                return RunFolder(candidate.resolve())
    known = sorted(entry.parent.name for entry in Path("runs").glob(f"*/{JOURNAL}"))
    listed = f" Runs here: {', '.join(known)}." if known else ""
    raise RunError(f"there is no run in {folder}", hint=f"name a run's folder, such as runs/demo.{listed}")


def next_free(name: str) -> Path:
    """Return `runs/NAME`, or `runs/NAME-2` and so on where that is taken by what has started or is preparing."""
    path, number = Path("runs") / name, 1
    while not _is_free(path):
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        return path.is_dir() and not RunFolder(path).is_held and (not any(path.iterdir()) or never_started(path))
    except (SupernodeError, OSError):
        return False


def claim(run: RunFolder, saves: Saves) -> None:
    """Take a run's disks for it alone; which run that is lies with its checkpoints.

    Raises:
        CheckpointError: a disk holds another run's checkpoints.
        MachineError: it cannot be written.
    """
    path = run.checkpoints / OWNER
    if [disk.where for disk in saves.disks] == [str(run.checkpoints)]:
        return  # Nobody else's in any case.
    try:
        owner = path.read_text(encoding="utf-8").strip() if path.exists() else secrets.token_hex(16)
        saves.claim(owner)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, owner)
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(
            f"cannot read or write {path}: {error}", hint="see to its permissions and the space on its disk."
        ) from error


def checkpoints_to_go_on_from(saves: Saves, state: RunState, *, wanted: str = "") -> tuple[tuple[int, str], ...]:
    """Return (step, name) of the checkpoints to go on from, oldest first; those up to `wanted` if it is given.

    Nothing is renamed yet: `set_newer_aside` does that once nothing stands in the way of going on.

    A controller may die between a save and reading what its ranks said of the steps before it. Such a checkpoint is
    left out where an older one is there, so that the journal ends up with every step.

    Raises:
        CheckpointError: `wanted` is not there.
    """
    saves.sweep()
    found = saves.all()
    if not wanted:
        last, saved = max(state.losses, default=0), {name for _, name in state.checkpoints}
        return tuple(entry for entry in found if entry[0] < last or entry[1] in saved) or tuple(found)
    names = [name for _, name in found]
    if wanted not in names:
        raise CheckpointError(
            f"there is no checkpoint `{wanted}` in {saves.disks[0].where}",
            hint=f"there are: {', '.join(names) or 'none'}.",
        )
    return tuple(found[: names.index(wanted) + 1])


def set_newer_aside(saves: Saves, wanted: str) -> None:
    """Rename the checkpoints after `wanted`: the way not taken, kept under names that no restart mistakes for its own.

    Raises:
        MachineError: one cannot be renamed.
    """
    for step, name in saves.all():
        if step > step_of(wanted):
            saves.set_aside(name)
