"""How does a run's checkpoint leave for other trainers: in which files, and under whose names?"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from supernode.control import runs
from supernode.control.checkpoints import Progress, chosen, run_at, saves_at
from supernode.control.journal import read
from supernode.converting import carry
from supernode.converting.wholes import Wholes
from supernode.errors import CheckpointError, RunError, SpecError
from supernode.foreign.leave import Leaving, Request, llama_config, moments_under, weights_under, write_dcp
from supernode.foreign.naming import pairs_from_halves
from supernode.registry import did_you_mean
from supernode.schema.event import StepDone
from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.storing.disk import explained

Format = Literal["safetensors", "dcp"]


def export(
    where: str | Path, out: Path, checkpoint: str = "", *, format: str = "safetensors", names: str = "ours",
    everything: bool = False, most: int = carry.SHARD, progress: Progress = lambda nbytes: None,
) -> list[Path]:  # fmt: skip
    """Write a checkpoint into a new folder for other trainers, and return the files.

    Args:
        where: the run; or a folder or URL of checkpoints, of which less is known.
        format: `safetensors`, or `dcp` for a checkpoint of `torch.distributed.checkpoint`.
        names: whose names tensors leave under: `ours`, `llama` (transformers) or `titan` (torchtitan).
        everything: the optimizer's state as well.
        most: bytes of a file of safetensors, above which there are several.
        progress: told the bytes of each tensor.

    Raises:
        SpecError: an argument is wrong.
        CheckpointError: the folder is there already, or a tensor cannot be read.
        ModelError: a tensor has no counterpart under the names.
        MachineError: the disk is full, or torch is not installed.
    """
    if most < 1:
        raise SpecError(f"files of {most} bytes", hint="give `--shard` a size such as 5GB.")
    if format not in get_args(Format):
        raise SpecError(f"`--format` is {format!r}", hint=did_you_mean(format, list(get_args(Format))))
    saves = saves_at(where)
    name = chosen(saves, checkpoint)
    if format == "safetensors" and (names == "ours" or everything):
        if names != "ours":
            raise SpecError(
                f"`--everything` as safetensors is for `import`, and `--names` is {names}",
                hint="leave out `--names`, or write `--format dcp`.",
            )
        return carry.export(saves, name, out, everything=everything, most=most, progress=progress)
    if out.exists():
        raise CheckpointError(f"{out} is there already", hint="name a new folder with `--out`.")
    wholes = Wholes(saves, name)
    job = _job(where)
    shape = _shape(wholes, job)
    own = [one for one in wholes.pieces if wholes.kind(one) != "bytes"]
    weights = weights_under(names, own, shape, twice=format == "dcp")
    if format == "safetensors":
        assert shape is not None  # Others than ours are a decoder's alone.
        under = {theirs: (one.own, _rows(wholes, one)) for theirs, one in weights.items()}
        beside = {}
        if names == "llama":
            if job is None:
                raise RunError(
                    f"{where} is no run, and its checkpoints do not say how positions are turned",
                    hint="name the run's own folder.",
                )
            config = llama_config(
                shape, kind=wholes.kind(next(iter(weights.values())).own), positions=job.data.sequence
            )
            beside["config.json"] = json.dumps(config, indent=2).encode()
        return carry.export(saves, name, out, most=most, under=under, beside=beside, progress=progress)
    moments = moments_under(weights, own) if everything else {}
    step = wholes.manifest.step
    if everything and job is None:
        raise RunError(f"{where} is no run, whose optimizer is not known", hint="name the run's own folder.")
    rate = _rate(where, step) if job is not None else 0.0
    request = Request(
        disks=[disk.where for disk in saves.disks], name=name, out="", weights=weights,
        under="" if names.startswith("titan") else "model", moments=moments, step=step,
        optimizer=job.optimizer if everything and job is not None else None,
        rate=rate if rate or job is None else job.optimizer.learning_rate,
    )  # fmt: skip
    draft = out.with_name(f".draft-{out.name}-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        write_dcp(replace(request, out=str(draft)))
        os.rename(draft, out)
    except OSError as error:
        raise explained(error, str(out.parent)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for one in weights.values():
        progress(wholes.nbytes(one.own))
    return sorted(out.iterdir())


def _rows(wholes: Wholes, one: Leaving) -> list[int]:
    return pairs_from_halves(wholes.shape(one.own)[0], one.heads) if one.heads else []


def _job(where: str | Path) -> JobSpec | None:
    run = None if "://" in str(where) else run_at(Path(where))
    return run.job() if run is not None else None


def _shape(wholes: Wholes, job: JobSpec | None) -> DecoderShape | None:
    """Return the shape of our decoder, with the vocabulary that it has; None of a user's own module."""
    if job is not None and job.shape is None:
        return None
    try:
        said = json.loads(wholes.manifest.model)
        shape = DecoderShape(**said)
    except (ValueError, TypeError):
        return None
    base = job.shape.rope_base if job is not None and job.shape is not None else shape.rope_base
    return replace(shape, rope_base=base)


def _rate(where: str | Path, step: int) -> float:
    """Return the learning rate of the last step before a checkpoint; 0 where the journal does not know."""
    run = run_at(Path(where))
    if run is None:
        return 0.0
    try:
        return next(
            (e.rate for _, e in read(run.path / runs.JOURNAL) if isinstance(e, StepDone) and e.step == step), 0.0
        )
    except (RunError, OSError):
        return 0.0
