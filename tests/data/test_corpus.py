from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supernode.data.corpus import BLOCK, decode, encode, load_tokens, open_corpus, prepare
from supernode.data.sources import find_text
from supernode.errors import DataError, MachineError
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.model import DecoderShape

WORDS = "the quick brown fox jumps over the lazy dog; "


def job(*, vocabulary: int = 0, **data: Any) -> JobSpec:
    return JobSpec(model=DecoderShape(vocabulary=vocabulary), data=DataSpec(**({"sequence": 8} | data)))


def text_file(folder: Path, text: str = WORDS * 50, name: str = "a.txt") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def tokens_file(folder: Path, tokens: Any) -> str:
    np.save(folder / "t.npy", tokens)
    return str(folder / "t.npy")


def test_bytes_of_text_are_split_without_loss(tmp_path: Path) -> None:
    corpus = prepare(job(text=text_file(tmp_path), held_out=0.1), tmp_path / "out")

    train, held_out = load_tokens(corpus.train, corpus.dtype), load_tokens(corpus.held_out, corpus.dtype)
    assert bytes(train) + bytes(held_out) == (WORDS * 50).encode()
    assert len(held_out) == corpus.held_out_tokens == int(0.1 * len(WORDS) * 50)
    assert (corpus.dtype, corpus.vocabulary, corpus.tokenizer) == ("uint8", 256, None)


def test_every_so_many_blocks_are_held_out(tmp_path: Path) -> None:
    stream = np.arange(40 * BLOCK, dtype=np.uint64) // BLOCK  # the number of its block, at every place
    (tmp_path / "t.txt").write_bytes(stream.astype(np.uint8).tobytes().replace(b"\0", b"!"))

    corpus = prepare(job(text=str(tmp_path / "t.txt"), held_out=0.1), tmp_path / "out")

    # A period of 10 blocks; the middle one of each is held out.
    held_out = load_tokens(corpus.held_out, corpus.dtype)
    assert held_out.tolist() == np.repeat([5, 15, 25, 35], BLOCK).tolist()
    assert corpus.train_tokens == 36 * BLOCK


@pytest.mark.parametrize("share", [0.0, 1e-300, 0.001, 0.5])
def test_both_parts_hold_a_sample_whatever_the_share(tmp_path: Path, share: float) -> None:
    corpus = prepare(job(text=text_file(tmp_path, "x" * 18), held_out=share), tmp_path / "out")

    assert (corpus.train_tokens, corpus.held_out_tokens) == (9, 9)


def test_files_come_in_a_fixed_order_each_once_with_a_newline_between(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c.py", "d.log", "sub/e.txt", ".git/f.txt", "__pycache__/g.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 10)

    corpus = prepare(job(text=(f"{tmp_path}/b*", str(tmp_path)), held_out=0), tmp_path / "out")

    joined = bytes(load_tokens(corpus.train, "uint8")) + bytes(load_tokens(corpus.held_out, "uint8"))
    assert joined.decode() == "\n".join(name * 10 for name in ("b.txt", "a.md", "c.py", "sub/e.txt"))


def test_the_standard_library_is_read_without_its_tests() -> None:
    files = find_text(["stdlib"])

    names = {file.path.name for file in files}
    assert {"argparse.py", "typing.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(file.path.parts[-3:]) for file in files)
    assert [file.path for file in files] == sorted(file.path for file in files)


def test_byte_pairs_decode_to_what_was_encoded_and_are_the_same_each_time(tmp_path: Path) -> None:
    spec = job(text=text_file(tmp_path, (WORDS + "naïve → é\n") * 50), tokenizer="bpe:300")

    one, two = prepare(spec, tmp_path / "one"), prepare(spec, tmp_path / "two")

    assert one.tokenizer
    assert two.tokenizer
    assert one.tokenizer.read_text() == two.tokenizer.read_text()
    assert one.train.read_bytes() == two.train.read_bytes()
    assert (one.dtype, one.vocabulary) == ("uint16", 300)
    assert one.train_tokens + one.held_out_tokens < len(WORDS) * 50
    assert decode(one, encode(one, "a naïve\t→ fox")) == "a naïve\t→ fox"
    assert decode(one, load_tokens(one.train, one.dtype)[:40].tolist()).startswith("the quick")


def test_bytes_decode_to_what_was_encoded_and_strange_tokens_are_shown(tmp_path: Path) -> None:
    corpus = prepare(job(text=text_file(tmp_path)), tmp_path / "out")

    assert decode(corpus, encode(corpus, "naïve")) == "naïve"
    assert decode(corpus, [97, 50_000, 98]) == "a\ufffdb"


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_token_files_are_taken_as_they_are(tmp_path: Path, kind: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 500, 400)
    tokens[7] = 499
    file = tmp_path / f"t.{kind}"
    np.save(file, tokens) if kind == "npy" else tokens.astype("<u2").tofile(file)

    corpus = prepare(job(tokens=str(file), held_out=0.1), tmp_path / "out")

    parts = [load_tokens(part, corpus.dtype) for part in (corpus.train, corpus.held_out)]
    assert np.concatenate(parts).tolist() == tokens.tolist()
    assert corpus.vocabulary == 500
    with pytest.raises(DataError, match="without a tokenizer"):
        decode(corpus, [1])


def test_a_corpus_is_used_again_only_for_the_same_content_and_settings(tmp_path: Path) -> None:
    text, out = text_file(tmp_path), tmp_path / "out"
    first = prepare(job(text=text), out)
    written = first.train.stat().st_mtime_ns

    assert prepare(job(text=text), out) == first == open_corpus(out)
    assert first.train.stat().st_mtime_ns == written

    prints = {first.fingerprint, prepare(job(text=text, sequence=9), out).fingerprint}
    text_file(tmp_path, WORDS * 51)
    prints.add(prepare(job(text=text), out).fingerprint)
    assert len(prints) == 3
    assert sorted(path.name for path in out.iterdir()) == ["corpus.json", "held_out.bin", "train.bin"]


def test_a_damaged_corpus_is_made_anew_and_left_over_drafts_go(tmp_path: Path) -> None:
    spec, out = job(text=text_file(tmp_path)), tmp_path / "out"
    first = prepare(spec, out)
    first.train.write_bytes(b"short")
    (out / ".draft-old").mkdir()

    with pytest.raises(DataError, match="5 bytes instead of"):
        open_corpus(out)
    assert prepare(spec, out) == first == open_corpus(out)
    assert not list(out.glob(".draft-*"))


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"train": 3, "held_out": 1, "tokenizer": null}'])
def test_a_folder_without_a_corpus_is_a_data_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "corpus.json").write_text(content)

    with pytest.raises(DataError, match=r"corpus\.json") as caught:
        open_corpus(tmp_path)

    assert caught.value.hint


def test_progress_runs_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []

    prepare(job(text=text_file(tmp_path)), tmp_path / "out", progress=lambda stage, share: told.append((stage, share)))

    assert told[-1] == ("reading", 1.0)


def written(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


BAD_TEXT: list[tuple[str, Callable[[Path], str], str]] = [
    ("missing", lambda at: f"{at}/none.txt", "there is no file"),
    ("no match", lambda at: f"{at}/*.txt", "no file matches"),
    ("empty file", lambda at: written(at, "e.txt", b""), "is empty"),
    ("folder without text", lambda at: str(at), "holds no"),
    ("NUL", lambda at: written(at, "b.txt", b"PK\0\3" * 99), "NUL"),
    ("Latin-1", lambda at: written(at, "l.txt", "é".encode("latin-1") * 99), "UTF-8"),
    ("cut character", lambda at: written(at, "c.txt", b"x" * 99 + "é".encode()[:1]), "UTF-8"),
    ("too short", lambda at: written(at, "s.txt", b"x" * 17), "17 tokens"),
    ("device", lambda at: "/dev/zero", "not a regular file"),
    ("long name", lambda at: f"{at}/{'x' * 300}", "cannot be read"),
]
BAD_TOKENS: list[tuple[str, Callable[[Path], str], str]] = [
    ("missing", lambda at: f"{at}/none.npy", "does not exist"),
    ("folder", lambda at: str(at), "is a folder"),
    ("other kind", lambda at: written(at, "t.csv", b"1,2"), "neither .npy nor .bin"),
    ("odd bytes", lambda at: written(at, "t.bin", b"123"), "3 bytes"),
    ("empty bin", lambda at: written(at, "t.bin", b""), "0 bytes"),
    ("empty npy", lambda at: written(at, "t.npy", b""), "not a plain .npy"),
    ("no npy", lambda at: written(at, "t.npy", b"text" * 30), "not a plain .npy"),
    ("cut npy", lambda at: written(at, "t.npy", Path(tokens_file(at, np.arange(99))).read_bytes()[:-9]), "plain .npy"),
    ("no tokens", lambda at: tokens_file(at, np.arange(0)), "is empty"),
    ("objects", lambda at: tokens_file(at, np.array([{}, {}])), "not a plain .npy"),
    ("fractions", lambda at: tokens_file(at, np.ones(99)), "float64"),
    ("truth values", lambda at: tokens_file(at, np.ones(99, bool)), "bool"),
    ("matrix", lambda at: tokens_file(at, np.ones((9, 9), int)), "shape (9, 9)"),
    ("negative", lambda at: tokens_file(at, np.arange(-1, 99)), "token -1"),
    ("too large", lambda at: tokens_file(at, np.full(99, 70_000)), "token 70000"),
    ("too short", lambda at: tokens_file(at, np.arange(17)), "17 tokens"),
]


@pytest.mark.parametrize(
    ("key", "make", "message"),
    [("text", *case[1:]) for case in BAD_TEXT] + [("tokens", *case[1:]) for case in BAD_TOKENS],
    ids=[f"text: {case[0]}" for case in BAD_TEXT] + [f"tokens: {case[0]}" for case in BAD_TOKENS],
)
def test_bad_data_is_named_with_a_remedy(tmp_path: Path, key: str, make: Callable[[Path], str], message: str) -> None:
    name = make(tmp_path)

    with pytest.raises(DataError) as caught:
        prepare(job(**{key: name}), tmp_path / "out")

    assert f"`data.{key}`" in caught.value.message
    assert name in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("key", ["text", "tokens"])
def test_data_that_may_not_be_read_is_named(tmp_path: Path, key: str) -> None:
    name = text_file(tmp_path) if key == "text" else tokens_file(tmp_path, np.arange(99))
    os.chmod(name, 0)

    with pytest.raises(DataError, match="Permission denied") as caught:
        prepare(job(**{key: name}), tmp_path / "out")

    assert name in caught.value.message


@pytest.mark.parametrize("key", ["text", "tokens"])
def test_tokens_beyond_the_models_vocabulary_are_refused(tmp_path: Path, key: str) -> None:
    name = text_file(tmp_path) if key == "text" else tokens_file(tmp_path, np.arange(256))

    with pytest.raises(DataError, match=r"up to 255, and `model\.vocabulary` is 255") as caught:
        prepare(job(vocabulary=255, **{key: name}), tmp_path / "out")
    assert "at least 256" in caught.value.hint
    assert prepare(job(vocabulary=256, **{key: name}), tmp_path / "out").vocabulary == 256


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Make writing fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_is_a_machine_error_and_leaves_nothing(tmp_path: Path) -> None:
    spec = job(text=text_file(tmp_path))

    with files_of_at_most(100), pytest.raises(MachineError, match="cannot be written") as caught:
        prepare(spec, tmp_path / "out")

    assert "disk space" in caught.value.hint
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_made_is_a_machine_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        prepare(job(text=text_file(tmp_path)), tmp_path / "a.txt" / "out")


def test_a_missing_tokenizer_library_is_a_machine_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(MachineError, match="tokenizers") as caught:
        prepare(job(text=text_file(tmp_path), tokenizer="bpe:300"), tmp_path / "out")

    assert "pip install 'supernode-sdk[train]'" in caught.value.hint


def test_the_description_names_files_beside_it_so_the_folder_can_move(tmp_path: Path) -> None:
    prepare(job(text=text_file(tmp_path)), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")

    corpus = open_corpus(tmp_path / "moved")

    assert corpus.train == tmp_path / "moved" / "train.bin"
    assert json.loads((tmp_path / "moved" / "corpus.json").read_text())["train"] == "train.bin"


@pytest.mark.parametrize("part", ["train.bin", "held_out.bin"])
def test_tokens_that_are_no_longer_what_was_prepared_are_refused(tmp_path: Path, part: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 400)
    prepare(job(text=(str(text),)), tmp_path / "out")
    damaged = tmp_path / "out" / part
    damaged.write_bytes(bytes(damaged.stat().st_size))

    with pytest.raises(DataError, match=f"{part} is not what was prepared"):
        open_corpus(tmp_path / "out")
    assert open_corpus(tmp_path / "out", verify=False).train_tokens > 0
