"""What does the model read? Text or token files become two files of tokens, once, before the ranks start.

Every ⌈1 / `data.held_out`⌉-th block of 64 KiB of the token stream is held out, so that both parts hold the same kind
of text. Where that leaves one part without a single sample, the end of the stream is held out instead: the share asked
for, one sample at least.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from supernode.data.sources import (
    Survey,
    Tell,
    TextFile,
    encode_bpe,
    find_text,
    learn_bpe,
    open_tokens,
    read_bytes,
    read_text,
    survey_text,
    survey_tokens,
    tokenizers,
)
from supernode.errors import DataError, MachineError
from supernode.schema.job import JobSpec

BLOCK = 64 * 1024
"""Bytes of the token stream that go to one part together."""
_VERSION = 1
_DESCRIPTION = "corpus.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens on disk, ready to be cut into samples.

    Attributes:
        train: raw tokens to train on.
        held_out: raw tokens to evaluate on, one sample at least.
        dtype: of both files, little-endian; `uint8` are the bytes of text.
        vocabulary: token kinds; every token is below it.
        fingerprint: of the tokens and how they are split and cut into samples.
        tokenizer: the byte-pair encoding, or None.
        digests: XXH3-128 of the two files, train first.
    """

    train: Path
    held_out: Path
    dtype: Literal["uint8", "uint16"]
    train_tokens: int
    held_out_tokens: int
    vocabulary: int
    fingerprint: str
    tokenizer: Path | None
    digests: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What the tokens are made from. `files` is empty where `tokens` are there already."""

    key: str
    name: str
    survey: Survey
    dtype: Literal["uint8", "uint16"]
    vocabulary: int
    files: tuple[TextFile, ...] = ()
    tokens: np.ndarray[Any, Any] | None = None


def prepare(job: JobSpec, folder: Path, *, progress: Callable[[str, float], None] | None = None) -> Corpus:
    """Return the job's tokens in `folder`: those already there if they are of the same content and settings.

    Args:
        folder: is made; holds train.bin, held_out.bin, corpus.json, and tokenizer.json of a byte-pair encoding. One
            process at a time.
        progress: told what is going on, and which share of it is done.

    Raises:
        DataError: the data is missing, unreadable, of the wrong kind, too short, or beyond the model's vocabulary.
        MachineError: the folder cannot be written, or a library is missing.
    """
    assert not job.data.dataset, "a data set of the user's own is loaded by the ranks"
    tell = progress or _silent
    source = _source(job, tell)
    _check_vocabulary(job, source)
    settings = [_VERSION, source.survey.digest, source.key, job.data.tokenizer, job.data.sequence, job.data.held_out]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(settings).encode())
    found = _found(folder, fingerprint)
    if found:
        return found
    with _writing(folder), tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as name:
        draft = Path(name)
        stream = _stream(source, job, draft, tell)
        train, held_out = _split(stream, source, job, draft)
        corpus = Corpus(
            train=folder / "train.bin",
            held_out=folder / "held_out.bin",
            dtype=source.dtype,
            train_tokens=train,
            held_out_tokens=held_out,
            vocabulary=source.vocabulary,
            fingerprint=fingerprint,
            tokenizer=folder / _TOKENIZER if (draft / _TOKENIZER).exists() else None,
            digests=(_digest(draft / "train.bin"), _digest(draft / "held_out.bin")),
        )
        _publish(corpus, draft, folder)
    return corpus


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(2**22):
            hasher.update(piece)
    return hasher.hexdigest()


def open_corpus(folder: Path, *, verify: bool = True) -> Corpus:
    """Return the corpus that `prepare` left in `folder`.

    Args:
        verify: compare every byte with what was written; else the sizes alone.

    Raises:
        DataError: there is none, or it is damaged.
    """
    remedy = "run the job again, which prepares its data."
    try:
        record = json.loads((folder / _DESCRIPTION).read_text("utf-8"))
        paths = {key: folder / record[key] for key in ("train", "held_out")}
        tokenizer = folder / record["tokenizer"] if record["tokenizer"] else None
        digests = tuple(str(digest) for digest in record["digests"])
        corpus = Corpus(**(record | paths | {"tokenizer": tokenizer, "digests": digests}))
        width = np.dtype(corpus.dtype).itemsize
        for part, tokens in ((corpus.train, corpus.train_tokens), (corpus.held_out, corpus.held_out_tokens)):
            if part.stat().st_size != tokens * width:
                raise DataError(f"{part} has {part.stat().st_size} bytes instead of {tokens * width}", hint=remedy)
        for part, digest in zip((corpus.train, corpus.held_out), digests if verify else (), strict=verify):
            if _digest(part) != digest:
                raise DataError(f"{part} is not what was prepared: its digest differs", hint=remedy)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}", hint=remedy) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / _DESCRIPTION} is damaged: {error}", hint=remedy) from error
    return corpus


def load_tokens(part: Path, dtype: str) -> np.memmap[Any, Any]:
    """Return one part of a corpus as a read-only memory map."""
    try:
        return np.memmap(part, np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{part} cannot be read: {error}", hint="run the job again, which prepares its data."
        ) from error


def encode(corpus: Corpus, text: str) -> list[int]:
    """Return the tokens of `text`.

    Raises:
        DataError: the corpus came as numbers, without a tokenizer.
    """
    if corpus.tokenizer:
        ids: list[int] = tokenizers().Tokenizer.from_file(str(corpus.tokenizer)).encode(text).ids
        return ids
    _check_bytes(corpus)
    return list(text.encode(errors="replace"))


def decode(corpus: Corpus, tokens: Sequence[int]) -> str:
    """Return the text of `tokens`; what is no character becomes U+FFFD.

    Raises:
        DataError: the corpus came as numbers, without a tokenizer.
    """
    if corpus.tokenizer:
        text: str = tokenizers().Tokenizer.from_file(str(corpus.tokenizer)).decode([int(token) for token in tokens])
        return text
    _check_bytes(corpus)
    # A model may have more token kinds than there are bytes; 0xFF never stands in UTF-8.
    return bytes(int(token) if 0 <= token < 256 else 0xFF for token in tokens).decode(errors="replace")


def _check_bytes(corpus: Corpus) -> None:
    if corpus.dtype != "uint8":
        raise DataError("the data came as token numbers, without a tokenizer", hint="set `sample.tokens` to 0.")


def _silent(stage: str, share: float) -> None:
    del stage, share


def _source(job: JobSpec, tell: Tell) -> _Source:
    if job.data.tokens:
        path = Path(job.data.tokens)
        tokens = open_tokens(path)
        survey = survey_tokens(tokens, path, tell)
        return _Source(
            key="data.tokens",
            name=str(path),
            survey=survey,
            dtype="uint16",
            vocabulary=survey.largest + 1,
            tokens=tokens,
        )
    is_bytes = job.data.tokenizer == "bytes"
    if not is_bytes:
        tokenizers()
    files = find_text(job.data.texts)
    survey = survey_text(files, tell)
    name = ", ".join(job.data.texts)
    if not survey.size:
        raise DataError(f"`data.text`: {name} is empty", hint="name files that hold text, or write `text: stdlib`.")
    return _Source(
        key="data.text",
        name=name,
        survey=survey,
        dtype="uint8" if is_bytes else "uint16",
        vocabulary=256 if is_bytes else int(job.data.tokenizer.removeprefix("bpe:")),
        files=files,
    )


def _check_vocabulary(job: JobSpec, source: _Source) -> None:
    most = job.shape.vocabulary if job.shape else 0
    if most and source.vocabulary > most:
        raise DataError(
            f"`{source.key}`: {source.name} has tokens up to {source.vocabulary - 1}, and `model.vocabulary` is {most}",
            hint=f"set `model.vocabulary` to 0 (the data's own) or to at least {source.vocabulary}.",
        )


def _found(folder: Path, fingerprint: str) -> Corpus | None:
    if not (folder / _DESCRIPTION).is_file():
        return None
    try:
        corpus = open_corpus(folder)
    except DataError:
        return None  # made anew
    return corpus if corpus.fingerprint == fingerprint else None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(".draft-*"):  # of a process that was killed
            shutil.rmtree(left_over)
        yield
    except OSError as error:
        raise MachineError(
            f"the training data cannot be written to {folder}: {error.strerror}",
            hint="free disk space, or choose a folder that is yours to write.",
        ) from error


def _stream(source: _Source, job: JobSpec, draft: Path, tell: Tell) -> np.ndarray[Any, Any]:
    """Return all tokens in one row; those of text go through a file, so that memory holds a piece at most."""
    if source.tokens is not None:
        return source.tokens
    path = draft / "stream.bin"
    with path.open("wb") as file:
        if source.dtype == "uint8":
            file.writelines(read_bytes(source.files))
        else:
            tell("learning the tokenizer", 0.0)
            bpe = learn_bpe(read_text(source.files), source.vocabulary)
            (draft / _TOKENIZER).write_text(bpe.to_str(), "utf-8")
            for tokens in encode_bpe(bpe, _counted(read_text(source.files), source.survey.size, tell)):
                file.write(tokens.astype("<u2").tobytes())
    return load_tokens(path, source.dtype)


def _counted(texts: Iterator[str], size: int, tell: Tell) -> Iterator[str]:
    done = 0
    for text in texts:
        done += len(text)
        tell("encoding", min(1.0, done / size))
        yield text


def _split(stream: np.ndarray[Any, Any], source: _Source, job: JobSpec, draft: Path) -> tuple[int, int]:
    """Write both parts; return the tokens in each."""
    sample = job.data.sequence + 1
    if len(stream) < 2 * sample:
        longest = len(stream) // 2 - 1
        raise DataError(
            f"`{source.key}`: {source.name} gives {len(stream)} tokens; `data.sequence` {job.data.sequence} needs"
            f" {2 * sample}, for one sample to train on and one to hold out",
            hint="give more data" + (f", or set `data.sequence` to {longest} or less." if longest > 1 else "."),
        )
    width = np.dtype(source.dtype).itemsize
    counts = [0, 0]
    with (draft / "train.bin").open("wb") as train, (draft / "held_out.bin").open("wb") as held_out:
        for span, is_held_out in _spans(len(stream), block=BLOCK // width, sample=sample, share=job.data.held_out):
            (held_out if is_held_out else train).write(stream[span].astype(f"<u{width}").tobytes())
            counts[is_held_out] += span.stop - span.start
    return counts[0], counts[1]


def _spans(total: int, *, block: int, sample: int, share: float) -> Iterator[tuple[slice, bool]]:
    """Yield consecutive stretches of the stream, and whether each is held out."""
    period = math.ceil(1 / share) if share * total >= 1 else total
    starts = range(0, total, block)
    held = sum(min(block, total - start) for start in starts[period // 2 :: period])
    if share and sample <= held <= total - sample:
        for index, start in enumerate(starts):
            yield slice(start, min(start + block, total)), index % period == period // 2
        return
    cut = min(total - max(sample, int(total * share)), total - sample)
    for start in range(0, cut, block):
        yield slice(start, min(start + block, cut)), False
    yield slice(cut, total), True


def _publish(corpus: Corpus, draft: Path, folder: Path) -> None:
    """Move the files into place, the description last: a folder without it holds no corpus."""
    record = asdict(corpus)
    for key in ("train", "held_out", "tokenizer"):
        record[key] = record[key].name if record[key] else None
    (draft / _DESCRIPTION).write_text(json.dumps(record, indent=1), "utf-8")
    (folder / _DESCRIPTION).unlink(missing_ok=True)
    for path in (corpus.train, corpus.held_out, corpus.tokenizer, folder / _DESCRIPTION):
        if path:
            os.replace(draft / path.name, path)
