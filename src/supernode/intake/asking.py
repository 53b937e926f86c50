"""What does a job file or a model's name ask for, and how does an answer become a job file again?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from supernode.advice.question import Question, known_models, question_about, question_of
from supernode.errors import MachineError, SpecError
from supernode.files import write_new
from supernode.intake.jobfile import anchored, job_from, job_to_dict, overridden
from supernode.intake.yamlfile import read_mapping
from supernode.registry import did_you_mean
from supernode.schema.job import JobSpec
from supernode.schema.model import PRESETS
from supernode.workload.presets import public_models


def load_asked(
    file: Path | None, *, model: str = "", batch: int | None = None, sequence: int | None = None, precision: str = "",
    overrides: Mapping[str, Any] | None = None,
) -> JobSpec | Question:  # fmt: skip
    """Return the job of a file, or of a model's name; what is given besides the file replaces its own.

    A public model that our trainer cannot build makes no job; then it is the question that remains of it.

    Raises:
        SpecError: the file is wrong, the name unknown, or a number missing or out of range.
    """
    if file is None:
        if not model:
            raise SpecError("no FILE is given, and no `--model`", hint="give a job file, or `--model llama3-70b`.")
        return _about(model, batch, sequence, precision, overrides or {})
    changes = {"model": model, "batch": batch, "data.sequence": sequence, "precision": precision}
    given = {key: value for key, value in changes.items() if value not in (None, "")}
    mapping = overridden(read_mapping(file), {**(overrides or {}), **given})
    name = mapping.get("model")
    if not isinstance(name, str) or name in PRESETS or name not in public_models():
        return anchored(job_from(mapping), Path(os.path.abspath(file)).parent)
    job = job_from({**mapping, "model": "tiny"})
    asked = question_about(name, batch=job.batch, sequence=job.data.sequence, precision=job.precision)
    return replace(asked, name=job.name)


def as_question(asked: JobSpec | Question) -> Question:
    """Return what was asked as a question.

    Raises:
        SpecError: the model is the user's own.
    """
    return question_of(asked) if isinstance(asked, JobSpec) else asked


def _about(
    model: str, batch: int | None, sequence: int | None, precision: str, overrides: Mapping[str, Any]
) -> JobSpec | Question:
    if overrides:
        raise SpecError("`--set` changes a job file, and none is given", hint="give FILE, or leave out `--set`.")
    if model not in (known := known_models()):
        raise SpecError(f"unknown model `{model}`", hint=did_you_mean(model, known))
    if batch is None or sequence is None:
        raise SpecError(
            f"how much of {model} makes a step is open", hint="give `--batch` (samples) and `--sequence` (tokens)."
        )
    asked = question_about(model, batch=batch, sequence=sequence, precision=precision or "bfloat16")
    if model not in PRESETS or asked.precision not in ("float32", "bfloat16"):
        return asked
    return job_from(
        {"name": model, "model": model, "batch": batch, "precision": asked.precision, "data": {"sequence": sequence}}
    )


def write_job(job: JobSpec, file: Path) -> None:
    """Write a job as a file that `supernode plan` and `supernode run` read; keys at their defaults are left out.

    Raises:
        SpecError: the file exists.
        MachineError: it cannot be written.
    """
    text = yaml.dump(_spoken(job_to_dict(job), job_to_dict(JobSpec())), Dumper=_Dumper, sort_keys=False)
    try:
        write_new(file, text)
    except FileExistsError:
        raise SpecError(f"{file} exists", hint="remove it, or choose another `--write`.") from None
    except OSError as error:
        raise MachineError(
            f"cannot write {file}: {os.strerror(error.errno or 0)}", hint="choose another `--write`."
        ) from error


class _Dumper(yaml.SafeDumper):
    """Lists in one line, and no aliases, which a job file may not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _spoken(value: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Return what differs from the defaults; model, batch and degrees always."""
    said: dict[str, Any] = {}
    for key, item in value.items():
        default = usual.get(key)
        if isinstance(item, dict) and isinstance(default, dict) and key != "parallelism":
            item = _spoken(item, default)
            if item:
                said[key] = item
        elif item != default or key in ("model", "batch", "parallelism"):
            said[key] = item
    return said
