"""Which tensor of a file does each tensor of a model begin from? Names, shapes and what a config says must agree."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from supernode.errors import CheckpointError, ModelError
from supernode.foreign.look import Found, look
from supernode.foreign.naming import BLOCK, NAMINGS, Naming, heads_in_pairs, shapes_of
from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape

PREFIXES = ("", "model.", "module.", "model.module.", "app.model.")
"""What names may begin with: of a plain state dict, one under a key, one of a wrapped module, and both."""
_TRAINERS_OWN = ("optimizer", "optim", "optimizers", "lr_scheduler", "scheduler", "dataloader", "train_state")
"""Beginnings of names beside a model's that belong to a training run."""
EPSILON = 1e-5
"""Of our decoder's norms."""
OWN_MODULE = "train it as your own module: `model: file.py:function` that returns transformers' model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A tensor of a file that a tensor of ours begins from.

    Attributes:
        name: in the file.
        heads: whose rows lie in pairs there; 0 where rows lie as ours do.
        alike: others of the file that must hold the same, being ties of it.
    """

    name: str
    heads: int = 0
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a model begins from.

    Attributes:
        names: whose names the file has, for people.
        taken: by our name.
        left: names in the file that are no weights of the model, and left out.
    """

    found: Found
    names: str
    taken: Mapping[str, Taken]
    left: tuple[str, ...]

    def text(self) -> str:
        """Return it as a sentence for people."""
        roots = sorted({name.partition(".")[0] for name in self.left})
        left = f"; left out: {', '.join(roots)} ({len(self.left)})" if roots else ""
        return f"{len(self.taken)} tensors under the names of {self.names} from {self.found.path}{left}"


def match_decoder(found: Found, shape: DecoderShape) -> Match:
    """Return what our decoder begins from.

    Args:
        shape: of the whole model; a vocabulary of 0 is not known yet and fits any.

    Raises:
        CheckpointError: a tensor is missing, too many or of another shape; the message names it.
    """
    wanted = shapes_of(shape)
    head = "head.weight"
    best: tuple[int, str, str, dict[str, str]] = (0, "", "", {})
    for names, naming in NAMINGS.items():
        called = _called([*wanted, head], naming)
        for prefix in PREFIXES:
            count = sum(prefix + theirs in found.tensors for theirs in called.values())
            if count > best[0]:
                best = count, names, prefix, {ours: prefix + theirs for ours, theirs in called.items()}
    _, names, prefix, called = best
    if not names:
        raise _nothing_known(found, [NAMINGS[names].outside["norm.weight"] for names in ("ours", "llama", "titan")])
    naming = NAMINGS[names]
    _check_config(found, shape, names)
    unnamed = next((ours for ours in wanted if ours not in called), "")
    if unnamed:
        raise CheckpointError(
            f"{found.path} holds names of {names}, which have none for `{unnamed}`", hint="set `model.experts` to 0."
        )
    taken = {}
    for ours, size in wanted.items():
        theirs = called[ours]
        if theirs not in found.tensors:
            raise _missing(found, theirs, ours, shape)
        _check_shape(found, theirs, ours, size, shape)
        alike = (called[head],) if shape.tied and ours == "embedding.weight" and called[head] in found.tensors else ()
        taken[ours] = Taken(name=theirs, heads=heads_in_pairs(ours, naming, shape), alike=alike)
    known = {one for each in taken.values() for one in (each.name, *each.alike)}
    left, extra = _others(found, known, prefix)
    if extra := [name for name in extra if not name.endswith(naming.derived or ("\0",))]:
        deeper = f"{prefix}{naming.block.format(shape.layers)}."
        more = any(name.startswith(deeper) for name in extra)
        raise CheckpointError(
            f"{found.path} also holds `{extra[0]}` ({len(extra)} such), which our decoder of {shape.layers} layers "
            "does not have",
            hint=f"set `model.layers` to {_layers(found, prefix + naming.block)}." if more else OWN_MODULE,
        )
    return Match(found=found, names=names, taken=taken, left=left)


def match_module(found: Found, wanted: Mapping[str, tuple[int, ...]], ties: Iterable[Collection[str]] = ()) -> Match:
    """Return what a user's own module begins from, whose names are taken as they are.

    Args:
        wanted: shapes of its parameters and of the buffers that its state holds, by name.
        ties: names of each parameter that has several, of which `wanted` has one.

    Raises:
        CheckpointError: as of `match_decoder`.
    """
    others = {name: set(group) - {name} for group in ties for name in group}
    prefix = max(PREFIXES, key=lambda prefix: sum(prefix + name in found.tensors for name in wanted))
    taken = {}
    for name, size in wanted.items():
        there = [prefix + one for one in (name, *sorted(others.get(name, ()))) if prefix + one in found.tensors]
        if not there and found.kind == "ours" and f"buffer.0.{name}" in found.tensors:
            there = [f"buffer.0.{name}"]
        if not there:
            if not any(prefix + one in found.tensors for one in wanted):
                raise _nothing_known(found, list(wanted))
            near = difflib.get_close_matches(name, [one.removeprefix(prefix) for one in found.tensors], n=1)
            raise CheckpointError(
                f"{found.path} holds no `{prefix}{name}`, which the module has",
                hint=f"it holds `{prefix}{near[0]}`; let names agree." if near else "give weights of the same module.",
            )
        if found.shape(there[0]) != size:
            raise CheckpointError(
                f"`{there[0]}` is {list(found.shape(there[0]))} in {found.path} and {list(size)} in the module",
                hint="let the function that `model` names build the module in the weights' shape.",
            )
        taken[name] = Taken(name=there[0], alike=tuple(there[1:]))
    known = {one for each in taken.values() for one in (each.name, *each.alike)}
    left, extra = _others(found, known, prefix)
    if extra:
        raise CheckpointError(
            f"{found.path} also holds `{extra[0]}` ({len(extra)} such), which the module does not have",
            hint="let the function that `model` names build the module that the weights are of.",
        )
    return Match(found=found, names="your module", taken=taken, left=left)


def _called(wanted: Iterable[str], naming: Naming) -> dict[str, str]:
    called = {}
    for name in wanted:
        try:
            called[name] = naming.of(name)
        except ModelError:
            continue
    return called


def _others(found: Found, known: set[str], prefix: str) -> tuple[tuple[str, ...], list[str]]:
    """Return what else is there: names beside the model's, and names that would be of the model."""
    rest = [name for name in found.tensors if name not in known]
    beside = [
        name for name in rest
        if not name.startswith(prefix) or (not prefix and name.partition(".")[0] in _TRAINERS_OWN)
    ]  # fmt: skip
    return (*beside, *found.rest), sorted(set(rest) - set(beside))


def _nothing_known(found: Found, examples: list[str]) -> CheckpointError:
    theirs = next(iter(found.tensors), "")
    return CheckpointError(
        f"{found.path} holds {f'`{theirs}` and ' if theirs else ''}no tensor of the model such as "
        f"`{'` or `'.join(examples[:3])}`",
        hint="give weights of this model, or correct `model`.",
    )


def _missing(found: Found, theirs: str, ours: str, shape: DecoderShape) -> CheckpointError:
    hint = "give weights of this model, or correct `model`."
    if ours == "head.weight":
        hint = "set `model.tied` to true, as the weights are."
    elif matched := BLOCK.fullmatch(ours):
        block = theirs[: theirs.rindex(f".{matched[1]}.") + 1] + "{}"
        layers = _layers(found, block)
        if layers < shape.layers:
            hint = f"set `model.layers` to {layers}."
    return CheckpointError(f"{found.path} holds no `{theirs}`, from which `{ours}` would begin", hint=hint)


def _layers(found: Found, block: str) -> int:
    begins = block.partition("{}")[0]
    numbers = {name[len(begins) :].partition(".")[0] for name in found.tensors if name.startswith(begins)}
    return 1 + max((int(number) for number in numbers if number.isascii() and number.isdigit()), default=-1)


def _check_shape(found: Found, theirs: str, ours: str, size: tuple[int, ...], shape: DecoderShape) -> None:
    there = found.shape(theirs)
    if there == size or (
        not shape.vocabulary and ours in ("embedding.weight", "head.weight") and there[1:] == size[1:]
    ):
        return
    hint = "correct `model`."
    if len(there) == len(size) and len(there) in (1, 2):
        at = next(dim for dim in range(len(size)) if there[dim] != size[dim])
        last = ours.rpartition("mlp.")[2] if "mlp." in ours else ours.rpartition("attention.")[2]
        key = {
            ("embedding.weight", 0): "vocabulary", ("head.weight", 0): "vocabulary", ("gate.weight", 0): "hidden",
            ("up.weight", 0): "hidden", ("down.weight", 1): "hidden",
        }.get((last, at), "width")  # fmt: skip
        value = there[at]
        if last in ("key.weight", "value.weight") and at == 0:
            key, value = "kv_heads", there[0] // shape.head_width
        hint = f"set `model.{key}` to {value}."
    raise CheckpointError(
        f"`{theirs}` is {list(there)} in {found.path}, and `{ours}` is {list(size)} in this model", hint=hint
    )


def _check_config(found: Found, shape: DecoderShape, names: str) -> None:
    """Check what shapes do not tell, and would silently make another model."""
    config: Mapping[str, Any] = found.config
    if found.kind == "ours":
        for key in ("heads", "kv_heads"):
            ours = shape.key_heads if key == "kv_heads" else shape.heads
            theirs = config.get(key, ours) or config.get("heads")
            if theirs != ours:
                raise CheckpointError(
                    f"{found.path} is of {theirs} `{key}`, and `model.{key}` is {ours}",
                    hint=f"set `model.{key}` to {theirs}.",
                )
        return
    if names != "llama" or not config:
        return
    heads = config.get("num_attention_heads", shape.heads)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {}
    base = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    told: tuple[tuple[Any, Any, str, str], ...] = (
        (heads, shape.heads, "num_attention_heads", "heads"),
        (config.get("num_key_value_heads") or heads, shape.key_heads, "num_key_value_heads", "kv_heads"),
        (base, shape.rope_base, "rope_theta", "rope_base"),
        (bool(config.get("tie_word_embeddings", False)), shape.tied, "tie_word_embeddings", "tied"),
    )
    for theirs, ours, said, key in told:
        if theirs != ours:
            raise CheckpointError(
                f"{found.path}/config.json says {said} {theirs}, and `model.{key}` is {ours}",
                hint=f"set `model.{key}` to {str(theirs).lower() if isinstance(theirs, bool) else theirs}.",
            )
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    fixed: tuple[tuple[Any, Any, str], ...] = (
        (scaling, "default", "rope_type"),
        (config.get("hidden_act", "silu"), "silu", "hidden_act"),
        (config.get("rms_norm_eps", EPSILON), EPSILON, "rms_norm_eps"),
        (config.get("head_dim") or shape.head_width, shape.head_width, "head_dim"),
        (config.get("model_type", "llama"), "llama", "model_type"),
    )
    for theirs, ours, said in fixed:
        if theirs != ours:
            raise CheckpointError(
                f"{found.path}/config.json says {said} {theirs}, and our decoder has {ours}", hint=OWN_MODULE
            )


def check_weights(job: JobSpec, *, vocabulary: int = 0) -> None:
    """Check what a job begins from, as far as headers tell and before any rank starts.

    Args:
        vocabulary: of the data, once it is known; 0 leaves it to the model's own.

    Raises:
        CheckpointError: it is not there, damaged, or not of the job's decoder.
    """
    if not job.weights:
        return
    found = look(Path(job.weights))
    if (shape := job.shape) is not None:
        match_decoder(found, replace(shape, vocabulary=vocabulary or shape.vocabulary))
