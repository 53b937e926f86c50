"""What does the job file ask for? Turns YAML and flags into a `JobSpec`, or says which key is wrong and why."""

from __future__ import annotations

import json
import math
import os.path
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from supernode.errors import SpecError
from supernode.intake.yamlfile import read_mapping, read_value
from supernode.registry import did_you_mean
from supernode.schema.codec import adapter, to_plain
from supernode.schema.job import JobSpec
from supernode.schema.model import PRESETS, DecoderShape

_WANTED = {int: "a whole number", float: "a number", str: "text", bool: "`true` or `false`"}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_job(path: Path, *, overrides: Mapping[str, Any] = _NOTHING) -> JobSpec:
    """Return the job that a YAML file describes.

    Args:
        path: the file. Relative paths in it are taken from its folder, those in `overrides` too.
        overrides: values by dotted key (`parallelism.data`) that replace the file's.

    Raises:
        SpecError: the file cannot be read, is not YAML, or a key or a value of it is wrong.
    """
    job = job_from(overridden(read_mapping(path), overrides))
    return anchored(job, Path(os.path.abspath(path)).parent)


def job_from(mapping: Mapping[str, Any]) -> JobSpec:
    """Return the job that nested dictionaries describe; paths stay as they are.

    Raises:
        SpecError: a key or a value is wrong.
    """
    plain = _plain(mapping, "")
    model, data = plain.get("model", ""), plain.get("data")
    text = data.get("text", "") if isinstance(data, dict) else ""
    if isinstance(model, dict):
        # Alone first: inside `str | DecoderShape` pydantic would report both halves of the union.
        _validated(DecoderShape, model, "model")
    elif not isinstance(model, str):
        raise SpecError(
            f"`model` is {_shown(model)}, not a preset, `file.py:function` or a shape",
            hint="write, say, `model: tiny`, or `model: {layers: 4, width: 128, heads: 4}`.",
        )
    elif model not in PRESETS and _is_public(model):
        raise SpecError(
            f"`model` is {model!r}, a public model that our trainer does not build",
            hint="`supernode plan --search`, `compare` and `forecast` know it; train a preset or a shape.",
        )
    if not isinstance(text, str) and not (isinstance(text, list) and all(isinstance(item, str) for item in text)):
        raise SpecError(
            f"`data.text` is {_shown(text)}, not a pattern or a list of patterns",
            hint="write, say, `text: [docs, 'notes/*.txt']`, or `text: stdlib`.",
        )
    job: JobSpec = _validated(JobSpec, plain, "")
    _check_functions(job)
    return job


def _is_public(model: str) -> bool:
    """Return whether it is a public model's name; asked of unknown names only, since its table takes NumPy along."""
    from supernode.workload.presets import public_models

    return model in public_models()


def job_to_dict(job: JobSpec) -> dict[str, Any]:
    """Return the job as `job_from` reads it."""
    plain: dict[str, Any] = to_plain(job)
    return plain


def overridden(mapping: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries after values by dotted key are put into them.

    Raises:
        SpecError: a section that a key names is a value.
    """
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        level = mapping
        for depth, section in enumerate(sections):
            level = level.setdefault(section, {})
            if not isinstance(level, dict):
                raise SpecError(
                    f"`{dotted}` cannot be set: `{'.'.join(sections[: depth + 1])}` is {_shown(level)} in the job file",
                    hint="write it out as a section of keys in the job file, or leave the flag out.",
                )
        level[key] = value
    return mapping


def _plain(value: Any, place: str) -> Any:
    """Return a deep copy made of dictionaries and lists, or refuse what JSON and a job cannot hold."""
    if isinstance(value, Mapping):
        return {_key(key, place): _plain(item, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}.{index}") for index, item in enumerate(value)]
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise SpecError(
            f"`{place}` is a {type(value).__name__}, which a job cannot hold", hint="write text, a number or a list."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"`{place}` is {value}", hint="write a finite number.")
    return value


def _key(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise SpecError(
            f"the key {key!r} in `{place or 'the job'}` is not text", hint="put the key in quotes, or remove it."
        )
    return key


def _validated(kind: type[Any], plain: Any, prefix: str) -> Any:
    try:
        # Strict JSON takes lists for tuples and mappings for dataclasses, but neither `yes` nor "3" for a number.
        return adapter(kind).validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        unknown = [problem for problem in problems if problem["type"] == "unexpected_keyword_argument"]
        problem = (unknown or problems)[0]
        raise _readable(kind, problem["loc"], problem["input"], prefix=prefix, is_unknown=bool(unknown)) from None


def _readable(kind: Any, place: tuple[int | str, ...], given: Any, *, prefix: str, is_unknown: bool) -> SpecError:
    dotted = ".".join(str(step) for step in ((prefix, *place) if prefix else place))
    parents = place[:-1] if is_unknown else place
    default: Any = None
    for step in parents:
        if not is_dataclass(kind):  # a place in a list: the error is about the list
            dotted = dotted.rpartition(".")[0]
            break
        default = next((f.default for f in fields(kind) if f.name == step and f.default is not MISSING), None)
        kind = get_type_hints(kind)[str(step)]
    if is_unknown:
        return SpecError(f"unknown key `{dotted}`", hint=did_you_mean(str(place[-1]), [f.name for f in fields(kind)]))
    return SpecError(f"`{dotted}` is {_shown(given)}, not {_wanted(kind)}", hint=_remedy(kind, given, default))


def _wanted(kind: Any) -> str:
    if is_dataclass(kind):
        return "a section of keys"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(f'`{name}`' for name in get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    return _WANTED.get(kind, str(kind))


def _remedy(kind: Any, given: Any, default: Any) -> str:
    if is_dataclass(kind):
        known = [f.name for f in fields(kind)]
        return f"indent its keys below it ({', '.join(known)}), or leave it out."
    if get_origin(kind) is Literal:
        return did_you_mean(str(given), [str(name) for name in get_args(kind)])
    if kind is int and isinstance(given, float) and given.is_integer():
        return f"write `{int(given)}`."
    if kind is str:
        return f'put it in quotes: "{given}".' if isinstance(given, (int, float)) else "write text, or leave it out."
    example = list(default) if isinstance(default, tuple) else default
    return f"write, say, `{json.dumps(example)}`, or leave it out."


def _shown(value: Any) -> str:
    """Return the value as the user wrote it, shortened."""
    text = "empty" if value is None else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_functions(job: JobSpec) -> None:
    custom_loss = "" if job.data.loss == "cross_entropy" else job.data.loss
    named = {"dataset": job.data.dataset, "held_out_dataset": job.data.held_out_dataset, "loss": custom_loss}
    for key, value in named.items():
        file, _, function = value.rpartition(":")
        if value and not (file.endswith(".py") and function.isidentifier()):
            raise SpecError(
                f"`data.{key}` is {value!r}, not file.py:function", hint="write, say, `my_model.py:digits`."
            )


def anchored(job: JobSpec, folder: Path) -> JobSpec:
    """Return the job with its relative paths taken from `folder`."""

    def path(name: str) -> str:
        return os.path.normpath(folder / Path(name).expanduser()) if name else ""

    def function(name: str) -> str:
        file, colon, attribute = name.rpartition(":")
        return f"{path(file)}{colon}{attribute}"

    data = job.data
    texts = tuple(text if text == "stdlib" else path(text) for text in data.texts)
    anchored = replace(
        data,
        text=texts[0] if isinstance(data.text, str) else texts,
        tokens=path(data.tokens),
        dataset=function(data.dataset),
        held_out_dataset=function(data.held_out_dataset),
        loss=data.loss if data.loss == "cross_entropy" else function(data.loss),
    )
    model = function(job.module) if job.module else job.model
    return replace(job, model=model, weights=path(job.weights), data=anchored)


def override_from(pair: str) -> tuple[str, Any]:
    """Return key and value of a `KEY=VALUE` flag; the value is read as YAML reads one.

    Raises:
        SpecError: there is no `=`, or no key before it.
    """
    key, equals, value = pair.partition("=")
    if not equals or not key.strip():
        raise SpecError(f"`--set {pair}` is not KEY=VALUE", hint="write, say, `--set parallelism.data=2`.")
    return key.strip(), read_value(value, key=key.strip())
