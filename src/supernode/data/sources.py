"""Where do the tokens come from? Finds, checks and reads text files and token files.

What is wrong with a user's file raises `DataError`, which names the key and the file.
"""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from supernode.errors import DataError, MachineError

Tell = Callable[[str, float], None]
"""Told what is going on and which share of it is done, 0 to 1."""

PIECE = 256 * 1024
"""Bytes of text that are read and encoded at once; a token never crosses a piece."""
LEARNT_PIECES = 32
"""Pieces that a byte-pair encoding is learnt from: the first 8 MiB at most."""
SUFFIXES = (".md", ".py", ".txt")
_TOKENS_AT_ONCE = 2**22
_TESTS = frozenset({"dist-packages", "site-packages", "test", "tests"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file of text. `is_own`: the user named it, so it must be text; the standard library's files are taken as is."""

    path: Path
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one pass over the source finds: a digest of its content, its size in bytes or tokens, its largest token."""

    digest: str
    size: int
    largest: int = 255


def find_text(patterns: Iterable[str]) -> tuple[TextFile, ...]:
    """Return the text files that the patterns name, each once, in a fixed order.

    Args:
        patterns: files, glob patterns, folders (every .txt, .md and .py file below that is not in a hidden folder), or
            `stdlib` (the running Python's .py files without its tests and installed packages).
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        for path in _matches(pattern):
            found.setdefault(path, TextFile(path=path, is_own=pattern != "stdlib"))
    return tuple(found.values())


def _matches(pattern: str) -> list[Path]:
    if pattern == "stdlib":
        return _below(Path(sysconfig.get_paths()["stdlib"]), suffixes=(".py",), without=_TESTS)
    path = Path(pattern)
    try:
        if path.is_dir():
            return _below(path, suffixes=SUFFIXES, without=frozenset())
        if path.is_file():
            return [path]
        is_special = path.exists()
    except OSError as error:
        raise DataError(f"`data.text`: {pattern} cannot be read: {error.strerror}", hint="correct the path.") from error
    if is_special:
        raise DataError(f"`data.text`: {pattern} is not a regular file", hint="name a text file or a folder.")
    matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)]
    if not matches:
        is_glob = glob.has_magic(pattern)
        raise DataError(
            f"`data.text`: {'no file matches' if is_glob else 'there is no file'} {pattern}",
            hint="correct the path in `data.text` (relative ones start at the job file), or write `text: stdlib`.",
        )
    return matches


def _below(folder: Path, *, suffixes: tuple[str, ...], without: frozenset[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"`data.text`: {error.filename} cannot be read: {error.strerror}", hint="give yourself read permission."
        ) from error

    found: list[Path] = []
    for here, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__" and name not in without]
        found += [path for name in files if name.endswith(suffixes) and (path := Path(here, name)).is_file()]
    if not found:
        raise DataError(
            f"`data.text`: {folder} holds no {' or '.join(suffixes)} file",
            hint="name the files by a pattern, such as `text: corpus/**/*.log`.",
        )
    return sorted(found)


def survey_text(files: Iterable[TextFile], tell: Tell) -> Survey:
    """Return what the files hold, and check that the user's own are text in UTF-8."""
    files = tuple(files)
    digest, size = xxhash.xxh3_128(), 0
    for index, file in enumerate(files):
        decoder = codecs.getincrementaldecoder("utf-8")()
        for piece in _pieces(file.path):
            if file.is_own:
                _check_text(piece, decoder, file.path)
            digest.update(piece)
            size += len(piece)
        if file.is_own:
            _check_text(b"", decoder, file.path, final=True)
        digest.update(b"\n")
        tell("reading", (index + 1) / len(files))
    return Survey(digest=digest.hexdigest(), size=size + max(0, len(files) - 1) if size else 0)


def _check_text(piece: bytes, decoder: codecs.IncrementalDecoder, path: Path, *, final: bool = False) -> None:
    if b"\0" in piece:
        raise DataError(
            f"`data.text`: {path} holds NUL bytes, so it is no text",
            hint="leave the file out; token numbers go into `data.tokens`.",
        )
    try:
        decoder.decode(piece, final)
    except UnicodeDecodeError:
        raise DataError(
            f"`data.text`: {path} is not UTF-8", hint="convert the file to UTF-8, or leave it out."
        ) from None


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise DataError(
            f"`data.text`: {path} cannot be read: {error.strerror}",
            hint="give yourself read permission, or leave it out.",
        ) from error


def read_bytes(files: Iterable[TextFile]) -> Iterator[bytes]:
    """Return the files' bytes piece by piece, with a newline between two files."""
    for index, file in enumerate(files):
        if index:
            yield b"\n"
        yield from _pieces(file.path)


def read_text(files: Iterable[TextFile]) -> Iterator[str]:
    """Return the files' text piece by piece, with a newline between two files; undecodable bytes become U+FFFD."""
    for index, file in enumerate(files):
        if index:
            yield "\n"
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        yield from (decoder.decode(piece) for piece in _pieces(file.path))
        yield decoder.decode(b"", True)


def tokenizers() -> Any:
    """Return the library of byte-pair encodings."""
    try:
        import tokenizers as library
    except ImportError as error:
        raise MachineError(
            "`data.tokenizer: bpe:N` needs the library `tokenizers`, which is not installed",
            hint="pip install 'supernode-sdk[train]', or write `tokenizer: bytes`.",
        ) from error
    return library


def learn_bpe(texts: Iterable[str], size: int) -> Any:
    """Return a byte-level byte-pair encoding of at most `size` tokens, learnt from the first pieces of the text.

    It decodes to exactly what it encoded, and the same text gives the same encoding.
    """
    library = tokenizers()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_first(texts, nbytes=PIECE * LEARNT_PIECES), trainer=trainer)
    return bpe


def _first(texts: Iterable[str], *, nbytes: int) -> Iterator[str]:
    for text in texts:
        if nbytes <= 0:
            return
        yield text
        nbytes -= len(text)


def encode_bpe(bpe: Any, texts: Iterator[str]) -> Iterator[np.ndarray[Any, np.dtype[np.uint16]]]:
    """Return the tokens of the text, some pieces at a time, all cores at work."""
    while batch := list(islice(texts, 64)):
        for encoding in bpe.encode_batch(batch, add_special_tokens=False):
            yield np.asarray(encoding.ids, np.uint16)


def open_tokens(path: Path) -> np.ndarray[Any, Any]:
    """Return a file of token numbers as a memory map: a `.npy` of one dim, or raw little-endian uint16 (`.bin`)."""
    name = f"`data.tokens`: {path}"
    try:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
            raise DataError(f"{name} {problem}", hint="name a .npy or .bin file of token numbers.")
        if path.suffix == ".npy":
            return _open_npy(path, name)
        if path.suffix != ".bin":
            raise DataError(
                f"{name} is neither .npy nor .bin", hint="save it with `numpy.save`; text goes into `data.text`."
            )
        nbytes = path.stat().st_size
        if nbytes == 0 or nbytes % 2:
            raise DataError(
                f"{name} has {nbytes} bytes, and uint16 takes two each",
                hint="write it whole, with `tokens.astype('<u2').tofile(...)`.",
            )
        return np.memmap(path, "<u2", mode="r")
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}", hint="give yourself read permission.") from error


def _open_npy(path: Path, name: str) -> np.ndarray[Any, Any]:
    remedy = "save a one-dimensional integer array with `numpy.save`."
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{name} is not a plain .npy array: {str(error).splitlines()[0]}", hint=remedy) from None
    if not isinstance(tokens, np.ndarray):
        raise DataError(f"{name} holds several arrays", hint=remedy)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{name} holds {tokens.dtype} of shape {tokens.shape}, not a row of integers", hint=remedy)
    if tokens.size == 0:
        raise DataError(f"{name} is empty", hint=remedy)
    return tokens


def survey_tokens(tokens: np.ndarray[Any, Any], path: Path, tell: Tell) -> Survey:
    """Return what the token file holds, and check that every number fits uint16."""
    digest, largest = xxhash.xxh3_128(), 0
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        part = tokens[start : start + _TOKENS_AT_ONCE]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high > 65_535:
            raise DataError(
                f"`data.tokens`: {path} holds token {low if low < 0 else high}",
                hint="token numbers run from 0 to 65535; encode the text with a smaller vocabulary.",
            )
        largest = max(largest, high)
        digest.update(part.astype("<u2").tobytes())
        tell("reading", min(1.0, (start + _TOKENS_AT_ONCE) / len(tokens)))
    return Survey(digest=digest.hexdigest(), size=len(tokens), largest=largest)
