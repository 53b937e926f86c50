"""The user's own `file.py:function`: load the file, call the function, check what it returns."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import xxhash
from torch import nn

from supernode.errors import DataError, ModelError, SupernodeError
from supernode.registry import did_you_mean


def load_function(reference: str, *, key: str, error: type[SupernodeError]) -> Callable[..., Any]:
    """Return the function that `file.py:function` names.

    Args:
        key: the job's key that holds it; named in errors.
        error: kind to raise.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"`{key}` names {file}, which is no file", hint=f"correct the path in `{key}`.")
    # One module per file, however many keys name it: a class that model and data share is one class.
    module_name = f"supernode_user_{path.stem}_{xxhash.xxh3_64_hexdigest(str(path.resolve()).encode())}"
    if module_name in sys.modules:
        return _function_of(sys.modules[module_name], path, name, key=key, error=error)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # For good: functions may import their neighbours when they run.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as cause:
        del sys.modules[module_name]
        raise error(f"{path} fails at import: {_last(cause)}", hint=f"correct the file that `{key}` names.") from cause
    return _function_of(module, path, name, key=key, error=error)


def _function_of(
    module: ModuleType, path: Path, name: str, *, key: str, error: type[SupernodeError]
) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        known = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise error(f"{path} has no function `{name}`", hint=f"`{key}`: {did_you_mean(name, known)}")
    function: Callable[..., Any] = found
    return function


def call(reference: str, *arguments: object, key: str, error: type[SupernodeError]) -> Any:
    """Call the function that `file.py:function` names; what it raises becomes an error with a remedy."""
    function = load_function(reference, key=key, error=error)
    try:
        return function(*arguments)
    except (Exception, SystemExit) as cause:
        raise error(f"{reference} raised {_last(cause)}", hint=f"correct the function that `{key}` names.") from cause


def build_user_model(reference: str, *, has_values: bool = True) -> nn.Module:
    """Return the user's model.

    Args:
        has_values: its parameters must have values.

    Raises:
        ModelError: the file or function fails, or returns something else.
    """
    model = call(reference, key="model", error=ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{reference} returned a {type(model).__name__}, not an nn.Module", hint="return the module itself."
        )
    lazy = [
        n for n, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter) or (has_values and p.is_meta)
    ]
    if lazy:
        raise ModelError(
            f"{reference} leaves `{lazy[0]}` without values", hint="give lazy modules their sizes and build on the CPU."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{reference} has no parameter to train", hint="leave `requires_grad` on for some parameter.")
    return model


def build_user_data(reference: str, *, key: str) -> Any:
    """Return the user's data set: sized and indexable (`__len__`, `__getitem__`), giving (input, target).

    Raises:
        DataError: the file or function fails, or returns something else.
    """
    data = call(reference, key=key, error=DataError)
    if isinstance(data, torch.utils.data.DataLoader):
        data = data.dataset
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{reference} returned a {type(data).__name__} without `__len__` and `__getitem__`",
            hint="return a map-style data set: a position in a stream could not be found again after a failure.",
        )
    try:
        count = len(data)
    except Exception as cause:  # whatever the user's data set raises is theirs to read
        raise DataError(
            f"{reference} returned a {type(data).__name__} whose length raised {_last(cause)}",
            hint="correct the data set's `__len__`.",
        ) from cause
    if count == 0:
        raise DataError(f"{reference} returned an empty data set", hint="give it at least one sample.")
    return data


def blame(error: BaseException, references: Iterable[str]) -> str:
    """Return the user's line that an error came from, with what it says; empty where it came from elsewhere.

    Args:
        references: `file.py:function` of the job's own code.
    """
    files = {Path(reference.rpartition(":")[0]).resolve() for reference in references if reference}
    cause: BaseException | None = error
    deepest = ""
    while cause is not None:  # The pipeline wraps what a stage raises.
        for frame in traceback.extract_tb(cause.__traceback__):
            if Path(frame.filename).resolve() in files:
                said = (str(cause).splitlines() or [""])[0]
                deepest = f"{type(cause).__name__}: {said} ({frame.filename}, line {frame.lineno})"
        cause = cause.__cause__ or cause.__context__
    return deepest


def _last(cause: BaseException) -> str:
    frame = traceback.extract_tb(cause.__traceback__)[-1:]
    where = f" ({Path(frame[0].filename).name}, line {frame[0].lineno})" if frame else ""
    return f"{type(cause).__name__}: {cause}{where}"
