"""What does a checkpoint of PyTorch hold? Its table is a pickle; it is read here as data, and nothing in it can act.

Names of classes in it stand for inert records, and names of anything else are refused, as is every instruction that
plain tables do not need. So a file that would run code is an error, whoever wrote it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from supernode.errors import CheckpointError

TABLE = ".metadata"
_MOST_BYTES = 2**28
"""Of a table: 8 million pieces of a tensor fit."""


class Record:
    """An object of a table, as its fields alone."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class Size(tuple[Any, ...]):
    """A shape, or an offset."""

    def __new__(cls, values: Any = ()) -> Size:
        return super().__new__(cls, values if isinstance(values, (tuple, list)) else ())

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a shape has no fields")


class Kind(str):
    """The name of a kind of numbers, or of a way to lay them."""

    __slots__ = ()


def _names(*values: Any) -> str:
    return ".".join(str(value) for value in values if isinstance(value, (str, int)))


_TORCH = "torch.distributed.checkpoint."
_KINDS = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip
_RECORDS = {
    _TORCH + "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    _TORCH + "filesystem": "_StorageInfo _StoragePrefix",
    _TORCH + "hf_storage": "_HFStorageInfo",
    "pathlib": "PosixPath PurePosixPath Path WindowsPath PureWindowsPath",
}


def _known() -> dict[tuple[str, str], Any]:
    """Return what each name in a table stands for: classes made for this one reading, so that none can be changed."""
    known: dict[tuple[str, str], Any] = {("torch", kind): Kind(kind) for kind in _KINDS}
    for module, names in _RECORDS.items():
        known |= {(module, name): type(name, (Record,), {}) for name in names.split()}
    known[("torch", "Size")] = type("Size", (Size,), {})
    known[("torch.serialization", "_get_layout")] = _names
    return known


class _Reader(pickle._Unpickler):
    """The interpreter of pickles that is written in Python, since one in C neither forgets instructions nor bounds."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known = _known()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[(module, name)]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of tensors needs") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")

    def build(self) -> None:
        """Give an object its fields, if it is a record; classes have none to give."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise pickle.UnpicklingError("it changes what is no record")
        self.stack[-1].__setstate__(state)

    def set_item(self) -> None:
        """Put one entry into a dictionary."""
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def set_items(self) -> None:
        """Put entries into a dictionary."""
        self._put(self.pop_mark())

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # Nested tuples would take for ever to hash.
        if type(target) is not dict or not all(isinstance(key, (str, int, Record)) for key in items[::2]):
            raise pickle.UnpicklingError("it holds a dictionary of what no table of tensors names")
        target.update(zip(items[::2], items[1::2], strict=True))


_ALLOWED = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "SHORT_BINSTRING", "BINSTRING",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "GLOBAL",
    "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE",
)  # fmt: skip
_STEPS: dict[int, Callable[[Any], None]] = {
    getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _ALLOWED
}
_STEPS |= {
    pickle.BUILD[0]: _Reader.build,
    pickle.SETITEM[0]: _Reader.set_item,
    pickle.SETITEMS[0]: _Reader.set_items,
}


class _Refusing(dict[int, Callable[[Any], None]]):
    def __missing__(self, step: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it holds instruction {step:#04x}, which no table of tensors needs")


_Reader.dispatch = _Refusing(_STEPS)


def read_table(folder: Path) -> Mapping[str, Any]:
    """Return the fields of the table of a checkpoint of `torch.distributed.checkpoint`.

    Raises:
        CheckpointError: it is missing, damaged, too large, or holds what could act.
    """
    path = folder / TABLE
    hint = "write the checkpoint again with `torch.distributed.checkpoint.save`, or give its weights as safetensors."
    try:
        if (nbytes := path.stat().st_size) > _MOST_BYTES:
            raise CheckpointError(f"{path} is {nbytes:,} bytes long, more than {_MOST_BYTES:,}", hint=hint)
        table = _Reader(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is not read: {error}", hint=hint) from error
    except (
        EOFError,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})", hint=hint) from error
    fields = table.state if isinstance(table, Record) else None
    wanted = ("state_dict_metadata", "storage_data")
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), dict) for key in wanted):
        raise CheckpointError(f"{path} holds no table of tensors", hint=hint)
    return fields
